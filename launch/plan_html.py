"""The pictures of a plan as one HTML file."""

from __future__ import annotations

from rolemesh.launch import html
from rolemesh.launch.pictures.cells import rows_of
from rolemesh.launch.pictures.device_counts import crossovers, device_counts_chart, misfits_in_words
from rolemesh.launch.pictures.memory_step import memory_step
from rolemesh.launch.pictures.placement_map import (
    flows_chart,
    placement_map,
    pool_colours,
    role_colours,
)
from rolemesh.launch.pictures.step_gantt import step_gantt, waiting_rows
from rolemesh.launch.pictures.strategies import strategies_chart
from rolemesh.launch.pictures.svg import PALETTE, colours
from rolemesh.launch.plan_view import PlanView
from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.memory.items import GIB
from rolemesh.placement.plan import PlacementPlan


def plan_page(name: str, view: PlanView, lines: list[str]) -> str:
    """The whole document; `lines` are what `rolemesh plan` prints."""
    parts = [placement_section(view.plan, view.cluster), _links(view), _step(view), _memory(view)]
    parts += [_strategies(view), _counts(view), _lengths(view)]
    if view.notes:
        parts.append(html.section("Notes", *(html.paragraph(note) for note in view.notes)))
    parts.append(html.section("In words", html.preformatted("\n".join(lines))))
    took = f", {view.plan.prediction.step_s:.4g} s a step" if view.plan.prediction.step_s else ""
    subtitle = (
        f"strategy {view.plan.strategy}, {view.plan.n_devices} devices{took}; all figures are predicted"
    )
    return html.page(f"Plan {name}", *parts, subtitle=subtitle)


def map_page(name: str, plan: PlacementPlan, cluster: ClusterSpec, lines: list[str]) -> str:
    """The page of a plan without predictions: devices and words alone."""
    words = html.section("In words", html.preformatted("\n".join(lines)))
    subtitle = f"strategy {plan.strategy}, {plan.n_devices} devices; nothing is predicted"
    return html.page(f"Plan {name}", placement_section(plan, cluster), words, subtitle=subtitle)


def placement_section(plan: PlacementPlan, cluster: ClusterSpec | None) -> html.Markup:
    """The map with its legends, and how each role is cut."""
    pools = {
        f"{chr(65 + i)}: {'+'.join(pool.roles)}, {pool.world} devices": pool_colours(plan)[pool.name]
        for i, pool in enumerate(plan.pools)
    }
    rows = [
        (
            role,
            chr(65 + [pool.name for pool in plan.pools].index(plan.pool_of(role).name)),
            str(plan.layouts[role]),
            str(plan.settings_of(role)),
            plan.prediction.role_bytes(role) / GIB or None,
        )
        for role in plan.roles
    ]
    drawn = rows_of(plan, cluster)
    if not drawn:
        return html.section("Placement", html.note("The plan names no nodes."))
    idle = sum(plan.idle.values())
    said = (
        "A row is a node, or several that hold the same; a cell is a device. t, p, c, d, e: the place of the "
        "device's rank along tp, pp, cp, dp, ep, a range over the nodes of the row. At the right: GiB of the "
        "role's heaviest rank at its fullest moment; roles of a pool take turns, so the sum is not the peak."
    )
    return html.section(
        "Placement",
        html.legend(pools),
        html.legend(role_colours(plan.roles)),
        html.figure(placement_map(drawn, plan), said + (f" Hatched: {idle} devices idle." if idle else "")),
        html.table(("role", "pool", "layout", "settings", "GiB"), rows),
    )


def _links(view: PlanView) -> html.Markup:
    if not view.flows:
        return html.section("Links", html.note("Nothing crosses a link: every role is on one device."))
    chosen = {"inside a link domain": PALETTE[4], "between domains (network)": PALETTE[3]}
    said = (
        "All ranks together, by the counts of the time model: a ring over n ranks that sums S bytes sends "
        "2 (n - 1) S. What cp and ep exchange is not counted."
    )
    chart = flows_chart(view.flows, view.plan)
    return html.section("Links, GB in a step", html.legend(chosen), html.figure(chart, said))


def _step(view: PlanView) -> html.Markup:
    chosen = colours(view.operations)
    path = view.step
    said = (
        f"Critical path: {' > '.join(path.critical_path)}, {path.path_s:.4g} s of the step's "
        f"{path.length_s:.4g} s (dark line). Hatched: the pool is idle."
    )
    return html.section(
        "One step",
        html.legend(chosen),
        html.figure(step_gantt({"planned": view.step}, chosen), said),
        html.table(("pool", "idle", "waits"), waiting_rows(view.step)),
    )


def _memory(view: PlanView) -> html.Markup:
    roles, operations = role_colours(view.plan.roles), colours(view.operations)
    lanes = {lane.name: lane for lane in view.step.lanes}
    charts = []
    for pool, memory in view.memory.items():
        if pool not in lanes:
            continue
        chart = memory_step(memory, lanes[pool], view.step.length_s, roles=roles, operations=operations)
        said = f"{pool}: {memory.peak / GIB:.3g} of {memory.limit / GIB:.3g} GiB at the fullest moment"
        charts.append(html.figure(chart, said))
    said = (
        "Pale: what a role keeps on the device all the time. Strong: what an operation works with beside it."
    )
    legends = [html.legend(roles), html.legend(operations)]
    return html.section("Memory of the heaviest rank over one step", *legends, html.note(said), *charts)


def _strategies(view: PlanView) -> html.Markup:
    names = [op for bar in view.strategies for op in bar.seconds]
    chosen = colours([*view.operations, *names])
    said = (
        "A bar is the chain of operations that makes the step as long as it is; what runs beside it is not "
        "in it. Each strategy has the layouts that are best for it."
    )
    chart = strategies_chart(view.strategies, chosen)
    return html.section("Strategies", html.legend(chosen), html.figure(chart, said))


def _counts(view: PlanView) -> html.Markup:
    chosen = colours(name for point in view.counts for name in point.rates)
    found = [
        f"between {one} and {other} devices {new} overtakes {old}"
        for one, other, old, new in crossovers(view.counts)
    ]
    said = "; ".join(found) or "no strategy overtakes another between these numbers of devices"
    misfits = misfits_in_words(view.counts)
    said += f". {misfits}" if misfits else ""
    chart = device_counts_chart(view.counts)
    return html.section(
        "Tokens per second and device over numbers of devices", html.legend(chosen), html.figure(chart, said)
    )


def _lengths(view: PlanView) -> html.Markup:
    said = str(view.lengths or "not looked at: there is no other plan to compare with")
    said = said[0].upper() + said[1:] + "."
    return html.section("Response lengths", html.paragraph(said))
