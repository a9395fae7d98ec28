"""Plans from a request: the best there is, or the best way to run a given strategy or plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.costs import DeviceSet, RoleCost, RoleOption
from rolemesh.placement.explain import explain_infeasible
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.plan_values import Prediction, RoleSettings
from rolemesh.placement.pools import PlacementError, PoolSpec, Where, fit_pools
from rolemesh.placement.roles import PlannerCosts, PlanRequest
from rolemesh.placement.search import Infeasible, Pin, PlannedPool, SearchResult, search
from rolemesh.placement.search.given import any_plan, search_given
from rolemesh.placement.search.plans import Assignment, Proof
from rolemesh.placement.strategies import cpus_per_process, named_pools

_TRY_S = 2.0  # for each change that is tried where nothing fits


def search_plan(
    request: PlanRequest,
    *,
    pins: Sequence[Pin] = (),
    time_limit_s: float = 60.0,
    gap: float = 0.0,
    compare: bool = True,
) -> SearchResult | Infeasible:
    """The best plan of all with its proof, the best ones of the strategies, and why they lose."""
    return search(
        request.graph,
        list(request.roles),
        request.cluster,
        costs_of(request, pins),
        pins=pins,
        seconds=request.seconds,
        staleness=request.staleness,
        time_limit_s=time_limit_s,
        gap=gap,
        compare=compare,
    )


def plan_auto(
    request: PlanRequest, *, pins: Sequence[Pin] = (), time_limit_s: float = 60.0, gap: float = 0.0
) -> PlacementPlan:
    """The best plan. Raises PlacementError with the explanation where nothing fits, and PinError."""
    found = search_plan(request, pins=pins, time_limit_s=time_limit_s, gap=gap, compare=False)
    if isinstance(found, SearchResult):
        return plan_of(request, found.best, "auto", found.proof, pins=pins)

    raise _infeasible(request, found, pins)


def plan_strategy(
    request: PlanRequest,
    strategy: str | PlacementPlan | Sequence[PoolSpec],
    *,
    pins: Sequence[Pin] = (),
    time_limit_s: float = 60.0,
) -> PlacementPlan:
    """The best options and order under a strategy by name (`colocate`, `split`, ..., or `auto`) or on given
    pools, or the price of a plan: its layouts and settings are kept, what it leaves open is chosen.

    Raises PlacementError with the explanation where nothing fits.
    """
    if strategy == "auto":
        return plan_auto(request, pins=pins, time_limit_s=time_limit_s)
    specs: Sequence[PoolSpec]
    if isinstance(strategy, PlacementPlan):
        placed = strategy.on(request.cluster)
        request = as_planned(request, placed)
        name, specs, nodes = strategy.strategy, placed.pools, placed.nodes
    else:
        name, specs = "explicit", () if isinstance(strategy, str) else strategy
        if isinstance(strategy, str):
            name, specs = strategy, named_pools(strategy, list(request.roles), request.cluster)
        nodes = fit_pools(list(specs), request.cluster).nodes
    pools = planned_pools(request, specs, nodes)
    found = searched_on(request, pools, pins, time_limit_s)
    if isinstance(found, SearchResult):
        return plan_of(request, found.best, name, found.proof, pools=specs)

    raise _infeasible(request, found, pins, pools)


def planned_pools(
    request: PlanRequest, specs: Sequence[PoolSpec], nodes: Mapping[str, Sequence[tuple[str, int]]]
) -> list[PlannedPool]:
    """Pools with the devices that `nodes` gives each."""
    return [planned_pool(spec, nodes[spec.name], request.cluster) for spec in specs]


def searched_on(
    request: PlanRequest, pools: Sequence[PlannedPool], pins: Sequence[Pin], time_limit_s: float
) -> SearchResult | Infeasible:
    """The best options and order on given pools."""
    return search_given(
        request.graph,
        pools,
        request.cluster,
        costs_of(request, pins),
        pins=pins,
        seconds=request.seconds,
        staleness=request.staleness,
        time_limit_s=time_limit_s,
    )


def _infeasible(
    request: PlanRequest, found: Infeasible, pins: Sequence[Pin], pools: Sequence[PlannedPool] | None = None
) -> PlacementError:
    def solve(changed: PlanRequest) -> Assignment | None:
        return any_plan(
            changed.graph,
            list(changed.roles),
            changed.cluster,
            costs_of(changed, pins),
            pools=pools,
            pins=pins,
            seconds=changed.seconds,
            time_limit_s=_TRY_S,
        )

    return PlacementError("\n".join(explain_infeasible(request, found, solve)))


def costs_of(request: PlanRequest, pins: Sequence[Pin] = ()) -> PlannerCosts:
    """Prices for a search with these pins."""
    return PlannerCosts(request, keep={pin.what for pin in pins if pin.about_options})


def as_planned(request: PlanRequest, plan: PlacementPlan) -> PlanRequest:
    """The request with layouts and settings as the plan has them."""
    roles = {}
    for role, mine in request.roles.items():
        settings, layout = plan.settings_of(role), plan.layout_of(role)
        option = RoleOption(
            layout, settings.micro_batch or 1, settings.recompute or "none", bool(settings.offload)
        )
        fixed = request.fixed_as(role, option)
        roles[role] = replace(
            fixed,
            micro_batch_tokens=fixed.micro_batch_tokens if settings.micro_batch else mine.micro_batch_tokens,
            recompute=settings.recompute or mine.recompute,
            offload=mine.offload if settings.offload is None else settings.offload,
        )
    return replace(request, roles=roles)


def plan_of(
    request: PlanRequest,
    best: Assignment,
    strategy: str,
    proof: Proof | None = None,
    *,
    pins: Sequence[Pin] = (),
    pools: Sequence[PoolSpec] = (),
) -> PlacementPlan:
    """A search's assignment as a plan; `pools` are their specifications in the same order, else made here."""
    specs = list(pools) or [_spec(pool, request.cluster, pins) for pool in best.pools]
    names = {planned.name: spec.name for planned, spec in zip(best.pools, specs, strict=True)}
    nodes = {names[pool.name]: tuple(pool.nodes) for pool in best.pools}
    taken = dict.fromkeys((node.name for node in request.cluster.usable), 0)
    for entries in nodes.values():
        for name, count in entries:
            taken[name] += count
    costs = costs_of(request)
    return PlacementPlan(
        strategy,
        tuple(specs),
        {role: cost.option.layout for role, cost in best.costs.items()},
        nodes,
        {n.name: n.devices - taken[n.name] for n in request.cluster.usable if n.devices > taken[n.name]},
        {names[pool.name]: pool.devices.device_type for pool in best.pools},
        {role: _settings(request, role, cost) for role, cost in best.costs.items()},
        {names[pool]: order for pool, order in best.schedule.order.items()},
        Prediction(
            best.makespan_s,
            dict(best.seconds),
            {role: dict(cost.items) for role, cost in best.costs.items()},
            {role: cost.host for role, cost in best.costs.items() if cost.host},
            {names[pool.name]: _peak(request, best, pool) for pool in best.pools},
            {names[pool.name]: costs.device_bytes(pool.devices.device_type) for pool in best.pools},
        ),
        proof,
    )


