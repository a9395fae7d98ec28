"""The search from its input to a result: a coarse pass for many shapes, the exact one, comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.costs import Costs
from rolemesh.placement.graph import StepGraph
from rolemesh.placement.search.branch import ROUNDING, BranchAndBound, Outcome
from rolemesh.placement.search.clock import Clock
from rolemesh.placement.search.grouping import STRATEGIES, Grouping, allowed_groupings
from rolemesh.placement.search.misfit import explain_misfit
from rolemesh.placement.search.pins import Pin
from rolemesh.placement.search.plans import Alternative, Assignment, Infeasible, Proof, SearchResult
from rolemesh.placement.search.problem import Problem
from rolemesh.placement.search.space import Shape, Space
from rolemesh.placement.search.why import why_it_loses

_MANY_SHAPES = 64  # beyond these a coarse pass finds the first plan
_COARSE_PART = 0.3  # of the time
_COARSE_GAP = 0.01
_ASKING_PART = 0.7  # of the time for a pass, to ask the costs beforehand
_LOOSE = 1.2  # times the floor, and a floor says little
_COMPARED_GAP = 0.01  # how exactly the other strategies are searched
_COMPARED_PART = 0.5  # of the time that is left, for each of them
_RUNNERS_UP = 3


def search(
    graph: StepGraph,
    roles: Sequence[str],
    cluster: ClusterSpec,
    costs: Costs,
    *,
    pins: Sequence[Pin] = (),
    seconds: Mapping[str, float] | None = None,
    staleness: int = 0,
    strategy: str = "auto",
    time_limit_s: float = 60.0,
    gap: float = 0.0,
    compare: bool = True,
) -> SearchResult | Infeasible:
    """The plan whose step is shortest, with the proof.

    Args:
        roles: those that need devices. `seconds` gives the operations of the others, by name.
        pins: what the user fixes or wishes.
        staleness: 1 for generation one step ahead; see `schedule`.
        strategy: `auto` decides who shares a pool; `colocate`, `split` and `standalone` say it.
        time_limit_s: after it the best plan so far is returned, with its gap. The same input gives the same
            plan unless the time ran out.
        gap: stop as soon as no plan can be better by more than this part.
        compare: also search the other strategies, and say why they lose.

    Raises PinError, SearchError, and what the costs raise.
    """
    clock = Clock(time_limit_s)
    problem = Problem(graph, roles, cluster, costs, pins=pins, seconds=seconds, staleness=staleness)
    allowed = allowed_groupings(roles, pins, strategy)
    if problem.never_runs():
        return explain_misfit(problem, allowed, clock, 0, True)
    outcome = _solve(problem, allowed, clock, gap)
    if outcome.best is None:
        return explain_misfit(problem, allowed, clock, outcome.visited, not clock.over)
    proof = _proof(problem, outcome.best, outcome, clock)
    if not compare:
        return SearchResult(outcome.best, proof)
    strategies = _strategies(problem, outcome.best, clock)
    return SearchResult(
        outcome.best, proof, strategies, _runners_up(problem, outcome, strategies.values(), clock)
    )


def _solve(problem: Problem, allowed: Sequence[Grouping], clock: Clock, gap: float) -> Outcome:
    """Any plan first, to know which devices cannot give a better one; then branch and bound, on large
    clusters over a coarse choice of shapes before all.
    """
    shapes = problem.space.shapes
    few = coarse(shapes, problem.space) if len(shapes) > _MANY_SHAPES else shapes
    problem.exclude_none()
    outcome = BranchAndBound(problem, few, allowed, clock, any_plan=True).run()
    if outcome.best is None and few is shapes:
        return outcome
    visited = outcome.visited
    if few is not shapes:
        part = clock.part(_COARSE_PART)
        _ask(problem, few, outcome.best, part.part(_ASKING_PART))
        exactly = max(gap, _COARSE_GAP)
        outcome = BranchAndBound(problem, few, allowed, part, known=outcome.best, gap=exactly).run()
        visited += outcome.visited
    _ask(problem, shapes, outcome.best, clock.part(_ASKING_PART))
    outcome = BranchAndBound(problem, shapes, allowed, clock, known=outcome.best, gap=gap).run()
    return Outcome(outcome.best, outcome.bound, visited + outcome.visited, outcome.groupings)


def _ask(problem: Problem, shapes: Sequence[Shape], known: Assignment | None, clock: Clock) -> None:
    """Ask for the options of the roles whose floors say little, those first that say least.

    What is learned of one excludes devices for the next. Others are asked for where the search looks at them.
    """

    def loose_s(role: str) -> float:
        if known is None:
            return math.inf
        on = known.pool_of(role).devices
        shape = next(shape for shape in problem.space.shapes if shape.devices == on)
        floor_s = float(problem.floor(role, shape).sum())
        took_s = sum(known.seconds[name] for name in problem.own[role])
        return took_s - floor_s if took_s > _LOOSE * floor_s else 0.0

    for role in sorted(problem.roles, key=loose_s, reverse=True):
        if known is not None:
            problem.exclude_above(known.objective_s)
        if loose_s(role) > 0:
            problem.survey(role, shapes, clock)


def coarse(shapes: Sequence[Shape], space: Space) -> list[Shape]:
    """Shares, and node counts 1, 2, 3, 4, 6, 8, 12, ... up to all of a type."""
    most = {
        kind.device_type: max(s.devices.world for s in shapes if s.devices.device_type == kind.device_type)
        for kind in space.classes
    }
    counts = {n << k for k in range(32) for n in (1, 3)}
    return [
        shape
        for shape in shapes
        if shape.share is not None
        or len(shape.devices.counts) in counts
        or shape.devices.world == most[shape.devices.device_type]
    ]


def _proof(problem: Problem, best: Assignment, outcome: Outcome, clock: Clock) -> Proof:
    gap = max(0.0, 1 - outcome.bound / best.objective_s) if best.objective_s else 0.0
    scope = (
        "" if problem.space.complete else "nodes of a pool packed into few topology groups, or spread evenly"
    )
    if gap <= ROUNDING:
        return Proof(best.objective_s, 0.0, outcome.visited, clock.passed_s, scope)
    return Proof(outcome.bound, gap, outcome.visited, clock.passed_s, scope)


def _strategies(problem: Problem, best: Assignment, clock: Clock) -> dict[str, Alternative]:
    """The best plan of every strategy, to one part in a hundred."""
    made = {}
    for name in STRATEGIES:
        allowed = allowed_groupings(problem.roles, problem.pins, name)
        if not allowed:
            made[name] = Alternative(name, None, None, "the pins do not let these roles share pools so")
        elif _same(allowed[0], best):
            made[name] = Alternative(name, best, None, "is the best plan")
        else:
            made[name] = _alternative(name, problem, allowed[0], best, clock)
    return made


def _runners_up(
    problem: Problem, outcome: Outcome, strategies: Iterable[Alternative], clock: Clock
) -> tuple[Alternative, ...]:
    """The best plans of the groupings with the least bounds, the named strategies' left out."""
    best = outcome.best
    assert best is not None, "only a plan has runners-up"
    known = [best, *(other.plan for other in strategies if other.plan is not None)]
    others = [pools for pools in outcome.groupings if not any(_same(pools, plan) for plan in known)]
    made = [
        _alternative(" | ".join("+".join(pool) for pool in pools), problem, pools, best, clock)
        for pools in others[:_RUNNERS_UP]
    ]
    found = [(other.plan.objective_s, other) for other in made if other.plan is not None]
    return tuple(other for _, other in sorted(found, key=lambda pair: pair[0]))


def _alternative(name: str, problem: Problem, pools: Grouping, best: Assignment, clock: Clock) -> Alternative:
    part = clock.part(_COMPARED_PART)
    outcome = _solve(problem, [pools], part, _COMPARED_GAP)
    if outcome.best is None:
        misfit = explain_misfit(problem, [pools], part, outcome.visited, not part.over, changes=False)
        return Alternative(name, None, None, f"{'does not fit: ' * misfit.proven}{misfit.overrun}")
    return Alternative(
        name, outcome.best, _proof(problem, outcome.best, outcome, part), why_it_loses(best, outcome.best)
    )


def _same(pools: Grouping, plan: Assignment) -> bool:
    return {frozenset(pool) for pool in pools} == {frozenset(pool.roles) for pool in plan.pools}
