"""How an update cuts the batch: mini-batches of the *global* batch, each balanced over the dp ranks.

Planned on the driver from the manifest's token counts, so the same rows make the same optimizer step whatever
the layout. A short last mini-batch is a step of its own with its own denominators; no row is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rolemesh.parallel.micro_batches import balanced


@dataclass(frozen=True)
class MiniBatchPlan:
    """`rows[dp_rank]`: batch rows of that rank, in mini-batch order; `sizes[dp_rank][k]`: its rows of mini-
    batch k.
    """

    rows: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]

    @property
    def n_mini_batches(self) -> int:
        return len(self.sizes[0])


def plan_mini_batches(tokens: Sequence[int], mini_batch_samples: int, dp: int) -> MiniBatchPlan:
    """Cut `len(tokens)` rows (tokens per row) into mini-batches of `mini_batch_samples`, each over `dp`
    ranks.

    Within a mini-batch the ranks' row counts differ by at most one and their token sums are balanced.
    """
    if mini_batch_samples < 1 or dp < 1:
        raise ValueError(f"mini_batch_samples={mini_batch_samples} and dp={dp} must both be at least 1")
    rows: list[list[int]] = [[] for _ in range(dp)]
    sizes: list[list[int]] = [[] for _ in range(dp)]
    lengths = np.asarray(tokens)
    for start in range(0, len(lengths), mini_batch_samples):
        part = lengths[start : start + mini_batch_samples]
        for rank, chosen in enumerate(balanced(part.tolist(), dp)):
            rows[rank].extend(start + i for i in sorted(chosen))
            sizes[rank].append(len(chosen))
    return MiniBatchPlan(tuple(map(tuple, rows)), tuple(map(tuple, sizes)))
