"""What importers share: settings that remember which of them were used, and the recipe that comes out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

NO_COUNTERPART = "has no counterpart here"

_SECRET = re.compile(r"(^|[._])(use_wandb|api_key|secret|password|(.*_)?token)$")

Reason = tuple[str, str, bool]  # a pattern of names, why they are not in the recipe, whether that is harmless


class ForeignConfigError(ValueError):
    """A configuration that cannot be read; the message names the setting."""


@dataclass(frozen=True)
class Ignored:
    """A setting that the recipe does not say, why, and whether the run learns the same without it."""

    name: str
    value: Any
    reason: str = NO_COUNTERPART
    harmless: bool = False

    def __str__(self) -> str:
        return f"{self.name} = {self.value}: {self.reason}"


@dataclass(frozen=True)
class Mapped:
    """A setting that the recipe says: under which dotted `key`, with which value, by which arithmetic."""

    name: str
    value: Any
    key: str
    means: Any
    how: str = ""


@dataclass(frozen=True)
class Imported:
    """A configuration as a recipe.

    Attributes:
        recipe: its keys, as YAML would read them.
        demands: for each role that has devices, how many.
        n_devices: how many the other system takes in all.
        ignored: every setting that the recipe does not say.
        mapped: every setting that it says.
        without_effect: settings that are null, or that were taken out. Each setting is in one of the three.
        unset: variables of the script that nobody sets.
    """

    recipe: Mapping[str, Any]
    demands: Mapping[str, int]
    n_devices: int
    ignored: tuple[Ignored, ...]
    mapped: tuple[Mapped, ...] = ()
    without_effect: tuple[Ignored, ...] = ()
    unset: tuple[str, ...] = ()

    def to_yaml(self) -> str:
        """The recipe as a file."""
        return yaml.safe_dump(dict(self.recipe), sort_keys=False, default_flow_style=None, width=100)


class Settings:
    """Settings by name. `take` marks those that are used; the others end up ignored."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {name: value for name, value in values.items() if value not in (None, {}, [])}
        self._nothing = {name: value for name, value in values.items() if name not in self._values}
        self._used: set[str] = set()
        self._ignored: list[Ignored] = []

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def under(self, prefix: str) -> bool:
        """Whether any setting stands below `prefix`."""
        return any(name.startswith(f"{prefix}.") for name in self._values)

    def take(self, name: str, default: Any = None) -> Any:
        """The value, or the other system's default."""
        self._used.add(name)
        return self._values.get(name, default)

    def first(self, *names: str, default: Any = None) -> Any:
        """The value of the first of several names for the same thing; all count as used."""
        values = [self.take(name) for name in names]
        return next((value for value in values if value is not None), default)

    def count(self, name: str, default: int = 0) -> int:
        """A whole number. Raises ForeignConfigError naming the setting."""
        return int(self._number(name, default, whole=True))

    def number(self, name: str, default: float = 0.0) -> float:
        """A number. Raises ForeignConfigError naming the setting."""
        return self._number(name, default, whole=False)

    def flag(self, name: str, default: bool = False) -> bool:
        """A switch. Raises ForeignConfigError naming the setting."""
        value = self.take(name, default)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise ForeignConfigError(f"{name} must be true or false, got {value!r}")
        return value

    def ignore(self, name: str, reason: str, *, harmless: bool = False) -> None:
        """Say why `name`, where it was given, is not in the recipe."""
        if name in self._values and all(name != other.name for other in self._ignored):
            self._used.add(name)
            self._ignored.append(Ignored(name, self._shown(name), reason, harmless))

    def ignored(self, reasons: Sequence[Reason] = ()) -> tuple[Ignored, ...]:
        """What was ignored with its reason, then what nobody asked for, by the first pattern that matches."""
        found = []
        for name in self._values:
            if name not in self._used:
                why = next((rest for pattern, *rest in reasons if re.search(pattern, name)), [NO_COUNTERPART])
                found.append(Ignored(name, self._shown(name), *why))
        return (*self._ignored, *found)

    def _shown(self, name: str) -> Any:
        """The value, but not a secret's: tables and recipes are passed around."""
        value = self._values[name]
        return "***" if isinstance(value, str) and _SECRET.search(name) else value

    def nothing(self) -> tuple[Ignored, ...]:
        """Settings that are null or empty: as if they were left out."""
        return tuple(
            Ignored(name, value, "says nothing: as if it were left out", True)
            for name, value in self._nothing.items()
        )

    def mapped(
        self, keys: Mapping[str, tuple[str, str]], recipe: Mapping[str, Any]
    ) -> tuple[list[Mapped], list[Ignored]]:
        """Where the settings that were used are in the recipe, and those of them that it need not say.

        `keys` gives for a setting its dotted key (or several of them, with commas; empty: it only decides
        which others count) and the arithmetic.
        """
        told = {other.name for other in self._ignored}
        said, unsaid = [], []
        for name in (name for name in self._values if name in self._used and name not in told):
            key, how = keys[name]
            means = [value for part in key.split(", ") if (value := _at(recipe, part)) is not None]
            if means or not key:
                said.append(Mapped(name, self._values[name], key, means[0] if means else None, how))
            else:
                reason = f"does not count in this run, so there is no {key}"
                unsaid.append(Ignored(name, self._values[name], reason, True))
        return said, unsaid

    def _number(self, name: str, default: float, *, whole: bool) -> float:
        value = self.take(name, default)
        try:
            number = float(value)
            if isinstance(value, bool) or (whole and number != int(number)):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            what = "a whole number" if whole else "a number"
            raise ForeignConfigError(f"{name} must be {what}, got {value!r}: give its value") from None
        return number


def _at(tree: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key, None where there is none."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def tidy(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping without what says nothing: None and empty mappings, at any depth."""
    out = {}
    for name, value in tree.items():
        kept = tidy(value) if isinstance(value, Mapping) else value
        if kept is not None and kept != {}:
            out[name] = kept
    return out


def placed(pools: Sequence[tuple[Sequence[str], int, int]], roles: Sequence[str]) -> dict[str, Any]:
    """`cluster` and `placement` for pools of (roles, nodes, devices per node): the fewest equal nodes."""
    made = {
        "_".join(held): {
            "roles": [role for role in roles if role in held],
            "nodes": nodes,
            "per_node": per_node,
        }
        for held, nodes, per_node in pools
    }
    cluster = {
        "nodes": sum(nodes for _, nodes, _ in pools),
        "per_node": max(per_node for _, _, per_node in pools),
    }
    placement = {"strategy": "colocate"} if len(made) == 1 else {"pools": made}
    return {"cluster": cluster, "placement": placement}
