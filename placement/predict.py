"""The timeline that a plan would have, with sampled lengths, and how far steps may vary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rolemesh.placement.auto import as_planned
from rolemesh.placement.costs import DeviceSet, RoleCost
from rolemesh.placement.lengths import Measured
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.pools import PlacementError
from rolemesh.placement.roles import PlannerCosts, PlanRequest
from rolemesh.placement.roles.seconds import Batch
from rolemesh.placement.simulator import Range, SimulatedPool, Simulation, sample_range, simulate


@dataclass(frozen=True)
class Predicted:
    """What a plan's steps are expected to look like: one simulated run, and quantiles over seeds."""

    simulation: Simulation
    range: Range


class _Drawn(Measured):
    """Lengths as they were drawn: the longest of them is in the batch."""

    def longest(self, n: int) -> float:
        return self.maximum


def predict(
    plan: PlacementPlan,
    request: PlanRequest,
    *,
    steps: int = 3,
    seeds: Iterable[int] = range(16),
    seed: int = 0,
) -> Predicted:
    """Play `steps` steps of the plan with lengths drawn by `seed`, and find their range over `seeds`.

    Raises PlacementError for a plan whose roles cannot run so on the cluster of the request.
    """
    sampler = Sampler(plan, request)
    pools = [SimulatedPool(pool.name, pool.roles, pool.world) for pool in plan.pools]
    order = plan.order or None
    kept = {"order": order, "steps": steps, "staleness": request.staleness, "parts": sampler.parts}
    return Predicted(
        simulate(request.graph, sampler, pools, seed=seed, **kept),  # type: ignore[arg-type]
        sample_range(request.graph, sampler, pools, seeds=seeds, **kept),  # type: ignore[arg-type]
    )


class Sampler:
    """Seconds of an operation in a step whose lengths are drawn: see `simulator.Sampler`.

    Generation is priced for the lengths of the replica that has the longest one; passes over the batch take
    time in proportion to its tokens.
    """

    def __init__(self, plan: PlacementPlan, request: PlanRequest) -> None:
        placed = plan if plan.nodes else plan.on(request.cluster)
        self.request = as_planned(request, placed)
        self.costs = PlannerCosts(self.request)
        self.devices = {role: devices_of(placed, placed.pool_of(role).name, request) for role in plan.roles}
        self.pools = {role: placed.pool_of(role).name for role in plan.roles}
        self.chosen = {role: self._option(role) for role in plan.roles}
        self._drawn: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._seconds: dict[tuple[str, int, int], float] = {}

    @property
    def parts(self) -> int:
        """In how many parts a replica generates its samples, one after the other."""
        operation = next(op for op in self.request.graph.operations if op.kind == "generate")
        cost = self.chosen[operation.role]
        rows = -(-self.request.workload.samples // cost.option.layout.dp)
        return -(-rows // max(1, min(cost.option.micro_batch, rows)))

    def _option(self, role: str) -> RoleCost:
        options = self.costs.options(role, self.devices[role])
        if not options:
            raise PlacementError(f"role {role!r} cannot run as planned on {self.devices[role]}")
        return min(options, key=lambda cost: sum(cost.seconds.values()))

    def __call__(self, name: str, step: int, seed: int) -> float:
        key = name, step, seed
        if key not in self._seconds:
            self._seconds[key] = self._priced(name, step, seed)
        return self._seconds[key]

    def _priced(self, name: str, step: int, seed: int) -> float:
        operation = self.request.graph[name]
        if operation.role not in self.chosen:
            return self.request.seconds[name]
        if operation.kind == "transfer":
            return self._transfer(name)
        cost, load = self.chosen[operation.role], self.request.workload
        responses = self._responses(step, seed)
        if operation.kind != "generate":
            drawn = load.samples * load.prompt_lengths.mean + float(responses.sum())
            return cost.seconds[name] * drawn / load.tokens
        layout = cost.option.layout
        if operation.per == "prompt":
            responses = responses[:: load.samples_per_prompt]
        parts = np.array_split(responses, layout.dp)
        fullest = max(parts, key=lambda part: part.max(initial=0))
        prices = self.costs.seconds_of(operation.role, self.devices[operation.role])
        batch = Batch(len(fullest), ())
        at_once = min(cost.option.micro_batch, len(fullest))
        seconds = prices.generate(layout, at_once, batch, _Drawn(tuple(fullest.tolist())))
        return self.request.times(operation) * seconds

    def _responses(self, step: int, seed: int) -> NDArray[np.int64]:
        if (step, seed) not in self._drawn:
            rng = np.random.default_rng([seed, step])
            load = self.request.workload
            self._drawn[step, seed] = load.response_lengths.sample(load.samples, rng)
        return self._drawn[step, seed]

    def _transfer(self, name: str) -> float:
        operation = self.request.graph[name]
        source = next(role for role in sorted(operation.roles) if role != operation.role)
        one, other = self.chosen[source], self.chosen[operation.role]
        here, there = self.devices[source], self.devices[operation.role]
        together = self.pools[source] == self.pools[operation.role]
        return self.costs.transfer_s(name, one, here, other, there, together=together)


def devices_of(plan: PlacementPlan, pool: str, request: PlanRequest) -> DeviceSet:
    """The devices of a pool of a plan that is on the request's cluster."""
    there = {node.name: node for node in request.cluster.usable}
    nodes = plan.nodes[pool]
    groups = tuple(there[name].group for name, _ in nodes)
    return DeviceSet(
        there[nodes[0][0]].device_type,
        tuple(count for _, count in nodes),
        groups if any(groups) else (),
    )
