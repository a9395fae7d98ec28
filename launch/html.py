"""Building blocks of a self-contained HTML page: tables, and charts as inline SVG.

Pure functions from values to markup. What is not `Markup` is escaped. A page needs no network and no script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rolemesh.launch.pictures.svg import (
    PALETTE,
    RIGHT,
    WIDTH,
    Axis,
    Markup,
    colours,
    escaped,
    fitting,
    horizontal_axis,
    inside,
    line,
    margin,
    svg,
    words,
)

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
pre { font-size: 12.5px; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; fill: #1d2733; }
svg .grid { stroke: #e3e8ee; } svg .axis { stroke: #8793a0; }
svg .limit { stroke: #c0392b; stroke-dasharray: 4 3; } svg .link { stroke: #566373; stroke-width: 1.5; }
svg .path { stroke: #1d2733; stroke-width: 3; }
.key { display: inline-block; margin: 0 14px 4px 0; font-size: 13px; }
.key i { display: inline-block; width: 11px; height: 11px; margin-right: 5px; border-radius: 2px; }
"""


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
    head = f"<h1>{escaped(title)}</h1>" + (f'<p class="note">{escaped(subtitle)}</p>' if subtitle else "")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"  # a browser would refuse whatever asked for something
        f"<title>{escaped(title)}</title><style>{_STYLE}</style></head>\n<body>{head}\n"
        + "\n".join(escaped(part) for part in parts)
        + "\n</body></html>\n"
    )


def section(heading: str, *parts: str) -> Markup:
    """A heading and what stands below it."""
    return Markup(f"<section><h2>{escaped(heading)}</h2>{''.join(escaped(part) for part in parts)}</section>")


def subsection(heading: str, *parts: str) -> Markup:
    """The same, below a section."""
    return Markup(f"<section><h3>{escaped(heading)}</h3>{''.join(escaped(part) for part in parts)}</section>")


def disclosure(heading: str, *parts: str, more: str = "", opened: bool = False) -> Markup:
    """Parts that a click on their heading shows; `more` stands beside it."""
    head = escaped(heading) + (f" <span>{escaped(more)}</span>" if more else "")
    inside = "".join(escaped(part) for part in parts)
    return Markup(f"<details{' open' * opened}><summary>{head}</summary>{inside}</details>")


def note(text: str) -> Markup:
    """A paragraph in small type."""
    return Markup(f'<p class="note">{escaped(text)}</p>')


def paragraph(text: str) -> Markup:
    """One paragraph of text."""
    return Markup(f"<p>{escaped(text)}</p>")


def preformatted(text: str) -> Markup:
    """Lines as they stand."""
    return Markup(f'<div class="wide"><pre>{escaped(text)}</pre></div>')


def figure(chart: str, caption: str = "") -> Markup:
    """A chart with a caption below it."""
    below = f"<figcaption>{escaped(caption)}</figcaption>" if caption else ""
    return Markup(f"<figure>{escaped(chart)}{below}</figure>")


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
    head = "".join(f"<th>{escaped(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{escaped(text)}</td>' for text, kind in row) + "</tr>"
        for row in rows
    )
    return Markup(
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def legend(chosen: Mapping[str, str]) -> Markup:
    """What each colour stands for."""
    keys = (
        f'<span class="key"><i style="background:{colour}"></i>{escaped(name)}</span>'
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
    left, row = left or margin(lanes), 26.0
    bottom = row * len(lanes) + 6
    scale = (WIDTH - left - RIGHT) / end
    parts = horizontal_axis(left, 0, bottom, end, scale, unit)
    for i, lane in enumerate(lanes):
        parts.append(words(left - 8, i * row + 19, fitting(lane, left), "end"))
    for bar in bars:
        x, width = left + bar.start * scale, max((bar.end - bar.start) * scale, 0.8)
        y = lanes.index(bar.lane) * row + 4
        colour = chosen.get(bar.label, PALETTE[-1])
        seconds = f"{bar.end - bar.start:.4g} {unit} ({bar.start:.4g} to {bar.end:.4g})"
        parts.append(
            f"<g><title>{escaped(f'{bar.label}: {seconds} {bar.detail}'.strip())}</title>"
            f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{row - 6:.0f}" rx="2" '
            f'fill="{colour}"/>' + inside(bar.label, x, y + 14, width, colour) + "</g>"
        )
    return svg(bottom + 34, parts, "Gantt chart")


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
    left = left or margin(rows)
    scale = (WIDTH - left - RIGHT) / end
    thick = 20.0 if stacked else 14.0
    heights = [8 + thick * (1 if stacked else max(1, len(values))) for values in rows.values()]
    parts = horizontal_axis(left, 0, sum(heights) + 4, end, scale, unit)
    top = 0.0
    for (label, values), height in zip(rows.items(), heights, strict=True):
        parts.append(words(left - 8, top + height / 2 + 5, fitting(label, left), "end"))
        x, y = left, top + 4
        for name, value in values.items():
            width = value * scale
            said = f"{label}, {name}: {value:.4g} {unit}".strip()
            parts.append(
                f"<g><title>{escaped(said)}</title>"
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{thick - 1:.0f}" '
                f'fill="{chosen[name]}"/></g>'
            )
            if stacked:
                x += width
            else:
                parts.append(words(x + width + 5, y + 11, f"{value:.4g}"))
                y += thick
        if stacked:
            parts.append(words(x + 5, y + 14, f"{sum(values.values()):.4g}"))
        if label in limits:
            at = left + limits[label] * scale
            parts.append(line(at, top + 2, at, top + height + 2, "limit"))
        top += height
    return svg(top + 38, parts, "bar chart")


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
    x_axis = Axis.over([x for x, _ in everything], 62.0, WIDTH - RIGHT, log)
    y_axis = Axis.over([y for _, y in everything], 300.0, 24.0, log)
    parts = []
    for x in x_axis.ticks:
        at = x_axis.at(x)
        parts += [line(at, 24, at, 300, "grid"), words(at, 316, f"{x:g}", "middle")]
    for y in y_axis.ticks:
        at = y_axis.at(y)
        parts += [line(62, at, WIDTH - RIGHT, at, "grid"), words(56, at + 4, f"{y:g}", "end")]
    parts += [words(WIDTH - RIGHT, 334, x_label, "end"), words(8, 14, y_label)]
    for i, (name, points) in enumerate(drawn.items()):
        wide = 2 + 1.6 * (len(drawn) - 1 - i)  # equal lines show below one another
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{chosen[name]}" stroke-width="{wide:.1f}"/>'
        )
        parts += [
            f"<g><title>{escaped(f'{name}: {x:g} {x_label}, {y:.4g} {y_label}')}</title>"
            f'<circle cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="3.5" fill="{chosen[name]}"/></g>'
            for x, y in points
        ]
    return svg(344, parts, "line chart")


def _is_number(value: Cell) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(tag: str, value: Cell, right: bool) -> str:
    if value is None:
        shown = "–"
    elif isinstance(value, float):
        shown = f"{value:.4g}"
    else:
        shown = escaped(str(value) if _is_number(value) else value)  # type: ignore[arg-type]
    return f'<{tag} class="n">{shown}</{tag}>' if right else f"<{tag}>{shown}</{tag}>"
