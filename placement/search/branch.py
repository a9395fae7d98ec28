"""Best-first branch and bound over groupings of roles into pools, shapes and options.

A node is a grouping with one choice per pool (`choices`). Its bound is the exact makespan of the step in
which every operation takes the least seconds that its pool's choice still allows, on the devices that the
others leave. The objective never falls when an operation takes longer, so no plan below the node is better.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rolemesh.placement.schedule import Scheduler
from rolemesh.placement.search.choices import Choice, Pick, PoolChoices, Reach, Room
from rolemesh.placement.search.clock import Clock, OutOfTime
from rolemesh.placement.search.grouping import Grouping
from rolemesh.placement.search.plans import Assignment, PlannedPool
from rolemesh.placement.search.problem import Floats, Problem, Transfer
from rolemesh.placement.search.space import Shape

ROUNDING = 1e-9  # relative; a plan better by less counts as equal
_DIVE_EVERY = 50  # nodes between two tries for a better plan
_DIVE_STEPS = 60  # nodes that such a try may visit
_MOST_LAYOUT_PAIRS = 16  # a transfer's least seconds are asked for so many pairs of layouts at a time

Choices = tuple[Choice, ...]


class Group:
    """One grouping of roles: its pools' choices and the schedules of its step."""

    def __init__(self, problem: Problem, pools: Grouping, choices: Sequence[PoolChoices]) -> None:
        self.problem, self.pools, self.choices = problem, pools, choices
        self.pool_of = {role: k for k, pool in enumerate(pools) for role in pool}
        wishes = [pin for pin in problem.pins if pin.about_pools and pin.strength != "must"]
        self.unmet = [pin for pin in wishes if not pin.wanted(pin.holds_for_pools(pools))]
        self.penalty = sum(pin.weight for pin in self.unmet)
        self.names = tuple("+".join(pool) for pool in pools)

    @cached_property
    def scheduler(self) -> Scheduler:
        """Schedules of the step on these pools."""
        pools = {role: self.names[k] for role, k in self.pool_of.items()}
        return Scheduler(self.problem.graph, pools, staleness=self.problem.staleness)

    def root(self) -> Choices | None:
        """All choices; None when a pool has none."""
        roots = [choices.root() for choices in self.choices]
        found = tuple(root for root in roots if root is not None)
        return found if len(found) == len(roots) else None


@dataclass(frozen=True)
class Outcome:
    """What branch and bound left: the best plan (None: none found), a bound on all, nodes visited, and the
    groupings that may fit, those with the least bounds first.
    """

    best: Assignment | None
    bound: float
    visited: int
    groupings: tuple[Grouping, ...]


