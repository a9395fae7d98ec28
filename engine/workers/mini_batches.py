"""How an update cuts the batch: mini-batches of the *global* batch, each balanced over the dp ranks.

Planned on the driver from the manifest's token counts, so the same rows make the same optimizer step whatever
the layout. A short last mini-batch is a step of its own with its own denominators; no row is lost but those
that the caller leaves out.
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


def plan_mini_batches(
    tokens: Sequence[int], mini_batch_samples: int, dp: int, kept: Sequence[int] | None = None
) -> MiniBatchPlan:
    """Cut `len(tokens)` rows (tokens per row) into mini-batches of `mini_batch_samples`, each over `dp`
    ranks.

    Only the rows `kept` are cut, where they are given. Within a mini-batch the ranks' row counts differ by at
    most one and their token sums are balanced. Without rows there are no mini-batches.
    """
    if mini_batch_samples < 1 or dp < 1:
        raise ValueError(f"mini_batch_samples={mini_batch_samples} and dp={dp} must both be at least 1")
    rows: list[list[int]] = [[] for _ in range(dp)]
    sizes: list[list[int]] = [[] for _ in range(dp)]
    lengths = np.asarray(tokens)
    places = np.arange(len(lengths)) if kept is None else np.asarray(kept, dtype=np.int64)
    for start in range(0, len(places), mini_batch_samples):
        part = places[start : start + mini_batch_samples]
        for rank, chosen in enumerate(balanced(lengths[part].tolist(), dp)):
            rows[rank].extend(int(part[i]) for i in sorted(chosen))
            sizes[rank].append(len(chosen))
    return MiniBatchPlan(tuple(map(tuple, rows)), tuple(map(tuple, sizes)))
