"""Why nothing fits: the item that is over on the best try, and the nearest change that fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rolemesh.placement.cluster import ClusterSpec, NodeSpec
from rolemesh.placement.costs import Costs, DeviceSet, RoleCost
from rolemesh.placement.search.branch import BranchAndBound
from rolemesh.placement.search.clock import Clock
from rolemesh.placement.search.grouping import Grouping, allowed_groupings
from rolemesh.placement.search.pins import Pin
from rolemesh.placement.search.plans import Assignment, Change, Infeasible, Overrun
from rolemesh.placement.search.problem import Problem
from rolemesh.placement.search.space import Shape

_EXTRA_S = 10.0  # for the explanation, when the search used up its time
_PRECISION = 0.02  # of the reported bytes
_MOST_NODES = 4096  # of one class that are added


def explain_misfit(
    problem: Problem,
    allowed: Sequence[Grouping],
    clock: Clock,
    visited: int,
    proven: bool,
    *,
    changes: bool = True,
) -> Infeasible:
    """The answer when no plan was found."""
    if not proven:
        overrun = Overrun(problem.roles, "time", clock.limit_s, None)
        return Infeasible(overrun, None, False, visited, clock.passed_s)
    timer = Clock(_EXTRA_S)
    overrun = (
        next(iter(sorted(_alone(problem), key=lambda over: -over.over)), None)
        or _together(problem, allowed, timer)
        or Overrun(problem.roles, "devices", _devices_lacking(problem, allowed), None)
    )
    nearest = _nearest(problem, allowed, timer, overrun.roles) if changes else None
    return Infeasible(overrun, nearest, proven, visited, clock.passed_s)


class _Roomier:
    """Costs with `more` bytes on every device and host."""

    def __init__(self, problem: Problem, more: float) -> None:
        self.problem, self.more = problem, more

    def options(self, role: str, devices: DeviceSet) -> Sequence[RoleCost]:
        return self.problem.options(role, devices)

    def transfer_s(self, *arguments: object, together: bool) -> float:
        return 0.0  # only what fits is asked

    def device_bytes(self, device_type: str) -> float:
        return self.problem.device_bytes[device_type] + self.more

    def host_bytes(self, device_type: str) -> float:
        return self.problem.host_bytes[device_type] + self.more


def _alone(problem: Problem) -> Iterator[Overrun]:
    """Roles that fit on no devices even alone."""
    for role in problem.roles:
        shapes = [shape for shape in problem.space.shapes if problem.allowed(role, shape)]
        if any(problem.table(role, shape.devices) for shape in shapes):
            continue
        tries = [_over(problem, [(role, c)], s) for s in shapes for c in problem.options(role, s.devices)]
        yield min(tries, key=lambda over: over.over, default=Overrun((role,), "options", math.inf, None))


def _over(problem: Problem, costs: Sequence[tuple[str, RoleCost]], shape: Shape | DeviceSet) -> Overrun:
    """The item of which these roles exceed their devices most."""
    devices = shape.devices if isinstance(shape, Shape) else shape
    device = problem.pool_bytes(costs) - problem.device_bytes[devices.device_type]
    host = sum(cost.host for _, cost in costs) - problem.host_bytes[devices.device_type]
    items = {item: size for _, cost in costs for item, size in cost.items.items()}
    largest = max(items, key=lambda item: (items[item], item), default="")
    roles = tuple(role for role, _ in costs)
    if device >= host:
        return Overrun(roles, "device memory", device, devices, dict(costs), largest)
    return Overrun(roles, "host memory", host, devices, dict(costs), largest)


def _together(problem: Problem, allowed: Sequence[Grouping], timer: Clock) -> Overrun | None:
    """The pool that is over on the plan for which the devices would need the least more memory."""
    more = 2.0**30
    plan = _any_plan(problem, allowed, timer, _Roomier(problem, more))
    while plan is None and more < 2.0**50 and not timer.over:
        more *= 8
        plan = _any_plan(problem, allowed, timer, _Roomier(problem, more))
    low, best = 0.0, None
    while plan is not None:
        best = max(
            (_over(problem, [(r, plan.costs[r]) for r in pool.roles], pool.devices) for pool in plan.pools),
            key=lambda over: over.over,
        )
        plan = None
        while plan is None and low < best.over * (1 - _PRECISION) and not timer.over:
            more = (low + best.over) / 2
            plan = _any_plan(problem, allowed, timer, _Roomier(problem, more))
            low = more if plan is None else low
    return best


def _any_plan(
    problem: Problem,
    allowed: Sequence[Grouping],
    timer: Clock,
    costs: Costs,
    *,
    pins: Sequence[Pin] | None = None,
    cluster: ClusterSpec | None = None,
    first: Sequence[str] = (),
) -> Assignment | None:
    """`first` are roles that are the likeliest to have no options."""
    changed = Problem(
        problem.graph,
        problem.roles,
        cluster or problem.cluster,
        costs,
        pins=problem.pins if pins is None else pins,
        seconds=dict(zip(problem.names, problem.fixed.tolist(), strict=True)),
    )
    if changed.never_runs(*first):
        return None
    return BranchAndBound(changed, changed.space.shapes, allowed, timer, any_plan=True).run().best


def _devices_lacking(problem: Problem, allowed: Sequence[Grouping]) -> float:
    fewest = min((len(pools) for pools in allowed), default=0)
    return max(1.0, fewest - problem.cluster.n_devices)


def _nearest(
    problem: Problem, allowed: Sequence[Grouping], timer: Clock, first: Sequence[str]
) -> Change | None:
    """One must-pin fewer, else all of them, else the fewest devices more; `first` are the roles at fault."""
    musts = [pin for pin in problem.pins if pin.strength == "must"]
    sets = [[pin] for pin in musts] + ([musts] if len(musts) > 1 else [])
    for dropped in sets:
        kept = [pin for pin in problem.pins if pin not in dropped]
        about_pools = any(pin.about_pools for pin in dropped)
        pools = allowed_groupings(problem.roles, kept) if about_pools else allowed
        plan = _any_plan(problem, pools, timer, problem.costs, pins=kept, first=first)
        if plan is not None:
            return Change(dropped=tuple(dropped), plan=plan)
    return min(_larger(problem, allowed, timer, first), key=lambda found: found[0], default=(0, None))[1]


def _larger(
    problem: Problem, allowed: Sequence[Grouping], timer: Clock, first: Sequence[str]
) -> Iterable[tuple[int, Change]]:
    """For each class of nodes the fewest that make it fit, with their devices."""
    for kind in problem.space.classes:
        like = next(node for node in problem.cluster.usable if node.name == kind.groups[0][0])

        def plan_with(count: int, like: NodeSpec = like) -> Assignment | None:
            nodes = tuple(replace(like, name=f"added-{i}", address="") for i in range(count))
            cluster = replace(problem.cluster, nodes=(*problem.cluster.nodes, *nodes))
            return _any_plan(problem, allowed, timer, problem.costs, cluster=cluster, first=first)

        count, plan = 1, plan_with(1)
        while plan is None and count < _MOST_NODES and not timer.over:
            count *= 2
            plan = plan_with(count)
        if plan is None:
            continue
        low = count // 2  # does not fit
        while count - low > 1 and not timer.over:
            middle = (low + count) // 2
            found = plan_with(middle)
            low, count, plan = (middle, count, plan) if found is None else (low, middle, found)
        yield (
            count * kind.devices,
            Change(added=((f"{kind.devices} x {kind.device_type}", count),), plan=plan),
        )
