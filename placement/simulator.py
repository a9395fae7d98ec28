"""Plays the step graph on pools, event by event, for several steps: a timeline as a run writes it.

Steps follow one another as in `schedule`: each begins when the one before has ended. With `staleness`, what
works ahead (see `ahead_of`) does so by a step. A first period generates for step 0; then each generates
for the next `staleness` steps while the other operations work on as many steps before those, one after the
other, and ends with a transfer of weights; the last one does only the rest. It is how `StepsInFlight` runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rolemesh.placement.graph import Operation, StepGraph
from rolemesh.placement.schedule import ahead_of
from rolemesh.placement.timeline import Span, Timeline

Sampler = Callable[[str, int, int], float]
"""Seconds of an operation in a step, for a seed; equal arguments give equal seconds."""


class SimulationError(ValueError):
    """An order that contradicts the graph or lacks an operation; the message names the operations."""


@dataclass(frozen=True)
class SimulatedPool:
    """A pool by name: the roles that are on it, and its number of ranks."""

    name: str
    roles: tuple[str, ...]
    world: int = 1


@dataclass(frozen=True)
class Simulation:
    """What the steps took. `period_s` has an entry per step, with staleness one for the first generation and
    one per `staleness` steps.
    """

    timeline: Timeline
    period_s: tuple[float, ...]
    busy_s: Mapping[str, float]  # by pool

    @property
    def total_s(self) -> float:
        """Seconds of all steps."""
        return sum(self.period_s)

    @property
    def utilisation(self) -> dict[str, float]:
        """Part of the time in which each pool runs an operation."""
        return {pool: busy / self.total_s if self.total_s else 0.0 for pool, busy in self.busy_s.items()}

    @property
    def idle_s(self) -> dict[str, float]:
        """Seconds in which each pool runs nothing."""
        return {pool: self.total_s - busy for pool, busy in self.busy_s.items()}


def simulate(
    graph: StepGraph,
    seconds: Mapping[str, float] | Sampler,
    pools: Sequence[SimulatedPool],
    *,
    order: Mapping[str, Sequence[str]] | None = None,
    steps: int = 3,
    staleness: int = 0,
    seed: int = 0,
    parts: int = 1,
) -> Simulation:
    """Play `steps` steps.

    `order` gives each pool's operations, as a plan does. Without it a pool takes them as they become ready,
    as the controller's queues do. Operations of roles on no pool run beside everything; their spans name the
    role as the pool.

    Generation makes its batch in `parts` of equal length: of the operations on no pool, those that take rows
    start on the first one, and have the last one to do when it ends. Raises SimulationError.
    """
    sampler = seconds if callable(seconds) else lambda name, step, seed: seconds[name]
    player = _Player(graph, pools, order, staleness, parts)
    spans: list[Span] = []
    busy_s = {pool.name: 0.0 for pool in pools}
    now, periods = 0.0, []
    for nodes in player.periods(steps):
        durations = {node: sampler(node.name, node.step, seed) for node in nodes}
        started, ended = player.play(durations)
        for node in sorted(started, key=lambda node: (ended[node], player.rank(node))):
            spans += player.spans(node.name, now + started[node], now + ended[node], node.step)
            for pool in player.pools_of[node.name]:
                busy_s[pool] += durations[node]
        periods.append(max(ended.values(), default=0.0))
        now += periods[-1]
    return Simulation(Timeline(spans), tuple(periods), busy_s)


def simulate_period(
    graph: StepGraph,
    seconds: Mapping[str, float],
    pools: Sequence[SimulatedPool],
    *,
    order: Mapping[str, Sequence[str]] | None = None,
    staleness: int = 0,
) -> Simulation:
    """One step as it is in the long run: with staleness the generation for a step beside the rest of the one
    before. Raises SimulationError.
    """
    lag = min(1, staleness)
    played = simulate(graph, seconds, pools, order=order, steps=1 + lag, staleness=lag)
    ahead = ahead_of(graph)
    start_s = sum(played.period_s[:lag])
    spans = [
        replace(span, start_s=span.start_s - start_s, end_s=span.end_s - start_s)
        for span in played.timeline.spans
        if span.args["step"] == (lag if span.name in ahead else 0)
    ]
    busy_s = {
        pool.name: Timeline([replace(span, name="") for span in spans if span.pool == pool.name]).busy_s("")
        for pool in pools
    }
    return Simulation(Timeline(spans), (played.period_s[lag],), busy_s)


@dataclass(frozen=True)
class Range:
    """Quantiles of a step's mean seconds over seeds, by probability."""

    step_s: Mapping[float, float]
    utilisation: Mapping[str, Mapping[float, float]]  # by pool
    n_seeds: int


