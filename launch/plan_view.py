"""What the pictures of a plan show, computed in bounded time from plan, cost models and simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rolemesh.launch.pictures.device_counts import PLAN, CountPoint
from rolemesh.launch.pictures.step_gantt import operation_names
from rolemesh.launch.pictures.strategies import StrategyBar
from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.compare import FORBIDDEN, Budget, Compared, compare_strategies, price
from rolemesh.placement.length_range import LengthRange
from rolemesh.placement.memory_over_step import PoolMemory, memory_over_step
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.roles import PlanRequest
from rolemesh.placement.schedule import waits_for
from rolemesh.placement.search import Pin
from rolemesh.placement.search.plans import Assignment
from rolemesh.placement.search.why import why_it_loses
from rolemesh.placement.simulator import SimulatedPool, simulate_period
from rolemesh.placement.step_view import StepView, step_view
from rolemesh.placement.traffic import Flow, traffic


@dataclass(frozen=True)
class PlanView:
    """A plan with everything that its page shows. `notes` say what was not computed and why."""

    plan: PlacementPlan
    cluster: ClusterSpec
    step: StepView
    memory: Mapping[str, PoolMemory]
    flows: Sequence[Flow]
    strategies: Sequence[StrategyBar]
    counts: Sequence[CountPoint]
    operations: Sequence[str]
    lengths: LengthRange | None
    tokens: float  # of a step
    notes: Sequence[str] = field(default_factory=tuple)


def planned_step(plan: PlacementPlan, request: PlanRequest) -> StepView:
    """One step as the simulator plays it in the plan's order."""
    pools = [SimulatedPool(pool.name, pool.roles, pool.world) for pool in plan.pools]
    seconds = {op.name: plan.prediction.operations_s.get(op.name, 0.0) for op in request.graph.operations}
    played = simulate_period(
        request.graph, seconds, pools, order=plan.order or None, staleness=request.staleness
    )
    waits = waits_for(request.graph, request.staleness)
    return step_view(played.timeline.spans, waits, [pool.name for pool in plan.pools])


def view_of(
    plan: PlacementPlan,
    request: PlanRequest,
    compared: Compared,
    *,
    free: PlanRequest,
    pins: Sequence[Pin] = (),
    lengths: LengthRange | None = None,
    limit_s: float = 10.0,
) -> PlanView:
    """`request` is as the plan runs. `compared` are the usual strategies on its cluster under `free`, which
    leaves more to the planner. Other numbers of devices are priced for `limit_s` seconds of computing.
    """
    step = planned_step(plan, request)
    counts, left_out = count_points(plan, free, compared, pins=pins, limit_s=limit_s)
    notes = []
    if compared.unknown:
        notes.append(f"not compared, as the time ran out: {', '.join(compared.unknown)}")
    if left_out:
        said = ", ".join(str(n) for n in left_out)
        notes.append(f"not priced within {limit_s:g} s of computing: {said} devices")
    return PlanView(
        plan,
        request.cluster,
        step,
        memory_over_step(plan, request),
        traffic(plan, request),
        strategy_bars(plan, request, compared),
        counts,
        operation_names([step]),
        lengths,
        request.workload.tokens,
        notes,
    )


def strategy_bars(plan: PlacementPlan, request: PlanRequest, compared: Compared) -> list[StrategyBar]:
    """The plan first, then the strategies, fastest first, each with a sentence on why it loses."""
    mine = price(request, plan)
    bars = [] if mine is None else [_bar(PLAN, mine, _why_first(mine, compared))]
    for name, other in sorted(compared.plans.items(), key=lambda entry: entry[1].makespan_s):
        if mine is None:
            bars.append(_bar(name, other, ""))
        elif other.makespan_s < mine.makespan_s * (1 - 1e-6):
            bars.append(_bar(name, other, f"is {1 - other.makespan_s / mine.makespan_s:.1%} shorter"))
        elif _same(mine, other):
            bars.append(_bar(name, other, "is this plan"))
        else:
            bars.append(_bar(name, other, f"loses: {why_it_loses(mine, other)}"))
    return [*bars, *(StrategyBar(name, _why_none(why)) for name, why in compared.misfits.items())]


def _why_none(why: str) -> str:
    return why if why.startswith(FORBIDDEN) else f"does not fit: {why}"


def _why_first(mine: Assignment, compared: Compared) -> str:
    shared = " | ".join(f"{'+'.join(pool.roles)} on {pool.devices.world}" for pool in mine.pools)
    faster = [n for n, other in compared.plans.items() if other.makespan_s < mine.makespan_s * (1 - 1e-6)]
    return f"{shared}; slower than {', '.join(faster)}" if faster else shared


def _same(one: Assignment, other: Assignment) -> bool:
    groups = [frozenset(frozenset(pool.roles) for pool in plan.pools) for plan in (one, other)]
    return groups[0] == groups[1] and abs(one.makespan_s - other.makespan_s) < 1e-6 * one.makespan_s


def _bar(name: str, plan: Assignment, why: str) -> StrategyBar:
    """The critical path's operations in their order; without gaps, so they add up to the step."""
    schedule = plan.schedule
    seconds = {op: schedule.end_s[op] - schedule.start_s[op] for op in schedule.critical_path}
    return StrategyBar(name, why, seconds)


def smaller_clusters(cluster: ClusterSpec) -> list[ClusterSpec]:
    """The cluster's first nodes, 1, 2, 4, ... and half as many again; of one node its first devices."""
    nodes = cluster.usable
    if len(nodes) > 1:
        sizes = sorted({n for k in range(12) for n in (2**k, 3 * 2**k) if n < len(nodes)} | {len(nodes)})
        return [replace(cluster, nodes=nodes[:n]) for n in sizes]
    devices = nodes[0].devices
    sizes = sorted({2**k for k in range(12) if 2**k < devices} | {devices})
    return [replace(cluster, nodes=(replace(nodes[0], devices=n),)) for n in sizes]


def count_points(
    plan: PlacementPlan,
    request: PlanRequest,
    compared: Compared,
    *,
    pins: Sequence[Pin] = (),
    limit_s: float = 10.0,
) -> tuple[list[CountPoint], list[int]]:
    """Every strategy on fewer devices, and the numbers that the time did not reach. The plan's own cluster
    comes from `compared`; the powers of two are looked at first.
    """
    budget = Budget(limit_s)
    whole = _point(request, compared)
    if plan.prediction.step_s:
        rate = request.workload.tokens / plan.prediction.step_s / request.cluster.n_devices
        whole = replace(whole, rates={PLAN: rate, **whole.rates}, misfit="")
    points, left_out = [whole], []
    others = [c for c in smaller_clusters(request.cluster) if c.n_devices < request.cluster.n_devices]
    for cluster in sorted(others, key=lambda c: ((c.n_devices & (c.n_devices - 1)) != 0, -c.n_devices)):
        asked = replace(request, cluster=cluster)
        found = compare_strategies(asked, pins=pins, limit_s=budget.left_s)
        point = _point(asked, found)
        if point.rates or point.misfit:
            points.append(point)
        else:
            left_out.append(cluster.n_devices)
    return sorted(points, key=lambda point: point.devices), sorted(left_out)


def _point(request: PlanRequest, found: Compared) -> CountPoint:
    n = request.cluster.n_devices
    rates = {name: request.workload.tokens / best.makespan_s / n for name, best in found.plans.items()}
    fits = rates or found.unknown
    reasons = sorted(found.misfits.values(), key=lambda why: why.startswith(FORBIDDEN))
    misfit = "" if fits else next(iter(reasons), "")
    return CountPoint(n, rates, misfit)
