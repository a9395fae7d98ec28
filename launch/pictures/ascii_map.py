"""The placement map and the step for a terminal, 80 columns wide."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

from rolemesh.launch.pictures.cells import IDLE, Row
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.step_view import StepView

COLUMNS = 80
_PER_LINE = 16  # devices


def letters(plan: PlacementPlan) -> dict[str, str]:
    """A letter for each pool; a number beyond twenty-six."""
    names = [pool.name for pool in plan.pools]
    return {name: ascii_uppercase[i] if i < 26 else str(i) for i, name in enumerate(names)}


def map_lines(plan: PlacementPlan, rows: Sequence[Row]) -> list[str]:
    """A line for each sort of node with a letter per device, `.` for an idle one, then what letters mean."""
    if not rows:
        return []
    short = letters(plan)
    name = max(len(_short(row.name(), 24)) for row in rows)
    lines = ["map (a letter is a device of a pool, . an idle one):"]
    for row in rows:
        marks = [short.get(cell.pool, ".") if cell.pool != IDLE else "." for cell in row.cells]
        domain = row.domain or len(marks)
        text = " ".join("".join(marks[i : i + domain]) for i in range(0, len(marks), domain))
        parts = [text[i : i + 40] for i in range(0, len(text), 40)]
        many = f"  {len(row.nodes)} nodes like this" if len(row.nodes) > 1 else ""
        lines.append(f"  {_short(row.name(), 24):<{name}} [{parts[0]}]{many}"[:COLUMNS])
        lines += [f"  {'':<{name}} [{part}]" for part in parts[1:]]
    for pool in plan.pools:
        lines.append(_short(f"  {short[pool.name]} = {'+'.join(pool.roles)}, {pool.world} devices", COLUMNS))
        for role in pool.roles:
            layout = plan.layouts[role]
            sizes = " x ".join(f"{axis}={n}" for axis, n in layout.sizes().items() if n > 1) or "one rank"
            held = plan.prediction.role_bytes(role)
            gib = f"{held / 2**30:.3g} GiB" if held else ""
            lines.append(_short(f"      {role:<8} {sizes:<34} {gib}".rstrip(), COLUMNS))
    return lines


def step_lines(view: StepView, plan: PlacementPlan) -> list[str]:
    """The step with a line for each pool: a column is a slice of time, a letter the operation in it."""
    if not view.lanes or not view.length_s:
        return []
    names = list(dict.fromkeys(piece.name for lane in view.lanes for piece in lane.pieces))
    marks = dict(zip(names, "abcdefghijklmnopqrstuvwxyz", strict=False))
    short = letters(plan)
    label = max(len(_short(short.get(lane.name, lane.name), 12)) for lane in view.lanes)
    width = COLUMNS - label - 18
    lines = [f"step of {view.length_s:.4g} s (a letter is an operation, . idle):"]
    for lane in view.lanes:
        row = ["."] * width
        for piece in lane.pieces:
            first = min(round(piece.start_s / view.length_s * width), width - 1)
            last = max(first + 1, round(piece.end_s / view.length_s * width))
            row[first:last] = marks.get(piece.name, "?") * (min(last, width) - first)
        name = _short(short.get(lane.name, lane.name), 12)
        lines.append(f"  {name:<{label}} |{''.join(row[:width])}| {lane.idle:>4.0%} idle")
    return [*lines, *_wrapped([f"{mark}={name}" for name, mark in marks.items()])]


def _wrapped(words: Sequence[str]) -> list[str]:
    lines = ["  "]
    for word in words:
        if len(lines[-1]) + len(word) + 1 > COLUMNS:
            lines.append("  ")
        lines[-1] += word + " "
    return [line.rstrip() for line in lines]


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 2] + ".."
