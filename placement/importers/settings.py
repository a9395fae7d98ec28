"""What importers share: settings that remember which of them were used, and the recipe that comes out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

NO_COUNTERPART = "has no counterpart here"
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$([A-Za-z_]\w*)")


class ForeignConfigError(ValueError):
    """A configuration that cannot be read; the message names the setting."""


@dataclass(frozen=True)
class Ignored:
    """A setting that the recipe does not say, and why."""

    name: str
    value: Any
    reason: str = NO_COUNTERPART

    def __str__(self) -> str:
        return f"{self.name} = {self.value}: {self.reason}"


@dataclass(frozen=True)
class Imported:
    """A configuration as a recipe.

    Attributes:
        recipe: its keys, as YAML would read them.
        demands: for each role that has devices, how many.
        n_devices: how many the other system takes in all.
        ignored: every setting that the recipe does not say.
    """

    recipe: Mapping[str, Any]
    demands: Mapping[str, int]
    n_devices: int
    ignored: tuple[Ignored, ...]

    def to_yaml(self) -> str:
        """The recipe as a file."""
        return yaml.safe_dump(dict(self.recipe), sort_keys=False, default_flow_style=None, width=100)


class Settings:
    """Settings by name. `take` marks those that are used; the others end up ignored."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {name: value for name, value in values.items() if value not in (None, {}, [])}
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

    def ignore(self, name: str, reason: str) -> None:
        """Say why `name`, where it was given, is not in the recipe."""
        if name in self._values and all(name != other.name for other in self._ignored):
            self._used.add(name)
            self._ignored.append(Ignored(name, self._values[name], reason))

    def ignored(self, reasons: Sequence[tuple[str, str]] = ()) -> tuple[Ignored, ...]:
        """What was ignored with its reason, then what nobody asked for, by the first pattern that matches."""
        left = [name for name in self._values if name not in self._used]
        found = [
            Ignored(
                name,
                self._values[name],
                next((reason for pattern, reason in reasons if re.search(pattern, name)), NO_COUNTERPART),
            )
            for name in left
        ]
        return (*self._ignored, *found)

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


def words(text: str) -> list[str]:
    """A shell command, or a script, as words: comments gone, its own variables put in."""
    text = re.sub(r"\\[ \t]*\n", " ", text)
    try:
        found = shlex.split(text, comments=True)
    except ValueError as error:
        raise ForeignConfigError(f"not readable as a command line: {error}") from None
    variables: dict[str, str] = {}
    out = []
    for word in found:
        word = _VARIABLE.sub(lambda match: _value_of(match, variables), word)
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            variables[name] = value
        out.append(word)
    return out


def _value_of(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name, default = match[1] or match[3], match[2]
    return variables.get(name, match[0] if default is None else default)