def sample_range(
    graph: StepGraph,
    sampler: Sampler,
    pools: Sequence[SimulatedPool],
    *,
    order: Mapping[str, Sequence[str]] | None = None,
    steps: int = 3,
    staleness: int = 0,
    seeds: Iterable[int] = range(32),
    quantiles: Sequence[float] = (0.05, 0.5, 0.95),
    parts: int = 1,
) -> Range:
    """How step time and utilisation vary over `seeds` of the sampled lengths."""
    runs = [
        simulate(graph, sampler, pools, order=order, steps=steps, staleness=staleness, seed=seed, parts=parts)
        for seed in seeds
    ]

    def quantiles_of(values: Sequence[float]) -> dict[float, float]:
        return {q: float(np.quantile(values, q)) for q in quantiles}

    return Range(
        quantiles_of([run.total_s / steps for run in runs]),
        {pool.name: quantiles_of([run.utilisation[pool.name] for run in runs]) for pool in pools},
        len(runs),
    )


class _Node(NamedTuple):
    """An operation of a step."""

    step: int
    name: str


class _Player:
    def __init__(
        self,
        graph: StepGraph,
        pools: Sequence[SimulatedPool],
        order: Mapping[str, Sequence[str]] | None,
        staleness: int,
        parts: int,
    ) -> None:
        self.graph, self.parts, self.staleness = graph, parts, staleness
        self.dependencies = graph.dependencies()
        self.names = [operation.name for operation in graph.operations]
        self.pool_of_role = {role: pool for pool in pools for role in pool.roles}
        self.pools_of = {
            operation.name: [
                pool.name for pool in pools if any(role in operation.roles for role in pool.roles)
            ]
            for operation in graph.operations
        }
        self.order = order
        self.ahead = ahead_of(graph) if staleness else frozenset[str]()
        if order is not None:
            self._check(order)

    def rank(self, node: _Node) -> tuple[int, int]:
        """Its place in program order; of two steps' same operation the earlier comes first."""
        return self.names.index(node.name), node.step

    def periods(self, steps: int) -> Iterator[list[_Node]]:
        """What runs in each period: the nodes of earlier steps first, each step's in program order."""
        if not self.staleness:
            yield from ([_Node(step, name) for name in self.names] for step in range(steps))
            return
        yield [_Node(0, name) for name in self.names if name in self.ahead] if steps else []
        for first in range(0, steps, self.staleness):
            last = first + self.staleness - 1
            yield [
                _Node(step, name)
                for step in range(first, min(last + 2, steps))
                for name in self.names
                if (step > first if name in self.ahead else step <= last)
                and (step == last or not self._hands_over(name))
            ]

    def _hands_over(self, name: str) -> bool:
        """Whether an operation replaces what those read that work ahead."""
        return any(self.graph[name].state_writes & self.graph[other].state_reads for other in self.ahead)

    def _waits(self, node: _Node, nodes: Collection[_Node]) -> set[_Node]:
        """Those of a period for which a node waits."""
        operation, before = self.graph[node.name], self.dependencies[node.name]
        waits = {_Node(node.step, name) for name in before}
        if self.staleness and node.name not in self.ahead:
            replaced = {name for name in before & self.ahead if not self.graph[name].writes & operation.reads}
            waits |= {other for other in nodes if other.name in replaced}
            waits |= {other for other in nodes if other.step < node.step and other.name not in self.ahead}
        return waits.intersection(nodes)

    def _listed(self, nodes: Collection[_Node]) -> dict[str, list[_Node]]:
        """The nodes of a period by pool, in the order that is given; without one they are still to come."""
        if self.order is None:
            return {pool: [] for pools in self.pools_of.values() for pool in pools}
        lag = min(1, self.staleness)
        first = min((node.step for node in nodes), default=0)
        places = range(first, max((node.step for node in nodes), default=0) + lag + 1)
        return {
            pool: [
                node
                for place in places
                for name in listed
                if (node := _Node(place if name in self.ahead else place - lag, name)) in nodes
            ]
            for pool, listed in self.order.items()
        }

    def play(self, durations: Mapping[_Node, float]) -> tuple[dict[_Node, float], dict[_Node, float]]:
        """When each operation of a period starts and ends."""
        queues = self._listed(durations.keys())
        waits = {node: self._waits(node, durations.keys()) for node in durations}
        waiting = {node: set(others) for node, others in waits.items()}
        started: dict[_Node, float] = {}
        ended: dict[_Node, float] = {}
        running: set[str] = set()  # pools
        events: list[tuple[float, tuple[int, int], _Node]] = []
        now, announced = 0.0, set[_Node]()
        while True:
            for node in [n for n in durations if n not in started and not waiting[n]]:
                mine = self.pools_of[node.name]
                if self.order is None and node not in announced:
                    announced.add(node)
                    for pool in mine:
                        queues[pool].append(node)
                if all(pool not in running and queues[pool][0] == node for pool in mine):
                    started[node], end_s = self._begun(node, now, started, ended, durations, waits[node])
                    running.update(mine)
                    heapq.heappush(events, (end_s, self.rank(node), node))
            if not events:
                break
            now, _, node = heapq.heappop(events)
            ended[node] = now
            for pool in self.pools_of[node.name]:
                running.remove(pool)
                queues[pool].remove(node)
            for others in waiting.values():
                others.discard(node)
        if stuck := [node.name for node in durations if node not in ended]:
            raise SimulationError(
                f"the order on the pools lets none of {', '.join(stuck)} start: "
                + "; ".join(f"{pool} next runs {queue[0].name}" for pool, queue in queues.items() if queue)
            )
        return started, ended

    def _begun(
        self,
        node: _Node,
        now: float,
        started: Mapping[_Node, float],
        ended: Mapping[_Node, float],
        durations: Mapping[_Node, float],
        waits: set[_Node],
    ) -> tuple[float, float]:
        """Start and end of an operation that nothing holds back now; on no pool it may have begun before."""
        sources = [other for other in waits if self.graph[other.name].kind == "generate"]
        if self.graph[node.name].takes == "batch" or self.pools_of[node.name] or not sources:
            return now, now + durations[node]
        (source,) = sources
        first_s = started[source] + durations[source] / self.parts
        start_s = max([first_s, *(ended[other] for other in waits if other != source)])
        return start_s, max(start_s + durations[node], ended[source] + durations[node] / self.parts)

    def spans(self, name: str, start_s: float, end_s: float, step: int) -> list[Span]:
        """A span per rank, as the controller records them; a transfer's source ranks too."""
        operation: Operation = self.graph[name]
        args = {"step": step, "bytes_fetched": 0, "kernels": []}
        sources = sorted({state.split(".")[0] for state in operation.state_reads})
        roles = [operation.role, *(sources if operation.kind == "transfer" else [])]
        return [
            Span(name, role, pool.name, rank, start_s, end_s, args)
            for role in roles
            for pool in [self.pool_of_role.get(role, SimulatedPool(role, (role,)))]
            for rank in range(pool.world)
        ]

    def _check(self, order: Mapping[str, Sequence[str]]) -> None:
        for pool in dict.fromkeys(pool for pools in self.pools_of.values() for pool in pools):
            wanted = {name for name in self.names if pool in self.pools_of[name]}
            given = list(order.get(pool, ()))
            if len(given) != len(wanted) or set(given) != wanted:
                raise SimulationError(
                    f"pool {pool!r} runs {', '.join(sorted(wanted))}; its order has "
                    f"{', '.join(given) or 'none of them'}"
                )
