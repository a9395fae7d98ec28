"""Building blocks of a self-contained HTML page: tables, and charts as inline SVG.

Pure functions from values to markup. What is not `Markup` is escaped. A page needs no network and no script.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Tableau's colours, in an order that keeps neighbours apart; text on them is dark or white by luminance.
PALETTE = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2",
    "#edc948", "#b07aa1", "#9c755f", "#ff9da7", "#bab0ac",
    "#d37295", "#86bcb6", "#8cd17d", "#a0cbe8", "#b6992d",
)  # fmt: skip
WIDTH = 960.0  # of a chart, in its own units; the page scales it
_CHAR = 6.4  # width of a character of a chart's text
_RIGHT = 24.0  # margin right of an axis

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; background: #fff; margin: 0 auto; padding: 24px;
  max-width: 1040px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 32px 0 8px; }
p, figure { margin: 8px 0; } figcaption, .note { color: #566373; font-size: 13px; }
table { border-collapse: collapse; font-size: 14px; width: 100%; }
th, td { padding: 5px 10px; border-bottom: 1px solid #dde3ea; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #aab5c1; } .n { text-align: right; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; } td.best { font-weight: 600; background: #e8f3ea; } td.none { color: #8793a0; }
details { border: 1px solid #dde3ea; border-radius: 6px; margin: 10px 0; padding: 0 14px; }
details[open] { padding-bottom: 10px; } summary { cursor: pointer; padding: 9px 0; font-weight: 600; }
summary span { font-weight: 400; color: #566373; } h3 { font-size: 15px; margin: 20px 0 4px; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; fill: #1d2733; }
svg .grid { stroke: #e3e8ee; } svg .axis { stroke: #8793a0; }
svg .limit { stroke: #c0392b; stroke-dasharray: 4 3; }
.key { display: inline-block; margin: 0 14px 4px 0; font-size: 13px; }
.key i { display: inline-block; width: 11px; height: 11px; margin-right: 5px; border-radius: 2px; }
"""


class Markup(str):
    """Text that is markup already: it is not escaped again."""


Cell = str | float | int | None


@dataclass(frozen=True)
class Bar:
    """A bar of a Gantt chart: `label` also chooses its colour; `detail` is shown under the pointer."""

    lane: str
    label: str
    start: float
    end: float
    detail: str = ""


def page(title: str, *parts: str, subtitle: str = "") -> str:
    """A whole HTML document."""
    head = f"<h1>{_text(title)}</h1>" + (f'<p class="note">{_text(subtitle)}</p>' if subtitle else "")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"  # a browser would refuse whatever asked for something
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>\n<body>{head}\n"
        + "\n".join(_text(part) for part in parts)
        + "\n</body></html>\n"
    )


def section(heading: str, *parts: str) -> Markup:
    """A heading and what stands below it."""
    return Markup(f"<section><h2>{_text(heading)}</h2>{''.join(_text(part) for part in parts)}</section>")


def subsection(heading: str, *parts: str) -> Markup:
    """The same, below a section."""
    return Markup(f"<section><h3>{_text(heading)}</h3>{''.join(_text(part) for part in parts)}</section>")


def disclosure(heading: str, *parts: str, more: str = "", opened: bool = False) -> Markup:
    """Parts that a click on their heading shows; `more` stands beside it."""
    head = _text(heading) + (f" <span>{_text(more)}</span>" if more else "")
    inside = "".join(_text(part) for part in parts)
    return Markup(f"<details{' open' * opened}><summary>{head}</summary>{inside}</details>")


def note(text: str) -> Markup:
    """A paragraph in small type."""
    return Markup(f'<p class="note">{_text(text)}</p>')


def paragraph(text: str) -> Markup:
    """One paragraph of text."""
    return Markup(f"<p>{_text(text)}</p>")


def figure(chart: str, caption: str = "") -> Markup:
    """A chart with a caption below it."""
    below = f"<figcaption>{_text(caption)}</figcaption>" if caption else ""
    return Markup(f"<figure>{_text(chart)}{below}</figure>")


