"""A run's report as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence

from rolemesh.launch import html
from rolemesh.launch.pictures.health import health_chart
from rolemesh.launch.pictures.length_histogram import drawable, length_histogram
from rolemesh.launch.pictures.memory_step import MOST_TIMES, memory_step
from rolemesh.launch.pictures.placement_map import role_colours
from rolemesh.launch.pictures.step_gantt import operation_names, step_gantt, waiting_rows
from rolemesh.launch.pictures.svg import colours
from rolemesh.launch.plan_html import placement_section
from rolemesh.launch.report import (
    MEMORY_HEADER,
    POOL_HEADER,
    MemoryReport,
    RunReport,
    memory_row,
    pool_row,
)
from rolemesh.launch.report_memory import cluster_of, planned_memory
from rolemesh.launch.run_health import RunHealth, read_health
from rolemesh.launch.running import running_requests
from rolemesh.placement.cluster import ClusterError
from rolemesh.placement.memory.items import GIB
from rolemesh.placement.memory_over_step import PoolMemory
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.step_view import step_view
from rolemesh.placement.timeline import Span

MOST_LANES = 32


def report_page(report: RunReport) -> str:
    """The whole document."""
    name = report.folder.resolve().name
    plan = f"strategy {report.plan.strategy}, " if report.plan else ""
    health = read_health(report.folder)
    parts = [_health(health), _step(report), _operations(report), _pools(report)]
    if report.memory:
        parts.append(_memory(report))
    parts.append(_lengths(health, running_requests(report.measured)))
    if report.plan:
        parts.append(_placement(report.plan))
    if report.recoveries:
        parts.append(html.section("Recoveries", *(html.paragraph(line) for line in report.recoveries)))
    if report.notes:
        parts.append(html.section("Notes", *(html.paragraph(note) for note in report.notes)))
    return html.page(f"Run {name}", *parts, subtitle=f"{plan}{report.steps} steps")


def _health(health: RunHealth) -> html.Markup:
    said = [f"not in this run's metrics: {', '.join(health.missing)}"] if health.missing else []
    if health.recoveries:
        said.append(f"dashed: workers lost in step {', '.join(map(str, health.recoveries))}")
    chart = health_chart(health.panels, health.recoveries)
    return html.section("Run health, over steps", html.figure(chart, "; ".join(said)))


def _lengths(health: RunHealth, running: Sequence[tuple[float, int]]) -> html.Markup:
    if not health.lengths:
        return html.section("Response lengths", html.note("no samples are kept in the run folder"))
    said = (
        f"The {len(health.lengths):,} validation samples after step {health.lengths_step}. The line counts "
        "from their lengths how many are still being written after so many tokens, as if all began together "
        "and wrote equally fast. "
    )
    said += (
        f"Dashed: measured in the step of median length, {max(n for _, n in running):,} responses over "
        f"{running[-1][0]:.3g} s, drawn so that the last ends at the longest response; queued ones count too."
        if drawable(running)
        else "How many were really being written at a time is not in the timeline: vLLM engines note it."
    )
    return html.section("Response lengths", html.figure(length_histogram(health.lengths, running), said))


def _step(report: RunReport) -> html.Markup:
    """The planned step above the measured one, on one axis; then every rank."""
    pools = [pool.name for pool in report.pools]
    views = {"planned": step_view(report.predicted, report.waits, pools)} if report.predicted else {}
    views["measured"] = step_view(report.measured, report.waits, pools)
    chosen = colours([*operation_names(list(views.values())), *(op.name for op in report.operations)])
    paths = [
        f"{what}: {' > '.join(view.critical_path)}, {view.path_s:.3g} of {view.length_s:.3g} s"
        for what, view in views.items()
    ]
    said = f"Critical path (dark line), {'; '.join(paths)}. Hatched: idle."
    rows = [(what, *row) for what, view in views.items() for row in waiting_rows(view)]
    end = max(span.end_s for span in report.measured)
    return html.section(
        "One step",
        html.legend(chosen),
        html.figure(step_gantt(views, chosen), said),
        html.table(("step", "pool", "idle", "waits"), rows),
        html.subsection(
            "Every rank", _gantt(report.measured, "measured, the step of median length", end, chosen)
        ),
    )


def _gantt(spans: Sequence[Span], caption: str, end: float, chosen: dict[str, str]) -> html.Markup:
    """A lane for each pool and rank; where they are too many, for each pool's first rank."""
    ranks = sorted({(span.pool, span.rank) for span in spans}, key=lambda at: _lane_order(spans, at))
    if len(ranks) > MOST_LANES:
        ranks = [(pool, rank) for pool, rank in ranks if rank == 0]
        caption += "; the first rank of each pool"
    bars = [
        html.Bar(_lane(*at), span.name, span.start_s, span.end_s, span.role)
        for at in ranks
        for span in spans
        if (span.pool, span.rank) == at
    ]
    lanes = [_lane(*at) for at in ranks]
    return html.figure(html.gantt(bars, lanes=lanes, end=end, chosen=chosen), caption)


