"""The usual strategies on a request, each at its best, and given plans at other workloads."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rolemesh.placement.auto import as_planned, plan_of, planned_pools, searched_on
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.pools import PlacementError, fit_pools
from rolemesh.placement.roles import PlanRequest
from rolemesh.placement.search import Pin, PlannedPool, SearchResult
from rolemesh.placement.search.grouping import allowed_groupings
from rolemesh.placement.search.plans import Assignment
from rolemesh.placement.strategies import named_pools

NAMED = ("colocate", "split", "standalone")
FORBIDDEN = "the pins forbid it"
_WALL = 4.0  # seconds on the clock for each of computing, at most: a search ends by the clock


class Budget:
    """Seconds of computing. What other processes take of the cores does not count, so that a busy machine
    compares as much as an idle one.
    """

    def __init__(self, limit_s: float) -> None:
        self._ends_s = time.process_time() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds that are left; below 0 when the limit is passed."""
        return self._ends_s - time.process_time()


@dataclass(frozen=True)
class Compared:
    """What became of strategies by name: their best plans, why others have none, and which were left out as
    the time ran out.
    """

    plans: Mapping[str, Assignment] = field(default_factory=dict)
    misfits: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


def compare_strategies(
    request: PlanRequest,
    *,
    names: Sequence[str] = NAMED,
    pins: Sequence[Pin] = (),
    known: Iterable[frozenset[frozenset[str]]] = (),
    limit_s: float = 10.0,
) -> Compared:
    """The best options and order under each strategy; one whose roles share pools as those of an earlier one
    do, or as `known` says, is left out. `limit_s` is of computing.
    """
    budget = Budget(limit_s)
    plans: dict[str, Assignment] = {}
    misfits: dict[str, str] = {}
    unknown: list[str] = []
    seen = set(known)
    allowed = {
        frozenset(frozenset(group) for group in grouping)
        for grouping in (allowed_groupings(list(request.roles), pins) if pins else ())
    }
    for name in names:
        if budget.left_s <= 0:
            unknown.append(name)
            continue
        try:
            pools = _pools(name, request)
        except PlacementError as error:
            misfits[name] = str(error).splitlines()[0].removesuffix(" Nodes:")
            continue
        groups = frozenset(frozenset(pool.roles) for pool in pools)
        if groups in seen:
            continue
        seen.add(groups)
        if allowed and groups not in allowed:
            misfits[name] = f"{FORBIDDEN}: {', '.join(str(pin) for pin in pins)}"
            continue
        found = searched_on(request, pools, pins, _WALL * budget.left_s)
        if isinstance(found, SearchResult):
            plans[name] = found.best
        elif found.overrun.item == "time":
            unknown.append(name)
        else:
            misfits[name] = str(found.overrun)
    return Compared(plans, misfits, tuple(unknown))


def price(request: PlanRequest, plan: PlacementPlan, *, limit_s: float = 10.0) -> Assignment | None:
    """The plan with its layouts and settings under a request; None where it does not fit there."""
    placed = plan if plan.nodes else plan.on(request.cluster)
    pools = planned_pools(request, placed.pools, placed.nodes)
    found = searched_on(as_planned(request, placed), pools, (), _WALL * limit_s)
    return found.best if isinstance(found, SearchResult) else None


def best_on_pools(
    request: PlanRequest, plan: PlacementPlan, *, pins: Sequence[Pin] = (), limit_s: float = 10.0
) -> PlacementPlan | None:
    """The plan's pools with the layouts, settings and order that are best there; None where nothing fits, or
    nothing was found in time.
    """
    placed = plan if plan.nodes else plan.on(request.cluster)
    if limit_s <= 0:
        return None
    pools = planned_pools(request, placed.pools, placed.nodes)
    found = searched_on(request, pools, pins, _WALL * limit_s)
    return plan_of(request, found.best, plan.strategy) if isinstance(found, SearchResult) else None


def _pools(name: str, request: PlanRequest) -> list[PlannedPool]:
    specs = named_pools(name, list(request.roles), request.cluster)
    nodes = fit_pools(list(specs), request.cluster).nodes
    return planned_pools(request, specs, nodes)
