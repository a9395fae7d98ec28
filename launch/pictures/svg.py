"""Building blocks of inline SVG: text, lines, axes, colours. Pure functions from values to markup."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Tableau's colours, in an order that keeps neighbours apart; text on them is dark or white by luminance.
PALETTE = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2",
    "#edc948", "#b07aa1", "#9c755f", "#ff9da7", "#bab0ac",
    "#d37295", "#86bcb6", "#8cd17d", "#a0cbe8", "#b6992d",
)  # fmt: skip
WIDTH = 960.0  # of a chart, in its own units; the page scales it
CHAR = 6.4  # width of a character of a chart's text
RIGHT = 24.0  # margin right of an axis


class Markup(str):
    """Text that is markup already: it is not escaped again."""


@dataclass(frozen=True)
class Axis:
    """Values to places of a chart, linear or by their logarithm."""

    low: float
    high: float
    first: float
    last: float
    log: bool
    ticks: tuple[float, ...]

    @classmethod
    def over(cls, values: Sequence[float], first: float, last: float, log: bool) -> Axis:
        if not log:
            high = 1.05 * max(values) or 1.0
            return cls(0.0, high, first, last, False, tuple(ticks(high)))
        low, high = min(values), max(values)
        powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
        every = math.ceil(len(powers) / 8)
        ends = (2.0 ** powers[0], 2.0 ** max(powers[-1], powers[0] + 1))
        return cls(*ends, first, last, True, tuple(2.0**p for p in powers[::every]))

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low) if self.log else value / self.high
        return self.first + share * (self.last - self.first)


def ticks(end: float, n: int = 8) -> list[float]:
    """About `n` round values from 0 to `end`."""
    raw = end / n
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= raw * (1 - 1e-9))
    return [i * step for i in range(math.floor(end / step + 1e-9) + 1)]


def horizontal_axis(left: float, top: float, bottom: float, end: float, scale: float, unit: str) -> list[str]:
    parts = [line(left, bottom, WIDTH - RIGHT, bottom, "axis")]
    for tick in ticks(end):
        x = left + tick * scale
        parts += [
            line(x, top, x, bottom, "grid"),
            words(x, bottom + 14, f"{tick:,.0f}" if tick >= 1e4 else f"{tick:g}", "middle"),
        ]
    return [*parts, words(WIDTH - RIGHT, bottom + 29, unit, "end")] if unit else parts


def margin(labels: Iterable[str]) -> float:
    """Room for the rows' labels on the left."""
    return 16 + CHAR * max((len(short(label)) for label in labels), default=0)


def short(label: str, longest: int = 34) -> str:
    return label if len(label) <= longest else label[: longest - 3] + "..."


def fitting(label: str, left: float) -> str:
    """The label, cut to the room on the left."""
    return short(label, int((left - 10) / CHAR))


def inside(label: str, x: float, y: float, width: float, colour: str) -> str:
    """The label in its bar, cut where the bar is short, left out where nothing can be read."""
    room = int((width - 8) / CHAR)
    if len(label) > room:
        label = label[: room - 2] + ".." if room >= 5 else ""
    shown = f'<text x="{x + 4:.1f}" y="{y:.1f}" style="fill:{ink(colour)}">{escaped(label)}</text>'
    return shown if label else ""


def ink(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#1d2733" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#fff"


def svg(height: float, parts: Iterable[str], what: str) -> Markup:
    return Markup(
        f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="{what}">{"".join(parts)}</svg>'
    )


def words(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped(text)}</text>'


def small(x: float, y: float, text: str, anchor: str = "start") -> str:
    """Text of less than the usual size."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="font-size:9.5px">{escaped(text)}</text>'
    )


def line(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>'


def escaped(value: str) -> str:
    return value if isinstance(value, Markup) else html.escape(str(value))


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, by order of first appearance; they repeat after fifteen."""
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(dict.fromkeys(names))}


def bar(x: float, y: float, width: float, height: float, colour: str, label: str = "") -> str:
    """A filled rectangle with its label inside, where there is room."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.8):.1f}" height="{height:.1f}" rx="2" '
        f'fill="{colour}"/>' + inside(label, x, y + height / 2 + 4, width, colour)
    )


def hatch(name: str, colour: str = "#c3ccd6") -> str:
    """A definition of slanted lines, for `fill="url(#name)"`."""
    return (
        f'<defs><pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="6" height="6" fill="#fff"/>'
        f'<line x1="0" y1="0" x2="0" y2="6" stroke="{colour}" stroke-width="2"/></pattern></defs>'
    )


def wrapped(text: str, longest: int) -> list[str]:
    """The text in lines of at most so many characters; a longer word is a line of its own."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > longest:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
