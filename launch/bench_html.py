"""A benchmark's report as one HTML file: who is fastest, over how many devices, and why."""

from __future__ import annotations

from collections.abc import Sequence

from rolemesh.launch import html
from rolemesh.launch.bench_result import BenchResult, CellResult, fastest, number
from rolemesh.launch.pictures.cells import rows_of
from rolemesh.launch.pictures.placement_map import device_squares, pool_colours
from rolemesh.launch.pictures.svg import colours
from rolemesh.placement.memory.items import GIB
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.pools import PoolSpec

_FULLEST, _GREY = "all roles of a pool at its fullest moment", "#4a5664"
_LEFT = 170.0  # room for the names of rows, the same in all charts so that they can be compared


def bench_page(result: BenchResult) -> str:
    """The whole document."""
    kind = "really run on the devices at hand" if result.run else "simulated"
    subtitle = (
        f"{len(result.cells)} cells, {kind}: {len(result.cases)} cases x {len(result.strategies)} strategies"
    )
    parts = [_summary(result), *_scaling(result), _details(result), _reading(result)]
    return html.page(result.title, *parts, subtitle=subtitle)


def _summary(result: BenchResult) -> html.Markup:
    """Seconds of a step: a row for each case, a column for each strategy."""
    best = fastest(result.cells)
    several = len({cell.workload for cell in result.cells}) > 1
    header = ["model", "cluster", *(["workload"] if several else []), *result.strategies]
    rows = []
    for case, cells in result.cases.items():
        names = [case[0], case[1], *([case[2]] if several else [])]
        by_strategy = {cell.strategy: cell for cell in cells}
        columns = [_seconds(by_strategy.get(name), best) for name in result.strategies]
        rows.append([*((name, "") for name in names), *columns])
    return html.section(
        "Seconds of a step",
        html.paragraph(_verdict(result)),
        html.matrix(header, rows),
        html.note("Green: the fastest of its row. Why a plan is missing stands in the details below."),
    )


def _seconds(cell: CellResult | None, best: Sequence[CellResult]) -> tuple[str, str]:
    if cell is None or cell.step_s is None:
        return (cell.state if cell else "-"), "none"
    spread = f" ({number(cell.measured.low_s)} to {number(cell.measured.high_s)})" if cell.measured else ""
    gap = f", gap {cell.gap:.0%}" if cell.gap and cell.gap >= 0.005 else ""
    return f"{number(cell.step_s, 's')}{spread}{gap}", "best" if cell in best else ""


def _verdict(result: BenchResult) -> str:
    best = fastest(result.cells)
    if not best:
        return "No case has a plan that fits."
    wins = {name: sum(cell.strategy == name for cell in best) for name in result.strategies}
    said = ", ".join(f"{name} {count}" for name, count in wins.items() if count)
    decided = len({cell.case for cell in best})
    without = len(result.cases) - decided
    return f"Fastest in {decided} cases: {said} (several where they are equal)." + (
        f" {without} cases have no plan." if without else ""
    )


def _scaling(result: BenchResult) -> list[html.Markup]:
    """Samples per second over the number of devices, a chart for each model and workload."""
    groups: dict[tuple[str, str], list[CellResult]] = {}
    for cell in result.cells:
        groups.setdefault((cell.model, cell.workload), []).append(cell)
    chosen = colours(result.strategies)
    charts = []
    for (model, workload), cells in groups.items():
        if len({cell.devices for cell in cells if cell.step_s}) < 2:
            continue
        series = {
            name: [
                (float(c.devices), c.samples_per_s or 0.0) for c in cells if c.strategy == name and c.step_s
            ]
            for name in result.strategies
        }
        chart = html.line_chart(series, x_label="devices", y_label="samples/s", log=True, chosen=chosen)
        name = model if workload == "default" else f"{model}, {workload}"
        charts.append(html.subsection(name, html.figure(chart)))
    return [html.section("Throughput over devices", html.legend(chosen), *charts)] if charts else []


def _details(result: BenchResult) -> html.Markup:
    several = len({cell.workload for cell in result.cells}) > 1
    cases: list[html.Markup] = []
    first = next((cell.case for cell in fastest(result.cells)), None)
    for (model, cluster, workload), cells in result.cases.items():
        best = next(iter(fastest(cells)), None)
        more = f"{best.strategy}, {number(best.step_s, 's')}" if best else "no plan"
        name = f"{model} on {cluster}" + (f", {workload}" if several else "")
        cases.append(html.disclosure(name, *_case(cells), more=more, opened=cells[0].case == first))
    return html.section("Cases", *cases)


def _case(cells: Sequence[CellResult]) -> list[str]:
    planned = [cell for cell in cells if cell.step_s is not None]
    parts: list[str] = [_rates(planned)] if planned else []
    parts += [_reason(cell) for cell in cells if cell not in planned]
    if not planned:
        return parts
    operations = colours(bar.operation for cell in planned for bar in cell.bars)
    end = max(bar.end_s for cell in planned for bar in cell.bars)
    items = colours(item for cell in planned for item in _items(cell.plan))
    items |= {_FULLEST: _GREY} if items else {}
    steps = [html.figure(_gantt(cell, end, operations), _caption(cell)) for cell in planned]
    parts.append(html.subsection("One step", html.legend(operations), *steps))
    placed = [cell for cell in planned if cell.plan]
    parts.append(html.subsection("Placement", _layouts(placed), *(_placement(cell) for cell in placed)))
    if items:
        shown = [_memory(cell, items) for cell in placed if _items(cell.plan)]
        parts.append(html.subsection("Memory of the heaviest rank", html.legend(items), *shown))
    return parts