def _lane_order(spans: Sequence[Span], at: tuple[str, int]) -> tuple[int, int]:
    pools = list(dict.fromkeys(span.pool for span in spans))
    return pools.index(at[0]), at[1]


def _lane(pool: str, rank: int) -> str:
    return f"{pool} rank {rank}"


def _operations(report: RunReport) -> html.Markup:
    header = ("operation", "kind", "pool", "predicted, s", "measured, s", "lowest", "highest", "error")
    rows: list[list[html.Cell]] = []
    for op in report.operations:
        spread = op.measured_s
        seen = [spread.median, spread.low, spread.high] if spread else [None, None, None]
        error = "–" if op.error is None else f"{op.error:+.0%}"
        rows.append([op.name, op.kind, " + ".join(op.pools), op.predicted_s, *seen, error])
    step = report.step_s
    error = "–" if report.step_error is None else f"{report.step_error:+.0%}"
    rows.append(["step", "", "", report.predicted_step_s, step.median, step.low, step.high, error])
    compared = {
        op.name: {"predicted": op.predicted_s, "measured": op.measured_s.median}
        for op in report.operations
        if op.predicted_s is not None and op.measured_s is not None
    }
    parts: list[str] = [
        html.table(header, rows),
        html.Markup(f'<p class="note">Medians over {step.n} steps; lowest and highest of them.</p>'),
    ]
    if compared:
        chosen = colours(["predicted", "measured"])
        parts += [html.legend(chosen), html.bar_chart(compared, unit="s", chosen=chosen)]
    return html.section("Operations", *parts)


def _pools(report: RunReport) -> html.Markup:
    note = "Busy: one of the pool's ranks computes. Idle: the rest of the step."
    rows = [pool_row(pool) for pool in report.pools]
    return html.section("Pools", html.table(POOL_HEADER, rows), html.Markup(f'<p class="note">{note}</p>'))


def _memory(report: RunReport) -> html.Markup:
    """Each pool over the planned step with the measured peak; where that is not known, peaks alone."""
    over, why_not = planned_memory(report.folder, report.plan)
    charts: list[str] = []
    if over and report.plan and report.predicted:
        view = step_view(report.predicted, report.waits)
        lanes = {lane.name: lane for lane in view.lanes}
        roles, operations = role_colours(report.plan.roles), colours(operation_names([view]))
        charts = [html.legend(roles), html.legend(operations)]
        for entry in report.memory:
            if entry.pool in over and entry.pool in lanes:
                chart = memory_step(
                    over[entry.pool],
                    lanes[entry.pool],
                    view.length_s,
                    roles=roles,
                    operations=operations,
                    measured=entry.measured,
                )
                charts.append(html.figure(chart, _memory_caption(entry, over[entry.pool])))
    else:
        charts = [
            *_peaks(report),
            html.note(f"What is held from operation to operation is not drawn: {why_not}"),
        ]
    header = html.table(MEMORY_HEADER, [memory_row(entry) for entry in report.memory])
    return html.section("Memory of the heaviest rank over one step", *charts, header)


def _memory_caption(entry: MemoryReport, over: PoolMemory) -> str:
    said = f"{entry.pool}: planned {over.peak / GIB:.3g} of {over.limit / GIB:.3g} GiB at the fullest moment"
    if entry.predicted and abs(over.peak / entry.predicted - 1) > 0.01:
        said += (
            f" (the plan's file says {entry.predicted / GIB:.3g} GiB: it is of another version or profile)"
        )
    if entry.measured is None:
        return said
    beyond = ", beyond the picture" if entry.measured > MOST_TIMES * over.peak else ""
    return f"{said}; measured {entry.measured / GIB:.3g} GiB ({entry.what}){beyond}"


def _peaks(report: RunReport) -> list[html.Markup]:
    bars = {
        entry.pool: {
            name: amount / GIB
            for name, amount in (("predicted", entry.predicted), ("measured", entry.measured))
            if amount is not None
        }
        for entry in report.memory
    }
    limits = {entry.pool: entry.limit / GIB for entry in report.memory if entry.limit}
    chosen = colours(["predicted", "measured"])
    return [html.legend(chosen), html.bar_chart(bars, unit="GiB", limits=limits, chosen=chosen)]


def _placement(plan: PlacementPlan) -> html.Markup:
    try:
        return placement_section(plan, cluster_of(plan))
    except ClusterError:
        return placement_section(plan, None)
