"""Why nothing fits and what would, and why other strategies lose: lines for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from rolemesh.placement.costs import RoleCost
from rolemesh.placement.memory.items import GIB
from rolemesh.placement.roles import PlanRequest, RoleRequest
from rolemesh.placement.search import Infeasible, Overrun, SearchResult
from rolemesh.placement.search.plans import Assignment

Solve = Callable[[PlanRequest], Assignment | None]


def explain_infeasible(request: PlanRequest, found: Infeasible, solve: Solve) -> list[str]:
    """What is over by how much on the best try, and the nearest changes that fit: of options, and of nodes.

    `solve` looks for any plan of another request, under the same pins or on the same pools.
    """
    lines = [f"nothing fits: {_say_overrun(request, found.overrun)}", *_legal(request, found.overrun)]
    known = len(lines)
    lines += [
        f"would fit: {change} (a plan with {best.makespan_s:.3g} s a step)"
        for change, best in changes_that_fit(request, solve)
    ]
    if found.nearest is not None:
        lines.append(f"would fit: {found.nearest}")
    if len(lines) == known:
        lines.append("no single change that was tried would fit")
    if not found.proven:
        lines.append("the time ran out before everything was tried")
    return lines


def changes_that_fit(request: PlanRequest, solve: Solve) -> Iterator[tuple[str, Assignment]]:
    """One thing less fixed, and a plan with it; last what our workers cannot do."""
    for role, mine in request.roles.items():
        for what, relaxed in _relaxed(mine):
            best = solve(replace(request, roles={**request.roles, role: relaxed}))
            if best is not None:
                yield f"{role} with {what} {_said(best.costs[role], what)}", best
    if request.runnable:
        best = solve(replace(request, runnable=False))
        if best is not None:
            roles = [role for role, cost in best.costs.items() if cost.option.offload]
            how = f"offload of {', '.join(roles)}" if roles else "other layouts"
            yield f"with {how}, which our workers cannot do yet", best


_HANGING = {"tp": ("sequence_parallel",), "pp": ("vpp", "pp_layers"), "vpp": ("pp_layers",)}
"""Keys that mean nothing without the axis."""


def _relaxed(mine: RoleRequest) -> Iterator[tuple[str, RoleRequest]]:
    if mine.recompute not in (None, "full"):
        yield "recompute", replace(mine, recompute="full")
    if mine.micro_batch_tokens is not None:
        yield "micro-batch", replace(mine, micro_batch_tokens=None)
    if mine.offload is False:
        yield "offload", replace(mine, offload=True)
    for axis in mine.pins:
        hanging = _HANGING.get(axis, ())
        kept = {name: size for name, size in mine.pins.items() if name not in (axis, *hanging)}
        yield axis, replace(mine, pins=kept)


def _said(cost: RoleCost, what: str) -> str:
    option = cost.option
    if what == "micro-batch":
        return f"of {option.micro_batch}"
    if hasattr(option, what):
        value = getattr(option, what)
        return "on" if value is True else str(value)
    return f"{getattr(option.layout, what)}"


def _say_overrun(request: PlanRequest, over: Overrun) -> str:
    if not over.costs or over.devices is None:
        return str(over)
    role = max(over.costs, key=lambda name: sum(over.costs[name].items.values()))
    cost = over.costs[role]
    item = max(cost.items, key=lambda name: (cost.items[name], name), default="")
    size = cost.items[item] / GIB if item else 0.0
    return (
        f"{over}; the fullest role is {role}, whose largest item is {item} "
        f"with {size:.1f} GiB on rank {_rank(request, role, cost)}"
    )


def _rank(request: PlanRequest, role: str, cost: RoleCost) -> int:
    """The first rank of the fullest stage: the last one where logits are the largest item, else the first."""
    layout = cost.option.layout
    largest = max(cost.items, key=lambda name: cost.items[name], default="")
    stage = layout.pp - 1 if largest in ("logits", "head input") else 0
    return int(layout.grid[stage].min())


def _legal(request: PlanRequest, over: Overrun) -> list[str]:
    """Why a role has no options at all."""
    if over.item != "options":
        return []
    lines = []
    for role in over.roles:
        mine, cluster = request.roles[role], request.cluster
        without = [kind for kind in cluster.device_types if mine.dtype not in cluster.profile(kind).dtypes]
        if without:
            has = ", ".join(f"{kind} has {', '.join(cluster.profile(kind).dtypes)}" for kind in without)
            lines.append(f"{role} is in {mine.dtype}: {has}")
        if request.runnable and mine.shape.not_runnable:
            lines.append(f"{role}: {mine.shape.not_runnable}")
        if mine.pins:
            lines.append(f"{role} is fixed to {', '.join(f'{k}={v}' for k, v in mine.pins.items())}")
    return lines


def explain_result(found: SearchResult) -> list[str]:
    """The best plan's time and proof, and for each strategy and runner-up why it loses."""
    proof = found.proof
    sure = "proven best" if proof.optimal else f"at most {proof.gap:.1%} above the best"
    lines = [f"best: {found.best.makespan_s:.4g} s a step, {sure}"]
    for other in (*found.strategies.values(), *found.runners_up):
        took = f"{other.plan.makespan_s:.4g} s, " if other.plan is not None else ""
        lines.append(f"{other.name}: {took}{other.reason}")
    return lines
