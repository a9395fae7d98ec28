"""`rolemesh import`: another system's command line as a recipe, and what became of each setting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolemesh.launch.config import parse_recipe
from rolemesh.launch.fields import RecipeError
from rolemesh.placement.importers import IMPORTERS, ForeignConfigError, Imported, import_config

_WIDTH = 60  # of a column; names and values beyond it stand as they are


def read_foreign(
    system: str, path: Path, overrides: Sequence[str], variables: Sequence[str] = ()
) -> Imported:
    """The configuration or script at `path`; `variables` are shell variables as NAME=VALUE.

    Raises RecipeError for a system, a file, a variable or values that cannot be read, and for settings that
    contradict each other here.
    """
    if system not in IMPORTERS:
        raise RecipeError(f"{system}: there are importers for {', '.join(IMPORTERS)}")
    try:
        found = import_config(system, path.read_text(), overrides, _variables(variables))
    except OSError as error:
        raise RecipeError(f"no configuration at {path}: {error.strerror}") from error
    except ForeignConfigError as error:
        raise RecipeError(f"{path}: {error}") from error
    try:
        parse_recipe(found.to_yaml(), path.parent)
    except RecipeError as error:
        raise RecipeError(f"{path}: what it says is no recipe: {error}") from error
    return found


def _variables(items: Sequence[str]) -> Mapping[str, str]:
    pairs = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            raise RecipeError(f"--var {item}: write NAME=VALUE")
        pairs[name] = value
    return pairs


def import_table(found: Imported) -> list[str]:
    """A line for every setting, once: what it became, or that it was ignored and whether results change."""
    rows = [(m.name, _short(m.value), m.key or "-", _short(m.means), m.how) for m in found.mapped]
    lines = ["in the recipe:", *_columns([("old key", "value", "new key", "value", "arithmetic"), *rows])]
    ignored = [*found.ignored, *found.without_effect]
    for harmless, title in (
        (False, "ignored, changes results:"),
        (True, "ignored, harmless:"),
    ):
        rows_of = [(i.name, _short(i.value), i.reason) for i in ignored if i.harmless == harmless]
        lines += [title, *_columns(rows_of)] if rows_of else []
    lines += [f"note: ${name} is not set in the script: --var {name}=VALUE sets it" for name in found.unset]
    return lines


def written(system: str, path: Path, found: Imported) -> str:
    """The recipe as a file's text, and what is not in it as comments."""
    left = [f"# ignored: {setting}" for setting in found.ignored]
    return "\n".join([f"# from {path.name} ({system})", found.to_yaml().rstrip(), *left]) + "\n"


def _short(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ", ".join(value)
    return str(value)


def _columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    rows = list(rows)
    if not rows:
        return
    widths = [min(_WIDTH, max(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
    for row in rows:
        yield ("  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))).rstrip()
