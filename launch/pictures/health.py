"""Curves over steps as small multiples, with the steps in which workers were lost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rolemesh.launch.pictures.svg import CHAR, PALETTE, WIDTH, Markup, escaped, line, short, small, svg, words
from rolemesh.launch.run_health import Panel

_ACROSS, _HEIGHT, _PLOT = 3, 176.0, 92.0


def health_chart(panels: Sequence[Panel], recoveries: Sequence[int] = ()) -> Markup:
    """A small chart for each panel, three in a row, over the same steps; dashed lines are recoveries."""
    steps = [step for panel in panels for points in panel.curves.values() for step, _ in points]
    if not steps:
        return Markup('<p class="note">no metrics yet</p>')
    first, last = min(steps), max(max(steps), min(steps) + 1)
    width = WIDTH / _ACROSS
    parts = []
    for i, panel in enumerate(panels):
        parts += _panel(
            panel, (i % _ACROSS) * width, (i // _ACROSS) * _HEIGHT, width, (first, last), recoveries
        )
    return svg(_HEIGHT * math.ceil(len(panels) / _ACROSS), parts, "run health")


def _panel(
    panel: Panel,
    left: float,
    top: float,
    width: float,
    steps: tuple[float, float],
    recoveries: Sequence[int],
) -> list[str]:
    values = [y for points in panel.curves.values() for _, y in points]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1.0) * 0.5, high + (abs(high) or 1.0) * 0.5
    x0, x1, y0, y1 = left + 52, left + width - 14, top + 24, top + 24 + _PLOT

    def x(step: float) -> float:
        return x0 + (step - steps[0]) / (steps[1] - steps[0]) * (x1 - x0)

    def y(value: float) -> float:
        return y1 - (value - low) / (high - low) * (y1 - y0)

    parts = [f'<g class="panel">{words(left + 4, top + 14, panel.name)}']
    parts += [line(x0, y0, x1, y0, "grid"), line(x0, y1, x1, y1, "axis")]
    parts += [words(x0 - 5, y0 + 4, f"{high:.3g}", "end"), words(x0 - 5, y1 + 2, f"{low:.3g}", "end")]
    if low < 0 < high:
        parts.append(line(x0, y(0), x1, y(0), "grid"))
    parts += [words(x0, y1 + 14, f"{steps[0]:g}"), words(x1, y1 + 14, f"step {steps[1]:g}", "end")]
    parts += [line(x(step), y0, x(step), y1, "limit") for step in recoveries if steps[0] <= step <= steps[1]]
    for i, (name, points) in enumerate(panel.curves.items()):
        colour = PALETTE[i % len(PALETTE)]
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        said = escaped(f"{name}: {points[-1][1]:.4g} in step {points[-1][0]:g}")
        dot = f'<circle cx="{x(points[-1][0]):.1f}" cy="{y(points[-1][1]):.1f}" r="2.5" fill="{colour}"/>'
        parts.append(
            f"<g><title>{said}</title>"
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>{dot}</g>'
        )
        at = y1 + 28 + 11 * i
        parts.append(f'<rect x="{x0:.1f}" y="{at - 7:.1f}" width="8" height="8" fill="{colour}"/>')
        room = int((x1 - x0 - 12) / (CHAR * 0.85))
        parts.append(small(x0 + 12, at, short(name, room)))
    return [*parts, "</g>"]
