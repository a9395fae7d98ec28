"""How a recipe key is declared: `key` for a field, `Section` for the dataclass that holds it."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from types import UnionType
from typing import Any, ClassVar


class RecipeError(ValueError):
    """A recipe that can't run as it is written; the message names the dotted key and what to write."""


class InfeasibleError(RecipeError):
    """A recipe that is in order, but that no plan on these devices can run."""


def key(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    *,
    unit: str = "",
    verl: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    path: bool = False,
    words: tuple[str, ...] = (),
    shown: str = "",
    later: Mapping[Any, str] | None = None,
) -> Any:
    """A recipe field. Without `default` the key is required.

    Args:
        verl: the dotted name of the same option in verl, where there is one; with a leading dot, below
            the verl name of the section that holds it.
        at_least, above, at_most: bounds of a number.
        path: a file or folder; made absolute when the recipe is loaded.
        words: values of a path that are none.
        shown: how the default is described where it isn't a constant.
        later: values that are part of the format but not of this version, with what to use instead.
    """
    metadata = {"doc": doc, "unit": unit, "verl": verl, "path": path, "shown": shown, "later": later or {}}
    metadata["words"] = words
    metadata |= {"at_least": at_least, "above": above, "at_most": at_most}
    if isinstance(default, dict | type):
        factory = default if isinstance(default, type) else dict
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of every section: checks the bounds that `key` declared.

    `scalar` names the key that a bare value stands for (`actor: X` is `{path: X}`). `later_keys` are
    keys of the format that this version refuses, with what holds instead.
    """

    scalar: ClassVar[str] = ""
    later_keys: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int | float | Fraction) and not isinstance(value, bool):
                _check_bounds(f.name, value, f.metadata)


def _check_bounds(name: str, value: float | Fraction, metadata: Mapping[str, Any]) -> None:
    tests = {
        "at least": (metadata.get("at_least"), lambda bound: value >= bound),
        "above": (metadata.get("above"), lambda bound: value > bound),
        "at most": (metadata.get("at_most"), lambda bound: value <= bound),
    }
    for words, (bound, holds) in tests.items():
        if bound is not None and not holds(bound):
            raise RecipeError(f"{name} is {value}, but must be {words} {bound}")


@dataclass(frozen=True)
class Key:
    """One declared key: `path` is dotted, with `NAME` where the user chooses a name."""

    path: str
    type: Any
    default: Any
    metadata: Mapping[str, Any]

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING


def members(section: type[Section]) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Key name to (field, type) of one section; a trailing underscore keeps Python's words free (`in_`)."""
    hints = _hints(section)  # type: ignore[arg-type]  # classes are hashable, mypy looks at their instances
    return {
        f.name.rstrip("_"): (f, hints[f.name]) for f in dataclasses.fields(section) if "doc" in f.metadata
    }


@functools.cache
def _hints(section: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(section)


def without_none(hint: Any) -> Any:
    """`X` of `X | None`."""
    if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union:
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def section_of(hint: Any) -> type[Section] | None:
    """The section that a field of this type holds, directly, optionally or by name in a mapping."""
    hint = without_none(hint)
    if typing.get_origin(hint) is dict:
        hint = typing.get_args(hint)[1]
    return hint if isinstance(hint, type) and issubclass(hint, Section) else None


def declared(section: type[Section], prefix: str = "", verl: str = "") -> Iterator[Key]:
    """Every key below `section`, in order, the sections themselves before their keys.

    `verl` is put before verl names that start with a dot: sections used by several roles.
    """
    for name, (f, hint) in members(section).items():
        ours = f.metadata["verl"]
        theirs = (verl and verl + ours) if ours.startswith(".") else ours
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        yield Key(prefix + name, hint, default, {**f.metadata, "verl": theirs})
        if inner := section_of(hint):
            by_name = "NAME." if typing.get_origin(hint) is dict else ""
            yield from declared(inner, f"{prefix}{name}.{by_name}", theirs)
