"""Plays the step graph on pools, event by event, for several steps: a timeline as a run writes it.

Steps follow one another as in `schedule`: each begins when the one before has ended. With `staleness` 1,
period k generates for step k while the other operations work on step k - 1; there is one period more than
steps, whose first only generates (and fetches weights) and whose last does all but that.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rolemesh.placement.graph import Operation, StepGraph
from rolemesh.placement.schedule import waits_for
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
    """What the steps took. `period_s` has an entry per step (staleness 1: and one more)."""

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
    for period in range(steps + staleness):
        step_of = player.steps_of(period, steps)
        durations = {name: sampler(name, step, seed) for name, step in step_of.items()}
        started, ended = player.play(durations)
        for name in sorted(started, key=lambda name: (ended[name], player.names.index(name))):
            spans += player.spans(name, now + started[name], now + ended[name], step_of[name])
            for pool in player.pools_of[name]:
                busy_s[pool] += durations[name]
        periods.append(max(ended.values(), default=0.0))
        now += periods[-1]
    return Simulation(Timeline(spans), tuple(periods), busy_s)


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


class _Player:
    def __init__(
        self,
        graph: StepGraph,
        pools: Sequence[SimulatedPool],
        order: Mapping[str, Sequence[str]] | None,
        staleness: int,
        parts: int,
    ) -> None:
        self.graph, self.parts = graph, parts
        self.waits = waits_for(graph, staleness)
        self.names = [operation.name for operation in graph.operations]
        self.pool_of_role = {role: pool for pool in pools for role in pool.roles}
        self.pools_of = {
            operation.name: [
                pool.name for pool in pools if any(role in operation.roles for role in pool.roles)
            ]
            for operation in graph.operations
        }
        self.order = order
        self._ahead = {op.name for op in graph.operations if op.kind == "generate"} if staleness else set()
        if order is not None:
            self._check(order)

    def steps_of(self, period: int, steps: int) -> dict[str, int]:
        """The operations of a period and the step that each is for."""
        if not self._ahead:
            return dict.fromkeys(self.names, period)
        step_of = {name: period if name in self._ahead else period - 1 for name in self.names}
        return {name: step for name, step in step_of.items() if 0 <= step < steps}

    def play(self, durations: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
        """When each operation starts and ends."""
        queues = {
            pool: [name for name in order if name in durations] for pool, order in (self.order or {}).items()
        } or {pool: [] for pools in self.pools_of.values() for pool in pools}
        waiting = {name: {other for other in self.waits[name] if other in durations} for name in durations}
        started: dict[str, float] = {}
        ended: dict[str, float] = {}
        running: set[str] = set()  # pools
        events: list[tuple[float, int, str]] = []
        now, announced = 0.0, set()
        while True:
            ready = [n for n in self.names if n in durations and n not in started and not waiting[n]]
            for name in ready:
                if self.order is None and name not in announced:
                    announced.add(name)
                    for pool in self.pools_of[name]:
                        queues[pool].append(name)
                if all(pool not in running and queues[pool][0] == name for pool in self.pools_of[name]):
                    started[name], end_s = self._begun(name, now, started, ended, durations)
                    running.update(self.pools_of[name])
                    heapq.heappush(events, (end_s, self.names.index(name), name))
            if not events:
                break
            now, _, name = heapq.heappop(events)
            ended[name] = now
            for pool in self.pools_of[name]:
                running.remove(pool)
                queues[pool].remove(name)
            for others in waiting.values():
                others.discard(name)
        if stuck := [name for name in durations if name not in ended]:
            raise SimulationError(
                f"the order on the pools lets none of {', '.join(stuck)} start: "
                + "; ".join(f"{pool} next runs {queue[0]}" for pool, queue in queues.items() if queue)
            )
        return started, ended

    def _begun(
        self,
        name: str,
        now: float,
        started: Mapping[str, float],
        ended: Mapping[str, float],
        durations: Mapping[str, float],
    ) -> tuple[float, float]:
        """Start and end of an operation that nothing holds back now; on no pool it may have begun before."""
        sources = [other for other in self.waits[name] if self.graph[other].kind == "generate"]
        if self.graph[name].takes == "batch" or self.pools_of[name] or not sources:
            return now, now + durations[name]
        (source,) = sources
        first_s = started[source] + durations[source] / self.parts
        start_s = max([first_s, *(ended[other] for other in self.waits[name] if other != source)])
        return start_s, max(start_s + durations[name], ended[source] + durations[name] / self.parts)

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
