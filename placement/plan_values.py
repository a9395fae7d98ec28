"""What a plan says of a role beside its layout, and what it predicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from rolemesh.placement.costs import Recompute
from rolemesh.placement.hints import did_you_mean
from rolemesh.placement.memory.items import GIB
from rolemesh.placement.pools import PlacementError

_DIGITS = 5  # significant digits that a plan keeps of a prediction: more than any model is right about


@dataclass(frozen=True)
class RoleSettings:
    """How a role runs on its devices; None leaves it to the recipe. Raises PlacementError.

    Attributes:
        micro_batch: sequences of one forward pass on a replica; for generation the most that run at once.
        recompute: activations made anew in the backward pass: none, selective or full.
        offload: weights and optimizer state wait in host memory while other roles of the pool run.
    """

    micro_batch: int | None = None
    recompute: Recompute | None = None
    offload: bool | None = None

    def __post_init__(self) -> None:
        if self.micro_batch is not None and (type(self.micro_batch) is not int or self.micro_batch < 1):
            raise PlacementError(
                f"micro_batch must be a whole number of at least 1 sequence, got {self.micro_batch!r}"
            )
        if self.recompute is not None and self.recompute not in get_args(Recompute):
            known = get_args(Recompute)
            raise PlacementError(
                f"recompute is one of {', '.join(known)}, got {self.recompute!r}"
                f"{did_you_mean(str(self.recompute), known)}"
            )
        if self.offload is not None and type(self.offload) is not bool:
            raise PlacementError(f"offload must be true or false, got {self.offload!r}")

    def __str__(self) -> str:
        said = [f"micro-batch {self.micro_batch}"] if self.micro_batch is not None else []
        said += [f"recompute {self.recompute}"] if self.recompute is not None else []
        return ", ".join(said + ["offload"] * bool(self.offload))


@dataclass(frozen=True)
class Prediction:
    """What the cost models say of one step; every part may be missing. Figures keep five digits.

    Attributes:
        step_s: seconds of a step.
        operations_s: seconds of each operation, by name.
        memory: for each role, bytes on the device of its heaviest rank, by item.
        host: for each role, bytes of host memory for each device.
        peak: for each pool, bytes of the fullest device at its fullest moment, all roles together.
        limit: for each pool, bytes that a device has for them.

    Raises PlacementError for a figure that is no number of at least 0.
    """

    step_s: float | None = None
    operations_s: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    host: Mapping[str, float] = field(default_factory=dict)
    peak: Mapping[str, float] = field(default_factory=dict)
    limit: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.step_s is not None:
            object.__setattr__(self, "step_s", rounded(self.step_s, "step_s"))
        object.__setattr__(self, "operations_s", _each(self.operations_s, rounded, "operations_s"))
        for name in ("host", "peak", "limit"):
            object.__setattr__(self, name, _each(getattr(self, name), _bytes, name))
        memory = {role: _each(items, _bytes, f"memory.{role}") for role, items in self.memory.items()}
        object.__setattr__(self, "memory", memory)

    def __bool__(self) -> bool:
        return any(getattr(self, part.name) not in (None, {}) for part in fields(self))

    def role_bytes(self, role: str) -> float:
        """Bytes of all items of a role; 0 where nothing is predicted."""
        return sum(self.memory.get(role, {}).values())


def rounded(value: Any, name: str) -> float:
    """A figure as plans keep it. Raises PlacementError unless it is a number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise PlacementError(f"predicted {name} must be a number of at least 0, got {value!r}")
    return float(f"{value:.{_DIGITS}g}")


def say_nodes(entries: Sequence[tuple[str, int]]) -> str:
    """`n0: 8, n1: 4`; from three on, equal nodes that are numbered through as `n[0-15]: 8`."""
    runs: list[list[tuple[str, int]]] = []
    for name, count in entries:
        last = runs[-1][-1] if runs else ("", 0)
        follows = count == last[1] and name == _next(last[0])
        runs = [*runs[:-1], [*runs[-1], (name, count)]] if follows else [*runs, [(name, count)]]
    said = []
    for run in runs:
        (first, count), (last_name, _) = run[0], run[-1]
        if len(run) < 3:
            said += [f"{name}: {n}" for name, n in run]
        else:
            stem = first.rstrip("0123456789")
            said.append(f"{stem}[{first[len(stem) :]}-{last_name[len(stem) :]}]: {count}")
    return ", ".join(said)


def _next(name: str) -> str:
    """The name with its last number one higher; empty when it ends in none."""
    stem = name.rstrip("0123456789")
    digits = name[len(stem) :]
    return f"{stem}{int(digits) + 1:0{len(digits)}d}" if digits else ""


def _bytes(value: Any, name: str) -> float:
    """Bytes whose GiB have few digits; a division by a power of two is exact, so they survive a file."""
    return rounded(value / GIB if isinstance(value, int | float) else value, name) * GIB


def _each(given: Mapping[str, Any], convert: Callable[[Any, str], float], name: str) -> dict[str, float]:
    return {key: convert(value, f"{name}.{key}") for key, value in given.items()}
