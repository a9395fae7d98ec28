"""A pool's choices as a tree: ranges of shapes, then one shape, then the options of its roles one by one.

Every node of the tree knows the least seconds of each operation that anything below it has, so a tuple of
nodes, one per pool, bounds all plans below it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rolemesh.placement.costs import RoleCost
from rolemesh.placement.search.problem import Floats, Problem, RoleTable, moved
from rolemesh.placement.search.space import Shape

_ROUNDING = 1e-12  # relative; sums of bytes in another order differ by less
_PARTS = 4  # a range of shapes is cut into about so many
_FEW = 6  # a range of so many shapes is cut into single ones
Room = tuple[int, ...]  # devices of each class that a pool may take


@dataclass(frozen=True)
class Reach:
    """What a choice may still become: per operation the least and the most of its members' least seconds."""

    least: Floats  # [operations]
    most: Floats  # [operations]
    penalty: float


class Pick:
    """One shape, and for each role the options that are left: indices into its table. Decided: one each."""

    def __init__(
        self, pool: PoolChoices, shape: Shape, penalty: float, left: tuple[NDArray[np.int64], ...]
    ) -> None:
        self.pool, self.shape, self.left = pool, shape, left
        self.tables = pool.tables(shape)
        self.need = shape.need
        self._penalty = penalty
        self._movers: dict[str, list[RoleCost]] = {}

    @cached_property
    def reach(self) -> Reach:
        """Bounds over the options that are left."""
        least = np.zeros(len(self.pool.problem.names))
        most = np.zeros_like(least)
        penalty = self._penalty
        for role, table, left in zip(self.pool.roles, self.tables, self.left, strict=True):
            rows = table.seconds[left]
            columns = self.pool.problem.columns[role]
            least[columns], most[columns] = rows.min(axis=0), rows.max(axis=0)
            penalty += table.penalty[left].min()
        return Reach(least, most, penalty)

    @cached_property
    def decided(self) -> bool:
        """Whether every role has one option."""
        return all(len(left) == 1 for left in self.left)

    def within(self, room: Room) -> Reach | None:
        """Bounds when the pool may take `room`; None when the shape is larger."""
        return self.reach if all(n <= r for n, r in zip(self.need, room, strict=True)) else None

    def movers(self, role: str) -> list[RoleCost]:
        """For each of the ways in which `role` may take part in a transfer one of its options."""
        if role not in self._movers:
            k = self.pool.roles.index(role)
            options = [self.tables[k].costs[i] for i in self.left[k]]
            self._movers[role] = list({moved(cost): cost for cost in options}.values())
        return self._movers[role]

    def costs(self) -> list[tuple[str, RoleCost]]:
        """Every role's first option that is left; all there is when it is decided."""
        return [(r, t.costs[k[0]]) for r, t, k in zip(self.pool.roles, self.tables, self.left, strict=True)]

    def children(self, room: Room) -> list[Pick]:
        """A child for every option of the role whose options differ most; what no longer fits is gone."""
        undecided = [k for k, left in enumerate(self.left) if len(left) > 1]
        k = max(undecided, key=lambda k: (self._spread(k), -k))
        order = np.argsort(self.tables[k].seconds[self.left[k]].sum(axis=1), kind="stable")
        made = []
        for option in self.left[k][order]:
            left = (*self.left[:k], np.array([option]), *self.left[k + 1 :])
            made.append(self.pool.pick(self.shape, self._penalty, left))
        return [pick for pick in made if pick is not None]

    def _spread(self, k: int) -> float:
        rows = self.tables[k].seconds[self.left[k]]
        return float((rows.max(axis=0) - rows.min(axis=0)).sum())


class Range:
    """Shapes `start` to `stop` of a pool's list."""

    decided = False

    def __init__(self, pool: PoolChoices, start: int, stop: int) -> None:
        self.pool, self.start, self.stop = pool, start, stop
        self._reach: dict[Room, Reach | None] = {}
        self._needs = pool.needs[start:stop]
        self.need = tuple(int(n) for n in self._needs.min(axis=0))
        self._most_need = tuple(int(n) for n in self._needs.max(axis=0))

    def within(self, room: Room) -> Reach | None:
        """Bounds over the shapes that `room` holds; None when there is none."""
        key = tuple(map(min, room, self._most_need))
        if key not in self._reach:
            self._reach[key] = self._within(key)
        return self._reach[key]

    def _within(self, room: Room) -> Reach | None:
        fits = (self._needs <= np.array(room)).all(axis=1)
        if not fits.any():
            return None
        rows = self.pool.least[self.start : self.stop][fits]
        penalty = float(self.pool.penalty[self.start : self.stop][fits].min())
        return Reach(rows.min(axis=0), rows.max(axis=0), penalty)

    def children(self, room: Room) -> list[Pick | Range]:
        """Narrower ranges, or single shapes when few are left; those that `room` does not hold are gone."""
        fits = (self._needs <= np.array(room)).all(axis=1)
        indices = [self.start + int(i) for i in np.flatnonzero(fits)]
        if len(indices) <= _FEW:
            return [pick for i in indices if (pick := self.pool.start(i)) is not None]
        parts = self._parts(indices[0], indices[-1] + 1)
        return [self.pool.range(start, stop) for start, stop in parts]

    def _parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """One part per device type; within a type, parts whose sizes grow by a constant factor."""
        types = self.pool.types
        if types[start] != types[stop - 1]:
            middle = next(i for i in range(start, stop) if types[i] != types[start])
            return [(start, middle), (middle, stop)]
        worlds = self.pool.worlds
        low, high = worlds[start], worlds[stop - 1]
        cuts = [low * (high / low) ** (part / _PARTS) for part in range(1, _PARTS)]
        at = [start, *(start + int(np.searchsorted(worlds[start:stop], cut)) for cut in cuts), stop]
        parts = [(a, b) for a, b in itertools.pairwise(at) if a < b]
        if len(parts) == 1:  # equal sizes
            middle = (start + stop) // 2
            return [(start, middle), (middle, stop)]
        return parts


