"""Seconds of one matrix product [m, k] x [k, n]: tiles, waves over the processors, memory traffic."""

from __future__ import annotations

import math
from functools import lru_cache

from rolemesh.placement.timing.efficiency import Machine

# (rows, columns, share of the full rate): smaller tiles load more bytes for each multiplication.
TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))


def gemm_seconds(
    m: int, n: int, k: int, machine: Machine, dtype: str, batch: int = 1, rows: tuple[int, ...] = ()
) -> float:
    """`batch` products [m, k] x [k, n] in one kernel; the quickest of the tile sizes counts.

    `rows` are the lengths of the operands' rows in memory, for alignment.
    """
    if min(m, n, k, batch) <= 0:
        return 0.0
    return _gemm(int(m), int(n), int(k), int(batch), rows, _rates(machine, dtype))


def _rates(machine: Machine, dtype: str) -> tuple[float, ...]:
    eff = machine.efficiency
    rate = machine.peak(dtype) * eff.gemm(dtype)
    starts = (eff.tile_start, eff.wave_weight, eff.misaligned, eff.unaligned)
    return (rate, float(machine.units), machine.memory_rate, machine.bytes_of(dtype), *starts)


@lru_cache(maxsize=400_000)
def _gemm(m: int, n: int, k: int, batch: int, rows: tuple[int, ...], rates: tuple[float, ...]) -> float:
    rate, units, memory, size, tile_start, wave_weight, misaligned, unaligned = rates
    ideal = 2.0 * m * n * k * batch / rate
    # Each tile starts and ends with as much time as `tile_start` columns of k cost.
    k_padded = k + tile_start
    best = math.inf
    for long, short, share in TILES if units > 1 else ((16, 16, 1.0),):
        for height, width in ((long, short), (short, long)):
            waves = batch * math.ceil(m / height) * math.ceil(n / width) / units
            waves = wave_weight * math.ceil(waves) + (1 - wave_weight) * max(waves, 1.0)
            best = min(best, waves * 2.0 * height * width * k_padded * units / (rate * share))
    traffic = batch * (size * (m * k + k * n) + 2.0 * m * n) / memory
    # Rows that are no multiple of 16 bytes miss the tensor cores' wide loads; of 128, whole cache lines.
    if any((row * size) % 16 for row in rows):
        best = max(best, ideal * misaligned)
    elif any((row * size) % 128 for row in rows):
        best *= unaligned
    return max(best, traffic)
