"""The best way to run roles on pools that are given: options and order alone are searched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.costs import Costs, RoleCost
from rolemesh.placement.graph import StepGraph
from rolemesh.placement.search.branch import BranchAndBound
from rolemesh.placement.search.clock import Clock
from rolemesh.placement.search.grouping import allowed_groupings
from rolemesh.placement.search.misfit import _over as overrun
from rolemesh.placement.search.pins import Pin
from rolemesh.placement.search.plans import Assignment, Infeasible, Overrun, PlannedPool, Proof, SearchResult
from rolemesh.placement.search.problem import Problem
from rolemesh.placement.search.space import Shape


class _Given(Problem):
    """A problem in which every role has its one shape; pools take no devices from each other."""

    _mine: Mapping[str, Shape] = MappingProxyType({})

    def give(self, pools: Sequence[PlannedPool]) -> list[Shape]:
        """Shapes of the pools; from now on roles are allowed no others."""
        need = (0,) * len(self.space.classes)
        shapes = [Shape(pool.devices, (), None, need) for pool in pools]
        self._mine = {role: shape for pool, shape in zip(pools, shapes, strict=True) for role in pool.roles}
        return shapes

    def allowed(self, role: str, shape: Shape) -> bool:
        return shape is self._mine[role] if self._mine else super().allowed(role, shape)


def search_given(
    graph: StepGraph,
    pools: Sequence[PlannedPool],
    cluster: ClusterSpec,
    costs: Costs,
    *,
    pins: Sequence[Pin] = (),
    seconds: Mapping[str, float] | None = None,
    staleness: int = 0,
    time_limit_s: float = 60.0,
) -> SearchResult | Infeasible:
    """As `search`, with the pools fixed; pins on pools and devices do not matter then."""
    clock = Clock(time_limit_s)
    roles = [role for pool in pools for role in pool.roles]
    about = [pin for pin in pins if pin.about_options]
    problem = _Given(graph, roles, cluster, costs, pins=about, seconds=seconds, staleness=staleness)
    shapes = problem.give(pools)
    allowed = [tuple(pool.roles for pool in pools)]
    outcome = BranchAndBound(problem, shapes, allowed, clock).run()
    if outcome.best is None:
        problem.clock = Clock(math.inf)  # options are asked once more to say what is over
        overrun = max((_least_over(problem, pool) for pool in pools), key=lambda over: over.over)
        if clock.over and overrun.over <= 0:  # the leanest options fit, unseen
            overrun = Overrun(tuple(roles), "time", clock.limit_s, None)
        return Infeasible(overrun, None, not clock.over, outcome.visited, clock.passed_s)
    best = replace(
        outcome.best,
        pools=tuple(
            replace(made, nodes=pool.nodes) for pool, made in zip(pools, outcome.best.pools, strict=True)
        ),
    )
    gap = max(0.0, 1 - outcome.bound / best.objective_s) if best.objective_s else 0.0
    return SearchResult(best, Proof(outcome.bound, gap, outcome.visited, clock.passed_s, "other pools"))


def any_plan(
    graph: StepGraph,
    roles: Sequence[str],
    cluster: ClusterSpec,
    costs: Costs,
    *,
    pools: Sequence[PlannedPool] | None = None,
    pins: Sequence[Pin] = (),
    seconds: Mapping[str, float] | None = None,
    time_limit_s: float = 5.0,
) -> Assignment | None:
    """The first plan found, on the given pools or on any; None when there is none or time ran out."""
    clock = Clock(time_limit_s)
    problem = _Given(graph, roles, cluster, costs, pins=pins, seconds=seconds)
    shapes = problem.space.shapes if pools is None else problem.give(pools)
    allowed = allowed_groupings(roles, pins) if pools is None else [tuple(pool.roles for pool in pools)]
    return BranchAndBound(problem, shapes, allowed, clock, any_plan=True).run().best


def _least_over(problem: Problem, pool: PlannedPool) -> Overrun:
    """What is over on the pool's devices with the leanest option of every role."""
    costs: list[tuple[str, RoleCost]] = []
    for role in pool.roles:
        options = problem.options(role, pool.devices)
        if not options:
            return Overrun((role,), "options", math.inf, pool.devices)
        costs.append((role, min(options, key=lambda c: c.resident + max(c.working.values(), default=0.0))))
    return overrun(problem, costs, pool.devices)