class BranchAndBound:
    """`shapes` are those that pools may get. A known plan gives a first value to beat."""

    def __init__(
        self,
        problem: Problem,
        shapes: Sequence[Shape],
        allowed: Sequence[Grouping],
        clock: Clock,
        *,
        known: Assignment | None = None,
        gap: float = 0.0,
        any_plan: bool = False,
    ) -> None:
        self.problem, self.shapes, self.allowed, self.clock = problem, shapes, allowed, clock
        problem.clock = clock
        self.gap, self.any_plan = gap, any_plan
        self.best, self.value = known, known.objective_s if known else math.inf
        self.visited = 0
        self._count = itertools.count()
        self._fits: dict[tuple[int, ...], bool] = {}
        self._shape_index = {id(shape): i for i, shape in enumerate(shapes)}

    def run(self) -> Outcome:
        """Search until the best plan is proven, up to `gap`, or time is out."""
        heap: list[tuple[float, int, int, Group, Choices]] = []
        try:
            for group in self._groups():
                root = group.root()
                for bound, choices in self._bound(group, [root] if root else [], math.inf):
                    heap.append((bound, 0, next(self._count), group, choices))
                    if self.best is None:  # so that there is one when time runs out
                        self._dive(group, choices)
                if self.any_plan and self.best is not None:
                    break
        except OutOfTime:
            return Outcome(self.best, 0.0, self.visited, ())
        ordered = tuple(node[3].pools for node in sorted(heap))
        heapq.heapify(heap)
        for _, _, _, group, choices in sorted(heap)[: 3 if not self.any_plan else None]:
            self._dive(group, choices)
        while heap and not self._enough(heap[0][0]):
            bound, depth, _, group, choices = heapq.heappop(heap)
            self.visited += 1
            if self.visited % _DIVE_EVERY == 0:
                self._dive(group, choices)
            try:
                children = self._children(group, choices)
            except OutOfTime:
                heapq.heappush(heap, (bound, depth, next(self._count), group, choices))
                break
            for child_bound, child in children:
                heapq.heappush(heap, (max(bound, child_bound), depth - 1, next(self._count), group, child))
        bound = min(heap[0][0] if heap else math.inf, self.value)
        return Outcome(self.best, bound, self.visited, ordered)

    def _enough(self, bound: float) -> bool:
        if self.any_plan and self.best is not None:
            return True
        return bound >= self.value * (1 - max(self.gap, ROUNDING)) or self.clock.over

    def _groups(self) -> Iterator[Group]:
        made: dict[tuple[str, ...], PoolChoices] = {}
        for pools in self.allowed:
            for roles in pools:
                if roles not in made:
                    made[roles] = PoolChoices(self.problem, roles, self.shapes)
                    self.clock.check()
            yield Group(self.problem, pools, [made[roles] for roles in pools])

    def _dive(self, group: Group, choices: Choices) -> None:
        """Look for a better plan below a node: always the best child first, a few steps back when stuck."""
        stack = [choices]
        for _ in range(_DIVE_STEPS):
            if not stack or self.clock.over:
                return
            value, self.visited = self.value, self.visited + 1
            try:
                children = sorted(self._children(group, stack.pop()), key=lambda child: child[0])
            except OutOfTime:
                return
            if self.value < value:
                return
            stack += [child for _, child in reversed(children)]

    def _children(self, group: Group, choices: Choices) -> list[tuple[float, Choices]]:
        """Undecided children that may be better than the best plan; decided ones become the best plan."""
        k = self._branch(group, choices)
        room = _rooms(choices, self.problem.space.capacity)[k]
        children = [(*choices[:k], child, *choices[k + 1 :]) for child in choices[k].children(room)]
        fitting = [
            (*child[:k], narrowed, *child[k + 1 :])
            for _, child in self._bound(group, children)
            if (narrowed := child[k].fitting()) is not None
        ]
        better = []
        for bound, child in self._bound(group, fitting):
            if not all(choice.decided for choice in child):
                better.append((bound, child))
            elif bound < self.value * (1 - ROUNDING):
                self._take(group, child)
        return better

    def _bound(
        self, group: Group, nodes: Sequence[Choices], most: float | None = None
    ) -> list[tuple[float, Choices]]:
        """The nodes whose bounds are below `most`, with them; by default those that may be the best plan."""
        rows, weights, kept = [], [], []
        for choices in nodes:
            reaches = self._reaches(choices)
            if reaches is not None:
                rows.append(self._row(group, choices, reaches))
                weights.append(1 + group.penalty + sum(reach.penalty for reach in reaches))
                kept.append(choices)
        if not kept:
            return []
        bounds = group.scheduler.bounds(np.array(rows)) * np.array(weights)
        most = self.value * (1 - ROUNDING) if most is None else most
        return [(bound, node) for bound, node in zip(bounds.tolist(), kept, strict=True) if bound < most]

    def _reaches(self, choices: Choices) -> list[Reach] | None:
        """What each pool's choice still allows; None when they do not fit beside each other."""
        rooms = _rooms(choices, self.problem.space.capacity)
        reaches = []
        for choice, room in zip(choices, rooms, strict=True):
            reach = choice.within(room)
            if reach is None:
                return None
            reaches.append(reach)
        picks = [choice for choice in choices if isinstance(choice, Pick)]
        return reaches if len(picks) < len(choices) or self._fit([pick.shape for pick in picks]) else None

    def _fit(self, shapes: Sequence[Shape]) -> bool:
        key = tuple(sorted(self._shape_index[id(shape)] for shape in shapes))
        if key not in self._fits:
            self._fits[key] = self.problem.space.fit(shapes) is not None
        return self._fits[key]

    def _row(self, group: Group, choices: Choices, reaches: Sequence[Reach]) -> Floats:
        """Least seconds of every operation."""
        row = self.problem.fixed.copy()
        for reach in reaches:
            row += reach.least
        for transfer in self.problem.transfers:
            row[transfer.index] = self._transfer_s(group, choices, transfer)
        return row

    def _transfer_s(self, group: Group, choices: Choices, transfer: Transfer) -> float:
        """Least seconds of a transfer; 0 while its roles' shapes are open."""
        i, j = group.pool_of[transfer.source], group.pool_of[transfer.target]
        source, target = choices[i], choices[j]
        if not isinstance(source, Pick) or not isinstance(target, Pick):
            return 0.0
        sources, targets = source.movers(transfer.source), target.movers(transfer.target)
        if len(sources) * len(targets) > _MOST_LAYOUT_PAIRS:
            return 0.0
        on, to = source.shape.devices, target.shape.devices
        return min(
            self.problem.transfer_s(transfer, a, on, b, to, together=i == j) for a in sources for b in targets
        )

    def _branch(self, group: Group, choices: Choices) -> int:
        """The pool to decide next: where the bound would rise most if the choice turned out worst."""
        reaches = self._reaches(choices)
        assert reaches is not None, "bounded before"
        row = self._row(group, choices, reaches)
        undecided = [k for k, choice in enumerate(choices) if not choice.decided]
        if len(undecided) == 1:
            return undecided[0]
        rises = np.array([reaches[k].most - reaches[k].least for k in undecided])
        bounds = group.scheduler.bounds(row + rises).tolist()
        moves = {group.pool_of[role] for t in self.problem.transfers for role in (t.source, t.target)}
        best = max(
            range(len(undecided)), key=lambda n: (bounds[n], undecided[n] in moves, rises[n].sum(), -n)
        )
        return undecided[best]

    def _take(self, group: Group, choices: Choices) -> None:
        """Keep a decided node as the best plan of its grouping, and of all, where it is."""
        picks = [choice for choice in choices if isinstance(choice, Pick)]
        row = self._row(group, choices, [pick.reach for pick in picks])
        seconds = dict(zip(self.problem.names, row.tolist(), strict=True))
        schedule = group.scheduler.best(seconds)
        nodes = self.problem.space.fit([pick.shape for pick in picks])
        assert nodes is not None, "fitted when it was bounded"
        costs = {role: cost for pick in picks for role, cost in pick.costs()}
        unmet = [*group.unmet]
        for pick in picks:
            for role, cost in pick.costs():
                unmet += self.problem.unmet(role, pick.shape) + self.problem.unmet_options(role, cost)
        plan = Assignment(
            tuple(
                PlannedPool(name, pool, pick.shape.devices, at)
                for name, pool, pick, at in zip(group.names, group.pools, picks, nodes, strict=True)
            ),
            {role: costs[role] for role in self.problem.roles},
            seconds,
            schedule,
            tuple(unmet),
        )
        if plan.objective_s < self.value:
            self.best, self.value = plan, plan.objective_s


def _rooms(choices: Choices, capacity: Room) -> list[Room]:
    """Devices of each class that each pool may take at most, beside the least of the others."""
    left = [have - sum(choice.need[c] for choice in choices) for c, have in enumerate(capacity)]
    return [tuple(n + free for n, free in zip(choice.need, left, strict=True)) for choice in choices]
