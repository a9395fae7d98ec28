"""The cells of a benchmark that are simulated: planned, and one step played."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

from rolemesh.launch.bench_result import Bar, CellResult, State
from rolemesh.launch.bench_spec import Case, Limits
from rolemesh.launch.plan import PLANNING_ERRORS, plan_on, requested_pools
from rolemesh.launch.request import pins_of, request_of
from rolemesh.placement.auto import plan_auto, plan_strategy
from rolemesh.placement.graph import StepGraph
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.pools import PoolSpec
from rolemesh.placement.simulator import SimulatedPool, Simulation, simulate_period
from rolemesh.placement.strategies import explicit_pools
from rolemesh.placement.timeline import Span

_STARTING_S = 30.0  # until the process that plans has read its case
_EXPLAINING_S = 60.0  # to find out what does not fit, and what would


def simulate_case(case: Case, limits: Limits) -> Iterator[CellResult]:
    """The cells of a case one after the other, planned in a process that is ended when one takes too long."""
    waiting = list(case.recipes)
    while waiting:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_plan_all, args=(case, waiting, limits, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            yield from _received(case, waiting, limits, ours)
        finally:
            process.kill()
            process.join()


def _received(case: Case, waiting: list[str], limits: Limits, ours: Connection) -> Iterator[CellResult]:
    """What arrives in time; `waiting` loses what is answered, and the one that is not."""
    limit_s = _STARTING_S + 2 * limits.cell_s + _EXPLAINING_S
    while waiting:
        strategy = waiting[0]
        try:
            found = ours.recv() if ours.poll(limit_s) else None
        except EOFError:
            waiting.pop(0)
            yield _empty(case, strategy, "failed", "the process that planned it ended (out of host memory?)")
            return
        waiting.pop(0)
        if found is None:
            late = _empty(case, strategy, "no plan found", f"none within {limit_s:g} s")
            yield replace(late, planning_s=limit_s)
            return
        yield found


def _plan_all(case: Case, strategies: Sequence[str], limits: Limits, theirs: Connection) -> None:
    """In a process of its own: plan and send."""
    for strategy in strategies:
        start = time.monotonic()
        try:
            found = simulate_cell(case, strategy, limits)
        except PLANNING_ERRORS as error:
            late = "no plan was found in" in str(error)
            found = _empty(case, strategy, "no plan found" if late else "does not fit", str(error))
        except Exception as error:  # a cell tells what is wrong with it; the others go on
            found = _empty(case, strategy, "failed", f"{type(error).__name__}: {error}")
        theirs.send(replace(found, planning_s=time.monotonic() - start))


def simulate_cell(case: Case, strategy: str, limits: Limits) -> CellResult:
    """The best plan of a strategy and what it predicts. Raises one of PLANNING_ERRORS where there is none."""
    recipe = case.recipes[strategy]
    runnable = recipe.rollout.engine == "hf"
    request = request_of(recipe, case.spec, case.shapes, runnable=runnable)
    pins = pins_of(recipe)
    if recipe.placement.strategy == "auto":
        plan = plan_auto(request, pins=pins, time_limit_s=limits.cell_s, gap=limits.gap)
    else:
        given: str | PlacementPlan | Sequence[PoolSpec] = str(recipe.placement.strategy)
        if recipe.placement.plan:
            given = plan_on(recipe, case.spec, case.shapes, runnable=runnable)
        elif pools := requested_pools(recipe):
            given = explicit_pools(pools, recipe.roles, case.spec)
        plan = plan_strategy(request, given, pins=pins, time_limit_s=limits.cell_s)
    played = play(plan, request.graph, request.staleness)
    step_s = plan.prediction.step_s if plan.prediction.step_s is not None else played.total_s
    return CellResult(
        *(case.model, case.cluster, case.workload, strategy, case.spec.n_devices),
        state="ok",
        step_s=step_s,
        predicted_s=step_s,
        samples=request.workload.samples,
        tokens=request.workload.tokens,
        bars=bars_of(played.timeline.spans),
        utilisation=played.utilisation,
        plan=plan,
    )


def play(plan: PlacementPlan, graph: StepGraph, staleness: int = 0) -> Simulation:
    """One step in the plan's order; see `simulate_period`."""
    seconds: Mapping[str, float] = plan.prediction.operations_s
    pools = [SimulatedPool(pool.name, pool.roles, pool.world) for pool in plan.pools]
    return simulate_period(
        graph,
        {op.name: seconds.get(op.name, 0.0) for op in graph.operations},
        pools,
        order=plan.order or None,
        staleness=staleness,
    )


def bars_of(spans: Sequence[Span]) -> tuple[Bar, ...]:
    """Operations on pools, from the first start: from each one's first rank's start to its last one's end."""
    first = min((span.start_s for span in spans), default=0.0)
    ends: dict[tuple[str, str], tuple[float, float]] = {}
    for span in spans:
        key = span.pool, span.name
        start, end = ends.get(key, (span.start_s, span.end_s))
        ends[key] = min(start, span.start_s), max(end, span.end_s)
    return tuple(
        Bar(pool, name, start - first, end - first)
        for (pool, name), (start, end) in sorted(ends.items(), key=lambda entry: entry[1])
    )


def _empty(case: Case, strategy: str, state: State, reason: str) -> CellResult:
    where = (case.model, case.cluster, case.workload, strategy, case.spec.n_devices)
    return CellResult(*where, state=state, reason=reason)
