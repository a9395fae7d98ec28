"""A run's report as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence

from rolemesh.launch import html
from rolemesh.launch.report import MEMORY_HEADER, POOL_HEADER, RunReport, memory_row, pool_row
from rolemesh.placement.memory.items import GIB
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.timeline import Span

MOST_LANES = 32


def report_page(report: RunReport) -> str:
    """The whole document."""
    name = report.folder.resolve().name
    plan = f"strategy {report.plan.strategy}, " if report.plan else ""
    parts = [_step(report), _operations(report), _pools(report)]
    if report.memory:
        parts.append(_memory(report))
    if report.plan:
        parts.append(_placement(report.plan))
    if report.recoveries:
        parts.append(html.section("Recoveries", *(html.paragraph(line) for line in report.recoveries)))
    if report.notes:
        parts.append(html.section("Notes", *(html.paragraph(note) for note in report.notes)))
    return html.page(f"Run {name}", *parts, subtitle=f"{plan}{report.steps} steps")


def _step(report: RunReport) -> html.Markup:
    """The predicted and the measured step over each other, on one time axis."""
    names = [op.name for op in report.operations]
    chosen = html.colours(names)
    end = max((span.end_s for span in (*report.measured, *report.predicted)), default=0.0)
    parts = [html.legend(chosen)]
    if report.predicted:
        parts.append(_gantt(report.predicted, "predicted", end, chosen))
    parts.append(_gantt(report.measured, "measured, the step of median length", end, chosen))
    return html.section("One step", *parts)


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
        chosen = html.colours(["predicted", "measured"])
        parts += [html.legend(chosen), html.bar_chart(compared, unit="s", chosen=chosen)]
    return html.section("Operations", *parts)


def _pools(report: RunReport) -> html.Markup:
    note = "Busy: one of the pool's ranks computes. Idle: the rest of the step."
    rows = [pool_row(pool) for pool in report.pools]
    return html.section("Pools", html.table(POOL_HEADER, rows), html.Markup(f'<p class="note">{note}</p>'))


def _memory(report: RunReport) -> html.Markup:
    bars = {
        entry.pool: {
            name: amount / GIB
            for name, amount in (("predicted", entry.predicted), ("measured", entry.measured))
            if amount is not None
        }
        for entry in report.memory
    }
    limits = {entry.pool: entry.limit / GIB for entry in report.memory if entry.limit}
    chosen = html.colours(["predicted", "measured"])
    return html.section(
        "Memory",
        html.legend(chosen),
        html.bar_chart(bars, unit="GiB", limits=limits, chosen=chosen),
        html.table(MEMORY_HEADER, [memory_row(entry) for entry in report.memory]),
    )


def _placement(plan: PlacementPlan) -> html.Markup:
    chosen = html.colours(pool.name for pool in plan.pools)
    nodes: dict[str, list[str]] = {}
    for pool in plan.pools:
        for node, count in plan.nodes.get(pool.name, ()):
            nodes.setdefault(node, []).extend([pool.name] * count)
    for node, count in plan.idle.items():
        nodes.setdefault(node, []).extend([""] * count)
    header = ("role", "pool", "layout")
    rows = [(role, plan.pool_of(role).name, str(plan.layouts[role])) for role in plan.roles]
    drawn = [html.legend(chosen), html.placement_map(nodes, chosen=chosen)] if nodes else []
    return html.section("Placement", *drawn, html.table(header, rows))
