"""One bar per strategy: the operations on the way that makes its step as long as it is, and why it loses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rolemesh.launch.pictures.svg import (
    CHAR,
    PALETTE,
    WIDTH,
    Markup,
    bar,
    escaped,
    hatch,
    horizontal_axis,
    margin,
    svg,
    words,
    wrapped,
)

_RIGHT, _THICK, _LINE = 70.0, 20.0, 14.0


@dataclass(frozen=True)
class StrategyBar:
    """A strategy's step: seconds by operation of its critical path; empty where it has no plan."""

    name: str
    why: str
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Of the whole step."""
        return sum(self.seconds.values())


def strategies_chart(bars: Sequence[StrategyBar], chosen: Mapping[str, str]) -> Markup:
    """Bars on one axis, each with its sentence below."""
    left = max(margin(one.name for one in bars), 90.0)
    end = max((one.step_s for one in bars), default=0.0) or 1.0
    scale = (WIDTH - left - _RIGHT) / end
    longest = int((WIDTH - left - 10) / (CHAR * 0.95))
    sentences = [wrapped(one.why, longest) for one in bars]
    heights = [_THICK + 12 + _LINE * len(lines) for lines in sentences]
    parts = [hatch("misfit"), *horizontal_axis(left, 0, sum(heights) + 4, end, scale, "seconds of a step")]
    top = 4.0
    for one, lines, height in zip(bars, sentences, heights, strict=True):
        parts.append(words(left - 8, top + 14, one.name, "end"))
        x = left
        for name, seconds in one.seconds.items():
            drawn = bar(x, top, seconds * scale, _THICK, chosen.get(name, PALETTE[-1]), name)
            title = escaped(f"{one.name}, {name}: {seconds:.4g} s")
            parts.append(f'<g class="operation"><title>{title}</title>{drawn}</g>')
            x += seconds * scale
        if one.seconds:
            parts.append(words(x + 5, top + 14, f"{one.step_s:.4g} s"))
        else:
            parts.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="120" height="{_THICK}" fill="url(#misfit)"/>'
                + words(left + 126, top + 14, "no plan")
            )
        parts += [
            _sentence(left + 2, top + _THICK + 13 + i * _LINE, line, longest) for i, line in enumerate(lines)
        ]
        top += height
    return svg(sum(heights) + 40, parts, "strategies")


def _sentence(x: float, y: float, text: str, longest: int) -> str:
    """On white, as grid lines run behind it."""
    width = min(len(text) * CHAR, longest * CHAR)
    return (
        f'<rect x="{x - 1:.1f}" y="{y - 11:.1f}" width="{width:.1f}" height="{_LINE}" fill="#fff"/>'
        + words(x, y, text)
    )