def _settings(request: PlanRequest, role: str, cost: RoleCost) -> RoleSettings:
    option = cost.option
    return RoleSettings(
        option.micro_batch,
        option.recompute if request.trains(role) else None,
        True if option.offload else None,
    )


def _peak(request: PlanRequest, best: Assignment, pool: PlannedPool) -> float:
    """Bytes of the pool's fullest device at its fullest moment."""
    mine = [best.costs[role] for role in pool.roles]
    working = (
        sum(best.costs[role].working.get(op.name, 0.0) for role in pool.roles if role in op.roles)
        for op in request.graph.operations
    )
    return sum(cost.resident for cost in mine) + max(working, default=0.0)


def _spec(pool: PlannedPool, cluster: ClusterSpec, pins: Sequence[Pin]) -> PoolSpec:
    """What a run asks for to get such a pool: its device type where there are several, and pinned labels."""
    several = len(cluster.device_types) > 1
    labels = dict(
        str(pin.value).split("=", 1)
        for pin in pins
        if pin.what == "label" and pin.strength == "must" and set(pin.roles) & set(pool.roles)
    )
    return PoolSpec(
        pool.name,
        pool.roles,
        tuple(count for _, count in pool.nodes),
        cluster.device_kind,
        cpus_per_process(cluster),
        Where(device=pool.devices.device_type if several else "", labels=labels),
    )


def planned_pool(spec: PoolSpec, nodes: Sequence[tuple[str, int]], cluster: ClusterSpec) -> PlannedPool:
    """A pool on its nodes, for the search. Raises PlacementError for devices of several types."""
    there = {node.name: node for node in cluster.usable}
    types = sorted({there[name].device_type for name, _ in nodes})
    if len(types) > 1:
        raise PlacementError(
            f"pool {spec.name!r} mixes devices of types {', '.join(types)}: the slowest would set the pace; "
            "give each pool devices of one type",
            pool=spec.name,
        )
    groups = tuple(there[name].group for name, _ in nodes)
    devices = DeviceSet(types[0], tuple(count for _, count in nodes), groups if any(groups) else ())
    return PlannedPool(spec.name, spec.roles, devices, tuple(nodes))