def table(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Markup:
    """A table; numbers stand on the right with four digits, None is a dash."""
    rows = [list(row) for row in rows]
    numeric = [
        any(_is_number(row[i]) for row in rows) and all(_is_number(row[i]) or row[i] is None for row in rows)
        for i in range(len(header))
    ]
    head = "".join(_cell("th", name, right) for name, right in zip(header, numeric, strict=True))
    body = "".join(
        "<tr>"
        + "".join(_cell("td", value, right) for value, right in zip(row, numeric, strict=True))
        + "</tr>"
        for row in rows
    )
    return Markup(
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def matrix(header: Sequence[str], rows: Iterable[Sequence[tuple[str, str]]]) -> Markup:
    """A table of (text, class) cells: class `best` marks one, `none` takes one back, `n` is a number."""
    head = "".join(f"<th>{_text(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{_text(text)}</td>' for text, kind in row) + "</tr>"
        for row in rows
    )
    return Markup(
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, by order of first appearance; they repeat after fifteen."""
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(dict.fromkeys(names))}


def legend(chosen: Mapping[str, str]) -> Markup:
    """What each colour stands for."""
    keys = (
        f'<span class="key"><i style="background:{colour}"></i>{_text(name)}</span>'
        for name, colour in chosen.items()
    )
    return Markup(f"<div>{''.join(keys)}</div>")


def gantt(
    bars: Sequence[Bar],
    *,
    lanes: Sequence[str] | None = None,
    unit: str = "s",
    end: float | None = None,
    chosen: Mapping[str, str] | None = None,
    left: float | None = None,
) -> Markup:
    """Bars over time from 0, a row for each lane in the order given (or of appearance).

    Two charts with the same `end`, colours and `left` (room for the lanes' names) can be compared.
    """
    lanes = list(lanes if lanes is not None else dict.fromkeys(bar.lane for bar in bars))
    chosen = chosen or colours(bar.label for bar in bars)
    end = end or max((bar.end for bar in bars), default=0.0) or 1.0
    left, row = left or _margin(lanes), 26.0
    bottom = row * len(lanes) + 6
    scale = (WIDTH - left - _RIGHT) / end
    parts = _x_axis(left, 0, bottom, end, scale, unit)
    for i, lane in enumerate(lanes):
        parts.append(_svg_text(left - 8, i * row + 19, _fitting(lane, left), "end"))
    for bar in bars:
        x, width = left + bar.start * scale, max((bar.end - bar.start) * scale, 0.8)
        y = lanes.index(bar.lane) * row + 4
        colour = chosen.get(bar.label, PALETTE[-1])
        seconds = f"{bar.end - bar.start:.4g} {unit} ({bar.start:.4g} to {bar.end:.4g})"
        parts.append(
            f"<g><title>{_text(f'{bar.label}: {seconds} {bar.detail}'.strip())}</title>"
            f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{row - 6:.0f}" rx="2" '
            f'fill="{colour}"/>' + _inside(bar.label, x, y + 14, width, colour) + "</g>"
        )
    return _svg(bottom + 34, parts, "Gantt chart")


def bar_chart(
    rows: Mapping[str, Mapping[str, float]],
    *,
    unit: str = "",
    stacked: bool = False,
    limits: Mapping[str, float] | None = None,
    chosen: Mapping[str, str] | None = None,
    left: float | None = None,
) -> Markup:
    """Horizontal bars: `rows` is label to (series to value), side by side or stacked on one another.

    `limits` draws a dashed line in a row, such as a device's memory.
    """
    limits = limits or {}
    chosen = chosen or colours(name for values in rows.values() for name in values)
    totals = [sum(v.values()) if stacked else max(v.values(), default=0.0) for v in rows.values()]
    end = 1.12 * max([*totals, *limits.values()], default=0.0) or 1.0
    left = left or _margin(rows)
    scale = (WIDTH - left - _RIGHT) / end
    thick = 20.0 if stacked else 14.0
    heights = [8 + thick * (1 if stacked else max(1, len(values))) for values in rows.values()]
    parts = _x_axis(left, 0, sum(heights) + 4, end, scale, unit)
    top = 0.0
    for (label, values), height in zip(rows.items(), heights, strict=True):
        parts.append(_svg_text(left - 8, top + height / 2 + 5, _fitting(label, left), "end"))
        x, y = left, top + 4
        for name, value in values.items():
            width = value * scale
            said = f"{label}, {name}: {value:.4g} {unit}".strip()
            parts.append(
                f"<g><title>{_text(said)}</title>"
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{thick - 1:.0f}" '
                f'fill="{chosen[name]}"/></g>'
            )
            if stacked:
                x += width
            else:
                parts.append(_svg_text(x + width + 5, y + 11, f"{value:.4g}"))
                y += thick
        if stacked:
            parts.append(_svg_text(x + 5, y + 14, f"{sum(values.values()):.4g}"))
        if label in limits:
            at = left + limits[label] * scale
            parts.append(_line(at, top + 2, at, top + height + 2, "limit"))
        top += height
    return _svg(top + 38, parts, "bar chart")


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_label: str,
    y_label: str,
    log: bool = False,
    chosen: Mapping[str, str] | None = None,
) -> Markup:
    """Lines with a dot at each (x, y); `log` takes both axes' logarithms, so that scaling laws are straight.

    Values must be above 0 then; those that are not are left out.
    """
    chosen = chosen or colours(series)
    drawn = {
        name: sorted(p for p in points if not log or min(p) > 0) for name, points in series.items() if points
    }
    everything = [point for points in drawn.values() for point in points]
    if not everything:
        return Markup('<p class="note">nothing to draw</p>')
    x_axis = _Axis.over([x for x, _ in everything], 62.0, WIDTH - _RIGHT, log)
    y_axis = _Axis.over([y for _, y in everything], 300.0, 24.0, log)
    parts = []
    for x in x_axis.ticks:
        at = x_axis.at(x)
        parts += [_line(at, 24, at, 300, "grid"), _svg_text(at, 316, f"{x:g}", "middle")]
    for y in y_axis.ticks:
        at = y_axis.at(y)
        parts += [_line(62, at, WIDTH - _RIGHT, at, "grid"), _svg_text(56, at + 4, f"{y:g}", "end")]
    parts += [_svg_text(WIDTH - _RIGHT, 334, x_label, "end"), _svg_text(8, 14, y_label)]
    for i, (name, points) in enumerate(drawn.items()):
        wide = 2 + 1.6 * (len(drawn) - 1 - i)  # equal lines show below one another
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{chosen[name]}" stroke-width="{wide:.1f}"/>'
        )
        parts += [
            f"<g><title>{_text(f'{name}: {x:g} {x_label}, {y:.4g} {y_label}')}</title>"
            f'<circle cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="3.5" fill="{chosen[name]}"/></g>'
            for x, y in points
        ]
    return _svg(344, parts, "line chart")


def placement_map(
    nodes: Mapping[str, Sequence[str]],
    *,
    chosen: Mapping[str, str] | None = None,
    idle: str = "",
    left: float | None = None,
) -> Markup:
    """Devices as squares, a row per node: `nodes` is the node's name to what each device holds.

    Nodes that follow one another with the same content share a row, so that thousands can be shown. A device
    that holds `idle` is empty.
    """
    chosen = chosen or colours(held for devices in nodes.values() for held in devices if held != idle)
    rows: list[tuple[list[str], Sequence[str]]] = []
    for name, devices in nodes.items():
        if rows and list(rows[-1][1]) == list(devices):
            rows[-1][0].append(name)
        else:
            rows.append(([name], devices))
    labels = [n[0] if len(n) == 1 else f"{n[0]} ... {n[-1]} ({len(n)})" for n, _ in rows]
    left, size = left or _margin(labels), 26.0
    fits = max(1, int((WIDTH - left - _RIGHT) // size))
    parts, top = [], 0.0
    for label, (_, devices) in zip(labels, rows, strict=True):
        parts.append(_svg_text(left - 8, top + 19, _fitting(label, left), "end"))
        for i, held in enumerate(devices):
            x, y = left + (i % fits) * size, top + 2 + (i // fits) * size
            fill = "#fff" if held == idle else chosen.get(held, PALETTE[-1])
            said = f"{label}, device {i}: {held or 'idle'}"
            parts.append(
                f"<g><title>{_text(said)}</title>"
                f'<rect x="{x + 1:.0f}" y="{y:.0f}" width="{size - 4:.0f}" height="{size - 4:.0f}" rx="3" '
                f'fill="{fill}" stroke="#8793a0"/></g>'
            )
        top += size * max(1, math.ceil(len(devices) / fits)) + 4
    return _svg(top + 4, parts, "placement map")


@dataclass(frozen=True)
class _Axis:
    """Values to places of a chart, linear or by their logarithm."""

    low: float
    high: float
    first: float
    last: float
    log: bool
    ticks: tuple[float, ...]

    @classmethod
    def over(cls, values: Sequence[float], first: float, last: float, log: bool) -> _Axis:
        if not log:
            high = 1.05 * max(values) or 1.0
            return cls(0.0, high, first, last, False, tuple(_ticks(high)))
        low, high = min(values), max(values)
        powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
        every = math.ceil(len(powers) / 8)
        ends = (2.0 ** powers[0], 2.0 ** max(powers[-1], powers[0] + 1))
        return cls(*ends, first, last, True, tuple(2.0**p for p in powers[::every]))

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low) if self.log else value / self.high
        return self.first + share * (self.last - self.first)


def _ticks(end: float, n: int = 8) -> list[float]:
    """About `n` round values from 0 to `end`."""
    raw = end / n
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= raw * (1 - 1e-9))
    return [i * step for i in range(math.floor(end / step + 1e-9) + 1)]


def _x_axis(left: float, top: float, bottom: float, end: float, scale: float, unit: str) -> list[str]:
    parts = [_line(left, bottom, WIDTH - _RIGHT, bottom, "axis")]
    for tick in _ticks(end):
        x = left + tick * scale
        parts += [_line(x, top, x, bottom, "grid"), _svg_text(x, bottom + 14, f"{tick:g}", "middle")]
    return [*parts, _svg_text(WIDTH - _RIGHT, bottom + 29, unit, "end")] if unit else parts


def _margin(labels: Iterable[str]) -> float:
    """Room for the rows' labels on the left."""
    return 16 + _CHAR * max((len(_short(label)) for label in labels), default=0)


def _short(label: str, longest: int = 34) -> str:
    return label if len(label) <= longest else label[: longest - 3] + "..."


def _fitting(label: str, left: float) -> str:
    """The label, cut to the room on the left."""
    return _short(label, int((left - 10) / _CHAR))


def _inside(label: str, x: float, y: float, width: float, colour: str) -> str:
    """The label in its bar, cut where the bar is short, left out where nothing can be read."""
    room = int((width - 8) / _CHAR)
    if len(label) > room:
        label = label[: room - 2] + ".." if room >= 5 else ""
    shown = f'<text x="{x + 4:.1f}" y="{y:.1f}" style="fill:{_ink(colour)}">{_text(label)}</text>'
    return shown if label else ""


def _ink(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#1d2733" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#fff"


def _svg(height: float, parts: Iterable[str], what: str) -> Markup:
    return Markup(
        f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="{what}">{"".join(parts)}</svg>'
    )


def _svg_text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_text(text)}</text>'


def _line(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>'


def _text(value: str) -> str:
    return value if isinstance(value, Markup) else html.escape(str(value))


def _is_number(value: Cell) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(tag: str, value: Cell, right: bool) -> str:
    if value is None:
        shown = "–"
    elif isinstance(value, float):
        shown = f"{value:.4g}"
    else:
        shown = _text(str(value) if _is_number(value) else value)  # type: ignore[arg-type]
    return f'<{tag} class="n">{shown}</{tag}>' if right else f"<{tag}>{shown}</{tag}>"
