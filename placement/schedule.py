"""The order in which operations take turns on their pools, and the seconds of one step: the plan's objective.

A pool runs one operation at a time; a transfer occupies the pools of all its roles; an operation whose roles
have no pool (a reward by function or HTTP) runs beside everything. Steps follow one another without overlap,
so one step lasts as long as the longest chain of operations that wait for each other.

With `staleness` 1 (one step off) generation works a step ahead, and with it what takes its rows as they are
made: nobody waits for them in the own step, the others work on the batch that was generated during the step
before. Generation still comes before the weights it uses are replaced. All operations of such a period end
before the next begins, so the seconds of a period are those of a step in the long run. More staleness evens
out generation that takes longer in one step than in another; at expected lengths it gains nothing, and is
scheduled as 1.

The best order is found by branch and bound over pairs of operations that compete for a pool (the disjunctive
graph of Balas, 1969; Carlier and Pinson, 1989): the start times that ignore the pools show the first clash,
and either operation of it goes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rolemesh.placement.graph import StepGraph

_MOST_ORDERS = 96  # beyond these, `Scheduler.bounds` no longer looks at every order
_ROUNDING = 1e-12  # relative; sums of seconds in another order differ by less

Masks = tuple[int, ...]  # by operation, a set of operations as bits


class ScheduleError(ValueError):
    """Seconds that do not match the graph; the message names the operation."""


@dataclass(frozen=True)
class Schedule:
    """One step in its best order; seconds from the start of the step.

    `critical_path` is a chain of operations without a gap between them that takes the whole step.
    """

    makespan_s: float
    order: Mapping[str, tuple[str, ...]]
    start_s: Mapping[str, float]
    end_s: Mapping[str, float]
    critical_path: tuple[str, ...]
    pools: Mapping[str, frozenset[str]] = field(default_factory=dict)  # of each operation

    def idle_s(self, pool: str) -> float:
        """Seconds of the step in which `pool` runs nothing."""
        return self.makespan_s - sum(self.end_s[name] - self.start_s[name] for name in self.order[pool])


def best_order(
    graph: StepGraph, seconds: Mapping[str, float], pools: Mapping[str, str], *, staleness: int = 0
) -> Schedule:
    """The order of operations on each pool that makes the step shortest; exact and deterministic.

    `seconds` of every operation by name, `pools` the pool of every role that has devices.
    Raises ScheduleError.
    """
    return Scheduler(graph, pools, staleness=staleness).best(seconds)


def waits_for(graph: StepGraph, staleness: int = 0) -> dict[str, frozenset[str]]:
    """For each operation those it waits for in the same period; see the module on `staleness`."""
    if staleness < 0:
        raise ScheduleError(f"staleness is a number of steps, 0 or more, got {staleness!r}")
    waits = graph.dependencies()
    if staleness == 0:
        return waits
    ahead = ahead_of(graph)
    kept = {}
    for operation in graph.operations:
        state_only = {
            name for name in waits[operation.name] & ahead if not graph[name].writes & operation.reads
        }
        own = waits[operation.name] if operation.name in ahead else frozenset()  # a second generation
        kept[operation.name] = waits[operation.name] - ahead | state_only | own
        if operation.takes != "batch" and operation.name in ahead:
            kept[operation.name] = frozenset()
    return kept


def ahead_of(graph: StepGraph) -> frozenset[str]:
    """Operations that work ahead where there is staleness: generation, and what takes its rows as they are
    made.
    """
    waits = graph.dependencies()
    ahead = {operation.name for operation in graph.operations if operation.kind == "generate"}
    rows = {operation.name for operation in graph.operations if operation.takes != "batch"}
    while more := {name for name in rows - ahead if waits[name] and waits[name] <= ahead}:
        ahead |= more
    return frozenset(ahead)


class Scheduler:
    """Schedules of one graph on one assignment of roles to pools, for any seconds per operation.

    `names` gives the order of operations in arrays of seconds.
    """

    def __init__(self, graph: StepGraph, pools: Mapping[str, str], *, staleness: int = 0) -> None:
        waits = waits_for(graph, staleness)
        self.names = tuple(operation.name for operation in graph.order())
        index = {name: i for i, name in enumerate(self.names)}
        self.pools_of = {
            operation.name: frozenset(pools[role] for role in operation.roles if role in pools)
            for operation in graph.operations
        }
        self.pools = tuple(dict.fromkeys(pools.values()))
        self._on = tuple(
            tuple(i for i, name in enumerate(self.names) if pool in self.pools_of[name])
            for pool in self.pools
        )
        before = [0] * len(self.names)
        for i, name in enumerate(self.names):
            for j in (index[other] for other in waits[name]):
                before[i] |= before[j] | 1 << j
        self._before: Masks = tuple(before)
        self._pairs = tuple(
            dict.fromkeys((i, j) for on in self._on for k, i in enumerate(on) for j in on[k + 1 :])
        )
        self._rows: tuple[NDArray[np.float64], NDArray[np.int64]] | None = None

    def best(self, seconds: Mapping[str, float]) -> Schedule:
        """The shortest step. Raises ScheduleError for an operation without seconds, or with fewer than 0."""
        for name in self.names:
            if not seconds.get(name, -1.0) >= 0:
                raise ScheduleError(
                    f"operation {name!r} needs seconds of at least 0, got {seconds.get(name)}"
                )
        durations = [float(seconds[name]) for name in self.names]
        before = self._shortest(durations)
        return self._schedule(before, durations)

    @property
    def exact(self) -> bool:
        """Whether `bounds` are the exact makespans."""
        return self._orders() is not None

    def bounds(self, durations: NDArray[np.float64]) -> NDArray[np.float64]:
        """Makespans of many vectors of seconds [n, operations], never above the exact ones: [n].

        They are exact unless the pools leave more orders than can be listed.
        """
        if self._rows is None:
            self._rows = self._chains()
        chains, starts = self._rows
        sums = durations @ chains  # [n, chains of all orders]
        return np.maximum.reduceat(sums, starts, axis=1).min(axis=1)

    def _shortest(self, durations: Sequence[float]) -> Masks:
        """What is before each operation in the best order."""
        best: tuple[float, Masks] = (float("inf"), self._before)
        least = self._pool_bound(self._before, durations)
        stack = [self._before]
        while stack:
            before = stack.pop()
            start, end = _times(before, durations)
            if max(end) >= best[0] * (1 - _ROUNDING):
                continue
            clash = self._first_clash(before, start, end)
            if clash is None:
                best = max(end), before
                if best[0] <= least * (1 + _ROUNDING):
                    break
                continue
            i, j = clash
            if (start[j], end[j], j) < (start[i], end[i], i):
                i, j = j, i
            stack += [_add(before, j, i), _add(before, i, j)]  # the earlier one first is tried first
        return best[1]

    def _first_clash(
        self, before: Masks, start: Sequence[float], end: Sequence[float]
    ) -> tuple[int, int] | None:
        """The earliest two operations that overlap on a pool."""
        clash, when = None, float("inf")
        for i, j in self._pairs:
            if before[j] >> i & 1 or before[i] >> j & 1:
                continue
            if start[i] < end[j] and start[j] < end[i]:
                first = max(start[i], start[j])
                if first < when:
                    clash, when = (i, j), first
        return clash

    def _pool_bound(self, before: Masks, durations: Sequence[float]) -> float:
        """A pool's operations, after the least that precedes any and before the least that follows any."""
        start, _ = _times(before, durations)
        tail = _tails(before, durations)
        return max(
            (
                min(start[i] for i in on) + sum(durations[i] for i in on) + min(tail[i] for i in on)
                for on in self._on
                if on
            ),
            default=0.0,
        )

    def _schedule(self, before: Masks, durations: Sequence[float]) -> Schedule:
        start, end = _times(before, durations)
        rank = {i: k for k, i in enumerate(_topological(before))}
        order = {
            pool: tuple(self.names[i] for i in sorted(on, key=lambda i: (start[i], end[i], rank[i])))
            for pool, on in zip(self.pools, self._on, strict=True)
        }
        path = [max(range(len(end)), key=lambda i: (end[i], -rank[i]))]
        while start[path[-1]] > 0:
            at, wanted = path[-1], start[path[-1]]
            last = [j for j in _bits(before[at]) if end[j] == wanted]
            path.append(min(last, key=lambda j: (-durations[j], rank[j])))
        return Schedule(
            max(end),
            order,
            dict(zip(self.names, start, strict=True)),
            dict(zip(self.names, end, strict=True)),
            tuple(self.names[i] for i in reversed(path)),
            self.pools_of,
        )

    def _chains(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Chains of operations as columns [operations, chains], grouped by order: where each group starts.

        The makespan of an order is its longest chain; an order whose every chain lies within a chain of
        another order is never longer than that one, which is dropped.
        """
        orders = self._orders()
        if orders is None:
            groups = [self._relaxed_chains()]
        else:
            groups = _undominated([_longest(_maximal_chains(before)) for before in orders])
        flat = [chain for group in groups for chain in group]
        columns = np.array([[chain >> i & 1 for chain in flat] for i in range(len(self.names))], dtype=float)
        return columns, np.cumsum([0, *(len(group) for group in groups[:-1])])

    def _orders(self) -> list[Masks] | None:
        """Every way to order all operations that share a pool; None when they are too many."""
        done: list[Masks] = []
        stack = [self._before]
        while stack:
            before = stack.pop()
            pair = next(
                ((i, j) for i, j in self._pairs if not (before[j] >> i & 1 or before[i] >> j & 1)), None
            )
            if pair is None:
                done.append(before)
            else:
                stack += [_add(before, *pair[::-1]), _add(before, *pair)]
            if len(done) + len(stack) > _MOST_ORDERS:
                return None
        return done

    def _relaxed_chains(self) -> list[int]:
        """Chains that every order has: those of the graph, and each pool's operations one after the other
        with a chain of what precedes all of them and one of what follows all.
        """
        everything = (1 << len(self.names)) - 1
        chains = list(_maximal_chains(self._before))
        for on in self._on:
            mask = sum(1 << i for i in on)
            common = everything
            after = everything
            for i in on:
                common &= self._before[i]
                after &= sum(1 << j for j in range(len(self.names)) if self._before[j] >> i & 1)
            heads = {chain & common for chain in chains} or {0}
            tails = {chain & after for chain in chains} or {0}
            chains += [mask | head | tail for head in heads for tail in tails]
        return _longest(chains)


def _times(before: Masks, durations: Sequence[float]) -> tuple[list[float], list[float]]:
    """Earliest starts and ends."""
    start, end = [0.0] * len(before), [0.0] * len(before)
    for i in _topological(before):
        start[i] = max((end[j] for j in _bits(before[i])), default=0.0)
        end[i] = start[i] + durations[i]
    return start, end


def _tails(before: Masks, durations: Sequence[float]) -> list[float]:
    """Seconds from each operation's end to that of the longest chain which follows it."""
    tail = [0.0] * len(before)
    for i in reversed(_topological(before)):
        for j in _bits(before[i]):
            tail[j] = max(tail[j], tail[i] + durations[i])
    return tail


def _topological(before: Masks) -> list[int]:
    return sorted(range(len(before)), key=lambda i: before[i].bit_count())


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


def _add(before: Masks, first: int, second: int) -> Masks:
    """`before` with `first` before `second`, and all that follows from it."""
    added = before[first] | 1 << first
    return tuple(mask | added if i == second or mask >> second & 1 else mask for i, mask in enumerate(before))


def _maximal_chains(before: Masks) -> set[int]:
    """Chains that no operation can be added to, as sets."""
    n = len(before)
    direct = [
        [j for j in _bits(before[i]) if not any(before[k] >> j & 1 for k in _bits(before[i]))]
        for i in range(n)
    ]
    ending: dict[int, set[int]] = {}
    for i in _topological(before):
        ending[i] = {chain | 1 << i for j in direct[i] for chain in ending[j]} or {1 << i}
    followed = 0
    for mask in before:
        followed |= mask
    return {chain for i in range(n) if not followed >> i & 1 for chain in ending[i]}


def _longest(chains: Iterator[int] | Sequence[int] | set[int]) -> list[int]:
    """The chains that lie within no other, in a fixed order."""
    unique = sorted(set(chains), key=lambda chain: (-chain.bit_count(), chain))
    kept: list[int] = []
    for chain in unique:
        if not any(chain & other == chain for other in kept):
            kept.append(chain)
    return kept


def _undominated(orders: Sequence[list[int]]) -> list[list[int]]:
    """Orders that another one is not at least as short as for all seconds."""

    def within(order: list[int], other: list[int]) -> bool:
        return all(any(chain & longer == chain for longer in other) for chain in order)

    kept: list[list[int]] = []
    for order in orders:
        if any(within(other, order) for other in kept):
            continue
        kept = [other for other in kept if not within(order, other)] + [order]
    return kept
