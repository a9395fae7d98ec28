"""The search from its input to a result: a coarse pass for many shapes, the exact one, comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
_SURVEY_PART = 0.7  # of the time that is left then, to ask the costs for all options
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
    outcome = _solve(problem, allowed, clock, gap)
    if outcome.best is None:
        return explain_misfit(problem, allowed, clock, outcome.visited, not clock.over)
    proof = _proof(problem, outcome.best, outcome, clock)
    runners = sorted(
        (plan for plan in outcome.found.values() if plan.pools != outcome.best.pools),
        key=lambda plan: plan.objective_s,
    )
    return SearchResult(
        outcome.best,
        proof,
        _strategies(problem, outcome.best, clock) if compare else {},
        tuple(
            Alternative(
                " | ".join(pool.name for pool in plan.pools), plan, None, why_it_loses(outcome.best, plan)
            )
            for plan in runners[:_RUNNERS_UP]
        ),
    )


def _solve(problem: Problem, allowed: Sequence[Grouping], clock: Clock, gap: float) -> Outcome:
    """Branch and bound, after a coarse pass where there are many shapes."""
    shapes = problem.space.shapes
    if len(shapes) <= _MANY_SHAPES:
        problem.survey(shapes, clock)
        return BranchAndBound(problem, shapes, allowed, clock, gap=gap).run()
    few = coarse(shapes, problem.space)
    problem.survey(few, clock.part(_COARSE_PART))
    first = BranchAndBound(problem, few, allowed, clock.part(_COARSE_PART), gap=max(gap, _COARSE_GAP)).run()
    if first.best is not None:
        problem.exclude_above(first.best.objective_s)
    problem.survey(shapes, clock.part(_SURVEY_PART))
    second = BranchAndBound(problem, shapes, allowed, clock, known=first.best, gap=gap).run()
    found = first.found | {
        pools: plan
        for pools, plan in second.found.items()
        if pools not in first.found or plan.objective_s < first.found[pools].objective_s
    }
    return Outcome(second.best, second.bound, first.visited + second.visited, found)


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
    mine = {frozenset(pool.roles) for pool in best.pools}
    made = {}
    for name in STRATEGIES:
        allowed = allowed_groupings(problem.roles, problem.pins, name)
        if not allowed:
            made[name] = Alternative(name, None, None, "the pins do not let these roles share pools so")
        elif {frozenset(pool) for pool in allowed[0]} == mine:
            made[name] = Alternative(name, best, None, "is the best plan")
        else:
            part = clock.part(_COMPARED_PART)
            outcome = _solve(problem, allowed, part, _COMPARED_GAP)
            if outcome.best is None:
                misfit = explain_misfit(problem, allowed, part, outcome.visited, not part.over, changes=False)
                made[name] = Alternative(name, None, None, f"does not fit: {misfit.overrun}")
            else:
                proof = _proof(problem, outcome.best, outcome, part)
                made[name] = Alternative(name, outcome.best, proof, why_it_loses(best, outcome.best))
    return made
