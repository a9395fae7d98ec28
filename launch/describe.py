"""The recipe's keys as text: `rolemesh schema` and docs/recipe.md."""

from __future__ import annotations

import typing
from fractions import Fraction
from typing import Any

from rolemesh.launch.config import covers, show
from rolemesh.launch.fields import Key, RecipeError, declared, section_of, without_none
from rolemesh.launch.schema import Recipe
from rolemesh.launch.suggest import unknown_key

_TYPES = {int: "int", float: "float", str: "text", bool: "true | false", Fraction: "fraction"}


def describe(path: str = "") -> str:
    """Type, unit, default, verl's name and meaning of a key, of a section's keys, or of all.

    Raises RecipeError for a key that doesn't exist, naming the nearest.
    """
    keys = list(declared(Recipe))
    chosen = [k for k in keys if not path or covers(path, k.path)]
    if not chosen:
        raise RecipeError(unknown_key(path, None, [k.path for k in keys if "." not in k.path]))
    return "\n".join(_paragraph(k) for k in chosen if len(chosen) == 1 or not section_of(k.type))


def reference() -> str:
    """The key tables of docs/recipe.md, one per root section, as Markdown."""
    keys = list(declared(Recipe))
    parts = []
    for root in (k for k in keys if "." not in k.path):
        parts.append(f"### `{root.path}`\n\n{root.metadata['doc']}\n")
        parts.append("| key | type | default | meaning | in verl |\n|---|---|---|---|---|")
        inside = [k for k in keys if covers(root.path, k.path) and k is not root and not section_of(k.type)]
        parts.extend(_row(k) for k in inside)
        parts.append("")
    return "\n".join(parts)


def type_name(hint: Any) -> str:
    """A declared type in the words of the docs."""
    hint = without_none(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " | ".join(map(str, args))
    if origin is tuple:
        return f"list of {type_name(args[0])}"
    if origin is dict:
        return f"mapping of {type_name(args[1])}"
    return "mapping" if section_of(hint) else _TYPES[hint]


def _default(key: Key) -> str:
    if key.required:
        return "required"
    return key.metadata["shown"] or ("" if section_of(key.type) else show(key.default))


def _bounds(key: Key) -> str:
    words = {"at_least": "at least", "above": "above", "at_most": "at most"}
    given = [f"{words[name]} {key.metadata[name]}" for name in words if key.metadata[name] is not None]
    return ", ".join(given)


def _paragraph(key: Key) -> str:
    head = f"{key.path}: {type_name(key.type)}"
    extras = [key.metadata["unit"], _bounds(key)]
    head += "".join(f", {extra}" for extra in extras if extra)
    default = _default(key)
    lines = [
        head
        + (f" (default: {default})" if default not in ("", "required") else f" ({default})" * bool(default))
    ]
    lines.append(f"    {key.metadata['doc']}")
    lines += [f"    verl: {key.metadata['verl']}"] if key.metadata["verl"] else []
    return "\n".join(lines)


def _row(key: Key) -> str:
    kind = type_name(key.type).replace("|", "\\|")
    unit = f", {key.metadata['unit']}" if key.metadata["unit"] else ""
    bounds = f" ({_bounds(key)})" if _bounds(key) else ""
    verl = ", ".join(f"`{name}`" for name in key.metadata["verl"].split(", ") if name)
    default = _default(key)
    return f"| `{key.path}` | {kind}{unit} | {default} | {key.metadata['doc']}{bounds} | {verl} |"
