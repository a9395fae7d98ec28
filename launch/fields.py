"""How a recipe key is declared: `key` for a field, `Section` for the dataclass that holds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any


class RecipeError(ValueError):
    """A recipe that can't run as it is written; the message names the dotted key and what to write."""


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
    shown: str = "",
    later: Mapping[Any, str] | None = None,
) -> Any:
    """A recipe field. Without `default` the key is required.

    Args:
        verl: the dotted name of the same option in verl, where there is one.
        at_least, above, at_most: bounds of a number.
        path: a file or folder; made absolute when the recipe is loaded.
        shown: how the default is described where it isn't a constant.
        later: values that are part of the format but not of this version, with what to use instead.
    """
    metadata = {"doc": doc, "unit": unit, "verl": verl, "path": path, "shown": shown, "later": later or {}}
    metadata |= {"at_least": at_least, "above": above, "at_most": at_most}
    if isinstance(default, dict | type):
        factory = default if isinstance(default, type) else dict
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of every section: checks the bounds that `key` declared."""

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