class PoolChoices:
    """All choices of a pool that holds `roles`: shapes on which each of them has an option that fits."""

    def __init__(self, problem: Problem, roles: tuple[str, ...], shapes: Sequence[Shape]) -> None:
        self.problem, self.roles = problem, roles
        self._ranges: dict[tuple[int, int], Range] = {}
        self._starts: dict[int, Pick | None] = {}
        allowed = [shape for shape in shapes if all(problem.allowed(role, shape) for role in roles)]
        self.shapes = [s for s in allowed if all(problem.table(role, s.devices) for role in roles)]
        self.shapes = [shape for shape in self.shapes if self._may_fit(shape)]
        self.types = [shape.devices.device_type for shape in self.shapes]
        self.worlds = np.array([shape.devices.world for shape in self.shapes])
        self.needs = np.array([shape.need for shape in self.shapes], dtype=int).reshape(
            len(self.shapes), len(problem.space.classes)
        )
        self._unmet = [
            sum(pin.weight for role in roles for pin in problem.unmet(role, shape)) for shape in self.shapes
        ]
        self.least = np.zeros((len(self.shapes), len(problem.names)))
        self.penalty = np.array(self._unmet, dtype=float)
        for i, shape in enumerate(self.shapes):
            for role, table in zip(roles, self.tables(shape), strict=True):
                self.least[i, problem.columns[role]] = table.seconds.min(axis=0)
                self.penalty[i] += table.penalty.min()

    def root(self) -> Range | None:
        """All of them; None when there is none."""
        return self.range(0, len(self.shapes)) if self.shapes else None

    def tables(self, shape: Shape) -> list[RoleTable]:
        """The options of each role there."""
        tables = [self.problem.table(role, shape.devices) for role in self.roles]
        return [table for table in tables if table is not None]

    def range(self, start: int, stop: int) -> Range:
        """Shapes `start` to `stop`."""
        if (start, stop) not in self._ranges:
            self._ranges[start, stop] = Range(self, start, stop)
        return self._ranges[start, stop]

    def start(self, i: int) -> Pick | None:
        """The i-th shape with all options; None when they do not fit together."""
        if i not in self._starts:
            left = tuple(np.arange(len(table.costs)) for table in self.tables(self.shapes[i]))
            self._starts[i] = self.pick(self.shapes[i], self._unmet[i], left)
        return self._starts[i]

    def pick(self, shape: Shape, penalty: float, left: tuple[NDArray[np.int64], ...]) -> Pick | None:
        """The choice with the options of `left` that fit beside some of the others; None when none do."""
        narrowed = self._narrow(shape, list(left))
        if narrowed is None:
            return None
        pick = Pick(self, shape, penalty, narrowed)
        if pick.decided and not self.problem.fits(pick.costs(), shape.devices.device_type):
            return None
        return pick

    def _may_fit(self, shape: Shape) -> bool:
        left = [np.arange(len(table.costs)) for table in self.tables(shape)]
        return self._narrow(shape, left) is not None

    def _narrow(self, shape: Shape, left: list[NDArray[np.int64]]) -> tuple[NDArray[np.int64], ...] | None:
        """Drop options that exceed the memory even beside the smallest of the others, until none does."""
        device_type = shape.devices.device_type
        device = self.problem.device_bytes[device_type] * (1 + _ROUNDING)
        host = self.problem.host_bytes[device_type] * (1 + _ROUNDING)
        tables = self.tables(shape)
        changed = True
        while changed:
            changed = False
            resident = [float(t.resident[k].min()) for t, k in zip(tables, left, strict=True)]
            hosted = [float(t.host[k].min()) for t, k in zip(tables, left, strict=True)]
            works = [float(t.working[k].min()) for t, k in zip(tables, left, strict=True)]
            moves = [t.moving[k].min(axis=0) for t, k in zip(tables, left, strict=True)]
            for k, table in enumerate(tables):
                mine = left[k]
                working = np.maximum(
                    table.working[mine], max((w for i, w in enumerate(works) if i != k), default=0.0)
                )
                others: Floats = sum((m for i, m in enumerate(moves) if i != k), np.zeros(len(moves[k])))
                moving = (table.moving[mine] + others).max(axis=1, initial=0.0)
                needed = table.resident[mine] + (sum(resident) - resident[k]) + np.maximum(working, moving)
                fits = (needed <= device) & (table.host[mine] + (sum(hosted) - hosted[k]) <= host)
                if not fits.all():
                    left[k], changed = mine[fits], True
                    if not len(left[k]):
                        return None
                    break
        return tuple(left)