def _reason(cell: CellResult) -> html.Markup:
    """Why a cell has no plan, and what would fit."""
    first, *others = cell.reason.splitlines() or [""]
    said = first.removeprefix("nothing fits: ")
    lines = [html.note(line.strip()) for line in others]
    return html.Markup(html.paragraph(f"{cell.strategy} {cell.state}: {said}") + "".join(lines))


def _rates(cells: Sequence[CellResult]) -> html.Markup:
    header: tuple[str, ...] = (
        "strategy",
        "step",
        "samples/s",
        "tokens/s per device",
        "busy",
        "fullest device",
    )
    measured = any(cell.measured for cell in cells)
    header = (*header[:2], *(("predicted", "lowest to highest") if measured else ()), *header[2:])
    rows = []
    for cell in cells:
        m = cell.measured
        seen = (number(cell.predicted_s, "s"), f"{number(m.low_s)} to {number(m.high_s, 's')}" if m else "-")
        rows.append(
            (
                cell.strategy,
                number(cell.step_s, "s"),
                *(seen if measured else ()),
                number(cell.samples_per_s),
                number(cell.tokens_per_s_per_device),
                ", ".join(f"{pool} {share:.0%}" for pool, share in cell.utilisation.items()),
                number(cell.peak_gib, "GiB"),
            )
        )
    return html.table(header, rows)


def _caption(cell: CellResult) -> str:
    """Idle time is the part of a pool's step that no bar covers."""
    kind = "measured, the step of median length" if cell.measured else "predicted"
    return f"{cell.strategy}: {number(cell.step_s, 's')}, {kind}"


def _gantt(cell: CellResult, end: float, chosen: dict[str, str]) -> html.Markup:
    ranks = {pool.name: pool.world for pool in cell.plan.pools} if cell.plan else {}
    lane = {
        bar.pool: f"{bar.pool} ({ranks[bar.pool]})" if bar.pool in ranks else bar.pool for bar in cell.bars
    }
    bars = [html.Bar(lane[bar.pool], bar.operation, bar.start_s, bar.end_s) for bar in cell.bars]
    lanes = [lane[pool] for pool in (*ranks, *lane) if pool in lane]
    return html.gantt(bars, lanes=list(dict.fromkeys(lanes)), end=end, chosen=chosen, left=_LEFT)


def _layouts(cells: Sequence[CellResult]) -> html.Markup:
    """How each strategy runs each role."""
    roles = dict.fromkeys(role for cell in cells if cell.plan for role in cell.plan.roles)
    rows = [[role, *(_how(cell.plan, role) for cell in cells)] for role in roles]
    return html.table(("role", *(cell.strategy for cell in cells)), rows)


def _how(plan: PlacementPlan | None, role: str) -> str:
    if plan is None or role not in plan.layouts:
        return "-"
    layout = str(plan.layouts[role]).replace("sequence_parallel", "sp")
    return "; ".join(part for part in (layout, str(plan.settings_of(role))) if part)


def _placement(cell: CellResult) -> html.Markup:
    """The devices, coloured by pool."""
    plan = cell.plan
    assert plan is not None, "only a plan has devices"
    idle = sum(plan.idle.values())
    said = [cell.strategy, f"{idle} devices idle" if idle else "", cell.plan_file]
    caption = "; ".join(part for part in said if part)
    keys = {_pool_key(pool): pool_colours(plan)[pool.name] for pool in plan.pools}
    drawn = device_squares(rows_of(plan, coarse=True), plan)
    return html.figure(html.Markup(f"{html.legend(keys)}{drawn}"), caption)


def _pool_key(pool: PoolSpec) -> str:
    """The pool's name, with its roles where these are not the name."""
    return pool.name if pool.name == "+".join(pool.roles) else f"{pool.name}: {', '.join(pool.roles)}"


def _items(plan: PlacementPlan | None) -> list[str]:
    return [item for items in (plan.prediction.memory if plan else {}).values() for item in items]


def _memory(cell: CellResult, chosen: dict[str, str]) -> html.Markup:
    assert cell.plan is not None, "only a plan has memory"
    told = cell.plan.prediction
    rows, limits = {}, {}
    for role, items in told.memory.items():
        rows[role] = {item: amount / GIB for item, amount in items.items() if amount > 0}
        if limit := told.limit.get(cell.plan.pool_of(role).name):
            limits[role] = limit / GIB
    for pool, peak in told.peak.items():
        rows[f"pool {pool}"] = {_FULLEST: peak / GIB}
        limits |= {f"pool {pool}": told.limit[pool] / GIB} if pool in told.limit else {}
    chart = html.bar_chart(rows, unit="GiB", stacked=True, limits=limits, chosen=chosen, left=_LEFT)
    return html.figure(chart, f"{cell.strategy}: each role alone, and each pool at its fullest moment")


def _reading(result: BenchResult) -> html.Markup:
    lines = [
        "A step is one round of generation, scoring and updates. Bars of one pool never overlap: its "
        "devices do one operation at a time. Tokens are those of prompts and responses; rates per device "
        "count all devices of the cluster, idle ones too.",
        "Busy: the part of a step in which a pool computes. Gap: how much shorter a step of this strategy "
        "could be at most; without one, none is shorter under the cost models.",
    ]
    if not result.run:
        lines.append(
            "Memory: of the heaviest rank's device. Roles of a pool take turns, but what they keep adds "
            "up, so the pool's fullest moment counts. Dashed line: what roles may fill of a device."
        )
    return html.section("How to read this", *(html.paragraph(line) for line in lines))
