"""Memory of a pool's fullest device over one step, stacked, with the device's limit and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rolemesh.launch.pictures.svg import (
    PALETTE,
    RIGHT,
    WIDTH,
    Markup,
    escaped,
    line,
    svg,
    ticks,
    words,
)
from rolemesh.placement.memory.items import GIB
from rolemesh.placement.memory_over_step import PoolMemory
from rolemesh.placement.step_view import Lane

MOST_TIMES = 6.0  # the planned peak: what is larger is off the picture
_LEFT, _HEIGHT, _TOP = 62.0, 190.0, 16.0


@dataclass(frozen=True)
class Layer:
    """A rectangle of the stack: GiB from `low` to `high`, seconds from `start_s` to `end_s`.

    `stays` is a role's, for the whole step; else it is an operation's.
    """

    name: str
    stays: bool
    start_s: float
    end_s: float
    low: float
    high: float


def layers_of(memory: PoolMemory, lane: Lane, length_s: float) -> list[Layer]:
    """What stays, role upon role, and on it what each operation works with while it runs."""
    layers, low = [], 0.0
    for role, size in memory.resident.items():
        layers.append(Layer(role, True, 0.0, length_s, low, low + size / GIB))
        low += size / GIB
    for piece in lane.pieces:
        if size := memory.working.get(piece.name, 0.0):
            layers.append(Layer(piece.name, False, piece.start_s, piece.end_s, low, low + size / GIB))
    return layers


def memory_step(
    memory: PoolMemory,
    lane: Lane,
    length_s: float,
    *,
    roles: Mapping[str, str],
    operations: Mapping[str, str],
    measured: float | None = None,
) -> Markup:
    """The stack of one pool. `measured`: bytes that its fullest rank held in a run."""
    layers = layers_of(memory, lane, length_s)
    limit, seen = memory.limit / GIB, (measured or 0.0) / GIB
    peak = max((layer.high for layer in layers), default=0.0)
    # What is much larger than what is held is said by the caption and not drawn.
    highest = (
        max(size for size in (peak, seen, limit) if size <= MOST_TIMES * peak or size == peak) * 1.12 or 1.0
    )
    scale = (WIDTH - _LEFT - RIGHT) / (length_s or 1.0)
    bottom = _TOP + _HEIGHT

    def y(gib: float) -> float:
        return bottom - gib / highest * _HEIGHT

    parts = []
    for tick in ticks(highest, 5):
        parts += [line(_LEFT, y(tick), WIDTH - RIGHT, y(tick), "grid")]
        parts += [words(_LEFT - 6, y(tick) + 4, f"{tick:g}", "end")]
    for tick in ticks(length_s or 1.0):
        parts.append(words(_LEFT + tick * scale, bottom + 14, f"{tick:g}", "middle"))
    parts += [words(8, 10, "GiB"), words(WIDTH - RIGHT, bottom + 28, "seconds of the step", "end")]
    for layer in layers:
        colour = (roles if layer.stays else operations).get(layer.name, PALETTE[-1])
        x, width = _LEFT + layer.start_s * scale, max((layer.end_s - layer.start_s) * scale, 0.8)
        said = f"{layer.name}: {layer.high - layer.low:.4g} GiB"
        parts.append(
            f'<g class="layer"><title>{escaped(said)}</title><rect x="{x:.1f}" y="{y(layer.high):.1f}" '
            f'width="{width:.1f}" height="{y(layer.low) - y(layer.high):.1f}" fill="{colour}"/></g>'
        )
    parts.append(line(_LEFT, bottom, WIDTH - RIGHT, bottom, "axis"))
    if limit <= highest:
        said = f"the device holds {limit:.3g} GiB"
        parts += [line(_LEFT, y(limit), WIDTH - RIGHT, y(limit), "limit")]
        parts.append(words(WIDTH - RIGHT - 4, y(limit) - 4, said, "end"))
    if measured and seen <= highest:
        parts += [line(_LEFT, y(seen), WIDTH - RIGHT, y(seen), "path")]
        parts.append(words(_LEFT + 6, y(seen) - 4, f"measured peak {seen:.3g} GiB"))
    return svg(bottom + 34, parts, "memory over a step")
