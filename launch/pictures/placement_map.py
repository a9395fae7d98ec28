"""The placement map: a row per sort of node, a cell per device, links with what crosses them in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

from rolemesh.launch.pictures.cells import IDLE, Cell, Row
from rolemesh.launch.pictures.svg import (
    PALETTE,
    WIDTH,
    Markup,
    bar,
    colours,
    escaped,
    hatch,
    horizontal_axis,
    line,
    margin,
    short,
    small,
    svg,
    words,
)
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.traffic import Flow

PALE = (
    "#c9daee", "#fbdcb9", "#cfe6c8", "#f6c9ca", "#d3e8e6", "#f7edb6", "#e3d2e0", "#e0d2c9",
    "#ffdfe2", "#e2dfdc",
)  # fmt: skip
_LEFT, _GAP, _LINE, _HEAD = 116.0, 4.0, 13.0, 15.0
_PER_LINE = 8  # devices next to each other
_WIDEST = 190.0  # of a cell


def role_colours(roles: Sequence[str]) -> dict[str, str]:
    """Pale colours, for text on them; operations have the strong ones."""
    return {role: PALE[i % len(PALE)] for i, role in enumerate(roles)}


def pool_colours(plan: PlacementPlan) -> dict[str, str]:
    """A strong colour for each pool."""
    return colours(pool.name for pool in plan.pools)


def cell_boxes(row: Row) -> list[tuple[float, float, float, float]]:
    """x, y, width and height of each cell of a row, from the row's upper left corner."""
    across = min(_PER_LINE, len(row.cells)) or 1
    width = min(_WIDEST, (WIDTH - _LEFT - 8) / across - _GAP)
    height = _HEAD + 3 + _LINE * max((len(cell.roles) for cell in row.cells), default=0) + 3
    down = height + 8 + _GAP  # the link's bracket is below
    return [
        (_LEFT + (i % across) * (width + _GAP), (i // across) * down, width, max(height, 30.0))
        for i in range(len(row.cells))
    ]


def placement_map(rows: Sequence[Row], plan: PlacementPlan) -> Markup:
    """The map. Coordinates are t, p, c, d, e: the rank's place along tp, pp, cp, dp, ep; then GiB."""
    pools, roles = pool_colours(plan), role_colours(plan.roles)
    parts, top = [hatch("idle")], 2.0
    for row in rows:
        boxes = cell_boxes(row)
        if not boxes:
            continue
        height = max(y + h for _, y, _, h in boxes)
        parts.append(words(0, top + 12, short(row.name(), 18)))
        parts += [words(0, top + 26 + 13 * i, said) for i, said in enumerate(_beside(row))]
        for cell, (x, y, width, tall) in zip(row.cells, boxes, strict=True):
            parts.append(_cell(cell, row, x, top + y, width, tall, pools, roles))
        parts += _brackets(row, boxes, top)
        top += max(height + 18, 30 + 13.0 * len(_beside(row)))
    return svg(top + 2, parts, "placement map")


def device_squares(rows: Sequence[Row], plan: PlacementPlan) -> Markup:
    """The same in small: a square per device in its pool's colour, without roles."""
    pools, size, left = pool_colours(plan), 22.0, 190.0
    idle = f"idle-{crc32(plan.to_yaml().encode()):x}"  # a pattern in a folded part of the page is not drawn
    parts, top = [hatch(idle)], 0.0
    fits = int((WIDTH - left - 24) // (size + 4))
    for row in rows:
        many = f" ({len(row.nodes)} nodes)" if len(row.nodes) > 1 else ""
        parts.append(words(left - 8, top + 17, short(row.name() + many, 28), "end"))
        for i, cell in enumerate(row.cells):
            x, y = left + (i % fits) * (size + 4), top + 2 + (i // fits) * (size + 4)
            fill = f"url(#{idle})" if cell.pool == IDLE else pools[cell.pool]
            said = f"{row.name()}, device {i}: {cell.pool or 'idle'}"
            parts.append(
                f'<g class="cell"><title>{escaped(said)}</title><rect x="{x:.0f}" y="{y:.0f}" '
                f'width="{size:.0f}" height="{size:.0f}" rx="3" fill="{fill}" stroke="#8793a0"/></g>'
            )
        top += (size + 4) * max(1, -(-len(row.cells) // fits)) + 4
    return svg(top + 4, parts, "placement map")


def _beside(row: Row) -> list[str]:
    """What stands under a row's name."""
    said = [f"{len(row.nodes)} nodes like this"] if len(row.nodes) > 1 else []
    said += [short(row.device, 18)] if row.device else []
    return [*said, *([f"group {short(row.group, 12)}"] if row.group else [])]


def _cell(
    cell: Cell,
    row: Row,
    x: float,
    y: float,
    width: float,
    height: float,
    pools: Mapping[str, str],
    roles: Mapping[str, str],
) -> str:
    if cell.pool == IDLE:
        said = f"{row.name()}: idle"
        box = (
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" '
            'fill="url(#idle)" stroke="#aab5c1"/>'
        )
        return f'<g class="cell"><title>{escaped(said)}</title>{box}{words(x + 6, y + 18, "idle")}</g>'
    lines = [f"{row.name()}, {cell.pool}, rank {cell.rank}"]
    lines += [f"{at.role}: {at.where() or 'the only rank'}" for at in cell.roles]
    many = " ..." if len(row.nodes) > 1 else ""
    parts = [
        f"<title>{escaped('; '.join(lines))}</title>",
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" fill="#fff" '
        f'stroke="{pools[cell.pool]}"/>',
        bar(x, y, width, _HEAD, pools[cell.pool], f"rank {cell.rank}{many}"),
    ]
    for i, at in enumerate(cell.roles):
        at_y = y + _HEAD + 2 + i * _LINE
        parts.append(
            f'<rect x="{x + 1:.1f}" y="{at_y:.1f}" width="{width - 2:.1f}" height="{_LINE - 1:.1f}" '
            f'fill="{roles[at.role]}"/>'
        )
        parts.append(small(x + 3, at_y + 9.5, at.where() or "whole"))
        if at.gib is not None:
            parts.append(small(x + width - 3, at_y + 9.5, f"{at.gib:.3g}", "end"))
    return f'<g class="cell">{"".join(parts)}</g>'


def _brackets(row: Row, boxes: Sequence[tuple[float, float, float, float]], top: float) -> list[str]:
    """A line below the devices that a fast link joins, with its rate on the first."""
    if not row.link or row.domain < 2:
        return []
    parts = []
    for first in range(0, len(boxes), min(row.domain, _PER_LINE)):
        mine = boxes[first : first + min(row.domain, _PER_LINE)]
        y = top + mine[0][1] + mine[0][3] + 4
        x, end = mine[0][0], mine[-1][0] + mine[-1][2]
        parts += [line(x, y, end, y, "link"), line(x, y - 3, x, y, "link"), line(end, y - 3, end, y, "link")]
        if not first:
            parts.append(small(x + 4, y + 10, f"{row.domain} devices on one fast link: {row.link}"))
    return parts


def flows_chart(flows: Sequence[Flow], plan: PlacementPlan, *, most: int = 14) -> Markup:
    """A bar per flow, GB of a step; dark ones cross between link domains."""
    pools = [pool.name for pool in plan.pools]
    shown = list(flows[:most])
    names = {id(flow): _flow_name(flow, pools) for flow in shown}
    left = margin(names.values())
    end = 1.15 * max((flow.n_bytes for flow in shown), default=0.0) / 1e9 or 1.0
    scale = (WIDTH - left - 24) / end
    row = 18.0
    parts = horizontal_axis(left, 0, row * len(shown) + 4, end, scale, "GB in a step")
    for i, flow in enumerate(shown):
        width = max(flow.n_bytes / 1e9 * scale, 0.8)
        colour = PALETTE[3] if flow.far else PALETTE[4]
        how = "between link domains" if flow.far else "inside one"
        said = f"{names[id(flow)]}: {flow.n_bytes / 1e9:,.4g} GB, {how}"
        parts.append(words(left - 8, i * row + 15, short(names[id(flow)]), "end"))
        parts.append(
            f"<g><title>{escaped(said)}</title>" + bar(left, i * row + 4, width, 13, colour) + "</g>"
        )
        parts.append(words(left + width + 5, i * row + 15, _gb(flow.n_bytes / 1e9)))
    return svg(row * len(shown) + 38, parts, "links")


def _flow_name(flow: Flow, pools: Sequence[str]) -> str:
    if flow.source == flow.target:
        return flow.what
    return f"{flow.what}, {chr(65 + pools.index(flow.source))} to {chr(65 + pools.index(flow.target))}"


def _gb(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 10 else f"{amount:.3g}"
