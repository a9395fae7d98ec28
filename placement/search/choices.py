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

from rolemesh.placement.costs import RoleCost
from rolemesh.placement.search.problem import Floats, Left, Problem
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
    """One shape, and for each role of the pool the options that are left. Decided: one each."""

    def __init__(self, pool: PoolChoices, shape: Shape, penalty: float, left: tuple[Left, ...]) -> None:
        self.pool, self.shape, self.left = pool, shape, left
        self.need = shape.need
        self._penalty = penalty
        self.decided = all(len(mine) == 1 for mine in left)

    @cached_property
    def reach(self) -> Reach:
        """Bounds over the options that are left."""
        problem = self.pool.problem
        least, most = np.zeros(len(problem.names)), np.zeros(len(problem.names))
        for role, left in zip(self.pool.roles, self.left, strict=True):
            least[problem.columns[role]], most[problem.columns[role]] = left.least, left.most
        return Reach(least, most, self._penalty + sum(left.penalty for left in self.left))

    def within(self, room: Room) -> Reach | None:
        """Bounds when the pool may take `room`; None when the shape is larger."""
        return self.reach if all(n <= r for n, r in zip(self.need, room, strict=True)) else None

    def movers(self, role: str) -> list[RoleCost]:
        """For each of the ways in which `role` may take part in a transfer one of its options."""
        return self.left[self.pool.roles.index(role)].movers

    def costs(self) -> list[tuple[str, RoleCost]]:
        """Every role's first option that is left; all there is when it is decided."""
        return [
            (r, left.table.costs[left.indices[0]]) for r, left in zip(self.pool.roles, self.left, strict=True)
        ]

    def children(self, room: Room) -> list[Choice]:
        """A child for every option of the role whose options differ most; see `fitting` for their memory."""
        undecided = [k for k, left in enumerate(self.left) if len(left) > 1]
        k = max(undecided, key=lambda k: (self.left[k].spread_s, -k))
        return [
            Pick(self.pool, self.shape, self._penalty, (*self.left[:k], one, *self.left[k + 1 :]))
            for one in self.left[k].single
        ]

    def fitting(self) -> Pick | None:
        """The same without the options that do not fit beside any others; None when none are left."""
        if len(self.left) == 1:
            return self  # tables hold what fits alone
        device_type = self.shape.devices.device_type
        left = _narrow(
            list(self.left),
            self.pool.problem.device_bytes[device_type],
            self.pool.problem.host_bytes[device_type],
        )
        if left is None:
            return None
        pick = self if left == self.left else Pick(self.pool, self.shape, self._penalty, left)
        if pick.decided and not self.pool.problem.fits(pick.costs(), device_type):
            return None
        return pick


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

    def children(self, room: Room) -> list[Choice]:
        """Narrower ranges, or single shapes when few are left; those that `room` does not hold are gone."""
        fits = (self._needs <= np.array(room)).all(axis=1)
        indices = [self.start + int(i) for i in np.flatnonzero(fits)]
        if len(indices) <= _FEW:
            singles = [self.pool.single(i, ask=self.stop - self.start == 1) for i in indices]
            return [single for single in singles if single is not None]
        parts = self._parts(indices[0], indices[-1] + 1)
        return [self.pool.range(start, stop) for start, stop in parts]

    def fitting(self) -> Range:
        """Which of its shapes fit is seen when they are looked at."""
        return self

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


Choice = Range | Pick


class PoolChoices:
    """All choices of a pool that holds `roles`: shapes on which they may have options that fit together.

    Where the costs have not been asked yet their floors bound the shape; they are asked when it is looked at.
    """

    def __init__(self, problem: Problem, roles: tuple[str, ...], shapes: Sequence[Shape]) -> None:
        self.problem, self.roles = problem, roles
        self._ranges: dict[tuple[int, int], Range] = {}
        self._picks: dict[int, Pick | None] = {}
        self.shapes: list[Shape] = []
        reaches = []
        for shape in shapes:
            if not all(problem.allowed(role, shape) for role in roles):
                continue
            if not all(problem.asked(role, shape) for role in roles):
                reaches.append(self._floor(shape))
            elif (pick := self._pick(shape)) is not None:
                self._picks[len(self.shapes)] = pick
                reaches.append(pick.reach)
            else:
                continue
            self.shapes.append(shape)
        self.types = [shape.devices.device_type for shape in self.shapes]
        self.worlds = np.array([shape.devices.world for shape in self.shapes])
        size = len(self.shapes), len(problem.space.classes)
        self.needs = np.array([shape.need for shape in self.shapes], dtype=int).reshape(size)
        self.least = np.array([reach.least for reach in reaches])
        self.penalty = np.array([reach.penalty for reach in reaches])

    def root(self) -> Range | None:
        """All of them; None when there is none."""
        return self.range(0, len(self.shapes)) if self.shapes else None

    def range(self, start: int, stop: int) -> Range:
        """Shapes `start` to `stop`."""
        if (start, stop) not in self._ranges:
            self._ranges[start, stop] = Range(self, start, stop)
        return self._ranges[start, stop]

    def single(self, i: int, *, ask: bool) -> Choice | None:
        """The i-th shape with all options that fit beside some of the others; None when none do.

        A range of this shape alone where that is not known yet, unless the costs shall be asked.
        """
        if i not in self._picks:
            if not ask and not all(self.problem.asked(role, self.shapes[i]) for role in self.roles):
                return self.range(i, i + 1)
            self._picks[i] = self._pick(self.shapes[i])
        return self._picks[i]

    def _pick(self, shape: Shape) -> Pick | None:
        left = []
        for role in self.roles:
            mine = self.problem.left(role, shape)
            if mine is None:
                return None
            left.append(mine)
        return Pick(self, shape, self._penalty(shape), tuple(left)).fitting()

    def _floor(self, shape: Shape) -> Reach:
        least = np.zeros(len(self.problem.names))
        for role in self.roles:
            least[self.problem.columns[role]] = self.problem.floor(role, shape)
        return Reach(least, least, self._penalty(shape))

    def _penalty(self, shape: Shape) -> float:
        return sum(pin.weight for role in self.roles for pin in self.problem.unmet(role, shape))


def _narrow(left: list[Left], device: float, host: float) -> tuple[Left, ...] | None:
    """Drop options that exceed the memory even beside the least of the other roles, until none does.

    Bytes are resident, host, own working, and those of each transfer.
    """
    limits = device * (1 + _ROUNDING), host * (1 + _ROUNDING)
    k, unchanged = 0, 0
    while unchanged < len(left):
        mine = left[k]
        others = np.array(
            [some.least_bytes for i, some in enumerate(left) if i != k]
        )  # [roles, kinds of bytes]
        beside = others.sum(axis=0)
        together = mine.bytes + beside
        together[:, 2] = np.maximum(mine.bytes[:, 2], others[:, 2].max())  # operations do not work at once
        fits = (together[:, 0] + together[:, 2:].max(axis=1) <= limits[0]) & (together[:, 1] <= limits[1])
        unchanged += 1
        if not fits.all():
            if not fits.any():
                return None
            left[k], unchanged = Left(mine.table, mine.indices[fits]), 1
        k = (k + 1) % len(left)
    return tuple(left)
