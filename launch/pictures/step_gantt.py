"""The Gantt chart of a step: lanes with idle share and what they wait for, and the critical path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rolemesh.launch.pictures.svg import (
    CHAR,
    PALETTE,
    WIDTH,
    Markup,
    bar,
    escaped,
    hatch,
    horizontal_axis,
    line,
    margin,
    short,
    svg,
    words,
)
from rolemesh.placement.step_view import Gap, Lane, Piece, StepView

_RIGHT, _ROW = 84.0, 30.0


def step_gantt(views: Mapping[str, StepView], chosen: Mapping[str, str]) -> Markup:
    """Steps on one axis: `views` by what they are (planned, measured), each pool's lanes under each other.

    Dark lines below bars are the critical path; hatched is idle.
    """
    several = len(views) > 1
    lanes = list(dict.fromkeys(lane.name for view in views.values() for lane in view.lanes))
    rows = [
        (f"{short(name, 24)}, {what}" if several else name, view, lane)
        for name in lanes
        for what, view in views.items()
        for lane in view.lanes
        if lane.name == name
    ]
    left = margin(label for label, _, _ in rows)
    end = max((view.length_s for view in views.values()), default=0.0) or 1.0
    scale = (WIDTH - left - _RIGHT) / end
    bottom = _ROW * len(rows) + 4
    parts = [hatch("waiting"), *horizontal_axis(left, 0, bottom, end, scale, "")]
    parts.append(words(WIDTH - _RIGHT + 8, bottom + 14, "seconds"))
    for i, (label, view, lane) in enumerate(rows):
        top = i * _ROW + 4
        parts.append(words(left - 8, top + 15, short(label), "end"))
        parts.append(words(WIDTH - _RIGHT + 8, top + 15, f"idle {lane.idle:.0%}"))
        parts += [_gap(gap, left, top, scale, i) for gap in lane.gaps]
        parts += [_piece(piece, view, left, top, scale, chosen) for piece in lane.pieces]
    return svg(bottom + 22, parts, "Gantt chart of a step")


def _piece(
    piece: Piece, view: StepView, left: float, top: float, scale: float, chosen: Mapping[str, str]
) -> str:
    x, width = left + piece.start_s * scale, (piece.end_s - piece.start_s) * scale
    on_path = piece.name in view.critical_path
    took = f"{piece.end_s - piece.start_s:.4g} s ({piece.start_s:.4g} to {piece.end_s:.4g})"
    said = f"{piece.name}: {took}" + ("; on the critical path" if on_path else "")
    drawn = bar(x, top, width, 20, chosen.get(piece.name, PALETTE[-1]), piece.name)
    under = line(x, top + 22, x + max(width, 0.8), top + 22, "path") if on_path else ""
    return f"<g><title>{escaped(said)}</title>{drawn}{under}</g>"


def _gap(gap: Gap, left: float, top: float, scale: float, i: int) -> str:
    x, width = left + gap.start_s * scale, (gap.end_s - gap.start_s) * scale
    if width < 1:
        return ""
    said = f"waits for {gap.waits_for}"
    box = f'<rect x="{x:.1f}" y="{top + 3}" width="{width:.1f}" height="14" fill="url(#waiting)"/>'
    shown = ""
    if width > CHAR * len(said) + 10:
        middle = x + width / 2
        half = CHAR * len(said) / 2 + 3
        shown = (
            f'<rect x="{middle - half:.1f}" y="{top + 3}" width="{2 * half:.1f}" height="14" fill="#fff"/>'
            + words(middle, top + 14, said, "middle")
        )
    return f"<g><title>{escaped(f'{said}: {gap.end_s - gap.start_s:.4g} s')}</title>{box}{shown}</g>"


def waiting_rows(view: StepView) -> list[tuple[str, str, str]]:
    """Lane, idle share, and its longest waits in words: for a table."""
    return [(lane.name, f"{lane.idle:.0%}", _waits(lane)) for lane in view.lanes]


def _waits(lane: Lane) -> str:
    found = list(lane.waits().items())
    said = [f"{seconds:.3g} s for {name}" for name, seconds in found[:3]]
    return "; ".join(said) or "never"


def operation_names(views: Sequence[StepView]) -> list[str]:
    """Operations in the order in which they start, the first view's first."""
    names: dict[str, None] = {}
    for view in views:
        pieces = sorted((p for lane in view.lanes for p in lane.pieces), key=lambda piece: piece.start_s)
        names |= dict.fromkeys(piece.name for piece in pieces)
    return list(names)
