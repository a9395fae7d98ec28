"""Lengths of responses as a histogram, with how many are still being written after so many tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rolemesh.launch.pictures.svg import PALETTE, RIGHT, WIDTH, Markup, escaped, line, svg, ticks, words

_LEFT, _TOP, _HEIGHT, _BINS = 62.0, 22.0, 170.0, 40


def bins_of(lengths: Sequence[int], n: int = _BINS) -> list[tuple[int, int, int]]:
    """(from, up to and with, count) of equal whole widths, from 1 token to the longest; at most `n`."""
    if not lengths:
        return []
    width = max(1, math.ceil(max(lengths) / n))
    counts = [0] * math.ceil(max(lengths) / width)
    for length in lengths:
        counts[max(0, (length - 1) // width)] += 1
    return [(i * width + 1, (i + 1) * width, count) for i, count in enumerate(counts)]


def running(lengths: Sequence[int], tokens: float) -> int:
    """Responses longer than so many tokens: those still being written then, where all began together."""
    return sum(length > tokens for length in lengths)


def drawable(measured: Sequence[tuple[float, int]]) -> bool:
    """Whether a measured curve of responses still being written has anything to show."""
    return len(measured) > 1 and measured[-1][0] > 0 and max(n for _, n in measured) > 0


def length_histogram(lengths: Sequence[int], measured: Sequence[tuple[float, int]] = ()) -> Markup:
    """Bars are counts of lengths; the line is how many are longer.

    `measured` are (seconds, responses still being written) of a step: a dashed line of shares, whose last
    second lies at the longest response.
    """
    found = bins_of(lengths)
    if not found:
        return Markup('<p class="note">no samples are kept in the run folder</p>')
    end = found[-1][1]
    scale = (WIDTH - _LEFT - RIGHT - 30) / end
    high = 1.1 * max(count for _, _, count in found)
    bottom = _TOP + _HEIGHT
    parts = [words(8, 12, "responses"), words(WIDTH - RIGHT, 12, "still being written", "end")]
    for tick in ticks(high, 5):
        y = bottom - tick / high * _HEIGHT
        parts += [line(_LEFT, y, WIDTH - RIGHT - 30, y, "grid"), words(_LEFT - 6, y + 4, f"{tick:g}", "end")]
    for tick in ticks(end):
        parts.append(words(_LEFT + tick * scale, bottom + 14, f"{tick:g}", "middle"))
    parts.append(words(WIDTH - RIGHT, bottom + 28, "tokens", "end"))
    for first, last, count in found:
        x, height = _LEFT + (first - 1) * scale, count / high * _HEIGHT
        said = f"{first} to {last} tokens: {count}" if last > first else f"{first} tokens: {count}"
        parts.append(
            f'<g class="bin"><title>{escaped(said)}</title><rect x="{x + 0.5:.1f}" y="{bottom - height:.1f}" '
            f'width="{max((last - first + 1) * scale - 1, 0.8):.1f}" height="{height:.1f}" '
            f'fill="{PALETTE[0]}"/></g>'
        )
    path = " ".join(
        f"{_LEFT + t * scale:.1f},{bottom - running(lengths, t) / len(lengths) * _HEIGHT:.1f}"
        for t in [0, *(last for _, last, _ in found)]
    )
    parts.append(f'<polyline points="{path}" fill="none" stroke="{PALETTE[3]}" stroke-width="2"/>')
    if drawable(measured):
        parts.append(_measured(measured, max(lengths) * scale, bottom))
    parts += [
        words(WIDTH - RIGHT, _TOP + 4, f"{len(lengths):,}", "end"),
        words(WIDTH - RIGHT, bottom + 4, "0", "end"),
        line(_LEFT, bottom, WIDTH - RIGHT - 30, bottom, "axis"),
    ]
    return svg(bottom + 34, parts, "lengths of responses")


def _measured(points: Sequence[tuple[float, int]], width: float, bottom: float) -> str:
    """The measured curve over `width`, as steps: a number holds until the next."""
    last_s, most = points[-1][0], max(n for _, n in points)
    path, y = [], bottom - points[0][1] / most * _HEIGHT
    for seconds, n in points:
        x = _LEFT + seconds / last_s * width
        path.append(f"{x:.1f},{y:.1f}")
        y = bottom - n / most * _HEIGHT
        path.append(f"{x:.1f},{y:.1f}")
    said = f"measured: {most:,} responses, the last after {last_s:.3g} s"
    return (
        f'<g class="measured"><title>{escaped(said)}</title><polyline points="{" ".join(path)}" fill="none" '
        f'stroke="{PALETTE[1]}" stroke-width="2" stroke-dasharray="5 3"/></g>'
    )
