"""Tokens per second and device over numbers of devices: a line per strategy, crossovers, misfits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rolemesh.launch.pictures.svg import (
    RIGHT,
    WIDTH,
    Markup,
    colours,
    escaped,
    hatch,
    line,
    svg,
    ticks,
    words,
)

PLAN = "this plan"
_LEFT, _TOP, _BOTTOM = 62.0, 44.0, 300.0


@dataclass(frozen=True)
class CountPoint:
    """So many devices: tokens/s/device by strategy, and of the plan that is drawn; `misfit` says why nothing
    fits, empty where something does or where it is not known.
    """

    devices: int
    rates: Mapping[str, float] = field(default_factory=dict)
    misfit: str = ""

    @property
    def best(self) -> str:
        """The fastest strategy; empty without one."""
        return max(
            (name for name in self.rates if name != PLAN), key=lambda name: self.rates[name], default=""
        )


def crossovers(points: Sequence[CountPoint]) -> list[tuple[int, int, str, str]]:
    """Neighbouring numbers of devices between which a strategy overtakes another: (from, to, old, new).

    One that merely has no plan on the larger number is not overtaken.
    """
    known = sorted((point for point in points if point.best), key=lambda point: point.devices)
    return [
        (one.devices, other.devices, one.best, other.best)
        for one, other in itertools.pairwise(known)
        if one.best != other.best and one.best in other.rates
    ]


def device_counts_chart(points: Sequence[CountPoint]) -> Markup:
    """The chart. Numbers of devices are spaced by their logarithm; the plan is a large dot."""
    points = sorted(points, key=lambda point: point.devices)
    rates = [rate for point in points for rate in point.rates.values()]
    if not points or not rates:
        return Markup('<p class="note">no number of devices was found to fit</p>')
    chosen = colours(name for point in points for name in point.rates)
    first, last = math.log2(points[0].devices), math.log2(points[-1].devices)
    high = 1.08 * max(rates)

    def x(devices: float) -> float:
        share = (math.log2(devices) - first) / (last - first) if last > first else 0.5
        return _LEFT + 20 + share * (WIDTH - _LEFT - RIGHT - 60)

    def y(rate: float) -> float:
        return _BOTTOM - rate / high * (_BOTTOM - _TOP)

    parts = [hatch("misfit-counts", "#e6b8b3")]
    parts += _misfits(points, x)
    for tick in ticks(high, 6):
        parts += [
            line(_LEFT, y(tick), WIDTH - RIGHT, y(tick), "grid"),
            words(_LEFT - 6, y(tick) + 4, f"{tick:g}", "end"),
        ]
    for point in points:
        parts.append(words(x(point.devices), _BOTTOM + 14, str(point.devices), "middle"))
    parts.append(line(_LEFT, _BOTTOM, WIDTH - RIGHT, _BOTTOM, "axis"))
    parts += [words(8, 12, "tokens/s per device"), words(WIDTH - RIGHT, _BOTTOM + 30, "devices", "end")]
    for one, other, old, new in crossovers(points):
        at = (x(one) + x(other)) / 2
        parts += [line(at, _TOP - 8, at, _BOTTOM, "limit")]
        parts.append(words(min(max(at, 170.0), WIDTH - 190), _TOP - 14, f"{new} overtakes {old}", "middle"))
    for i, (name, colour) in enumerate(chosen.items()):
        mine = [(x(p.devices), y(p.rates[name]), p) for p in points if name in p.rates]
        wide = 2 + 1.6 * (len(chosen) - 1 - i)  # equal lines show below one another
        for stretch in _stretches(points, name):
            path = " ".join(f"{x(p.devices):.1f},{y(p.rates[name]):.1f}" for p in stretch)
            shape = f'fill="none" stroke="{colour}" stroke-width="{wide:.1f}"'
            parts.append(f'<polyline points="{path}" {shape}/>')
        for at_x, at_y, point in mine:
            said = f"{name} on {point.devices} devices: {point.rates[name]:.4g} tokens/s per device"
            mark = "7" if name == PLAN else "3.5"
            parts.append(
                f'<g class="point"><title>{escaped(said)}</title>'
                f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="{mark}" fill="{colour}"/></g>'
            )
    return svg(_BOTTOM + 36, parts, "tokens per second and device over devices")


def _stretches(points: Sequence[CountPoint], name: str) -> list[list[CountPoint]]:
    """The points of a strategy; a line does not cross numbers of devices on which nothing fits."""
    split = itertools.groupby(points, lambda point: bool(point.misfit and not point.rates))
    return [[p for p in stretch if name in p.rates] for nothing_fits, stretch in split if not nothing_fits]


def misfits_in_words(points: Sequence[CountPoint]) -> str:
    """Where nothing fits, and why on the most devices of each such range; empty where something does."""
    ordered = sorted(points, key=lambda point: point.devices)
    said = []
    for nothing_fits, group in itertools.groupby(
        ordered, lambda point: bool(point.misfit and not point.rates)
    ):
        if nothing_fits:
            mine = list(group)
            said.append(f"on {', '.join(str(p.devices) for p in mine)} devices: {mine[-1].misfit}")
    return f"None of these strategies fits {'; '.join(said)}" if said else ""


def _misfits(points: Sequence[CountPoint], x: Callable[[float], float]) -> list[str]:
    """Hatched columns, as wide as half the way to the neighbours, where nothing fits."""
    parts = []
    for i, point in enumerate(points):
        if not point.misfit or point.rates:
            continue
        here = x(point.devices)
        before = x(points[i - 1].devices) if i else here - 40
        after = x(points[i + 1].devices) if i + 1 < len(points) else here + 40
        start, end = max(_LEFT, (before + here) / 2), min(WIDTH - RIGHT, (here + after) / 2)
        said = f"{point.devices} devices: {point.misfit}"
        parts.append(
            f'<g class="misfit"><title>{escaped(said)}</title><rect x="{start:.1f}" y="{_TOP}" '
            f'width="{end - start:.1f}" height="{_BOTTOM - _TOP}" fill="url(#misfit-counts)"/></g>'
        )
        if not i or points[i - 1].rates or not points[i - 1].misfit:
            parts.append(words(start + 5, _TOP + 16, "does not fit"))
    return parts
