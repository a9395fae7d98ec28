"""Dynamic sampling: which prompts' samples are worth a step, over as many tries as it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rolemesh.engine.batch_ref import BatchRef


class RefillError(RuntimeError):
    """The tries are used up and the batch is not full; the message has the counts and what to do."""


@dataclass(frozen=True)
class RefillSpec:
    """How many prompts a step needs, in how many tries, and what happens when they are not enough."""

    prompts: int
    tries: int
    at_limit: Literal["stop", "skip"] = "stop"


@dataclass
class Refill:
    """The groups (samples of one prompt) that a step keeps: those of unequal scores (Yu et al., 2025,
    arXiv:2503.14476, eq. 11). Groups of equal scores have advantages of 0 and teach nothing.
    """

    spec: RefillSpec
    tries: int = 0
    n_groups: int = 0
    n_rows: int = 0
    n_dropped: int = 0
    equal: Counter[float] = field(default_factory=Counter)
    score_sum: float = 0.0
    n_scored: int = 0
    _kept: list[BatchRef] = field(default_factory=list)
    n_kept: int = 0

    def add(
        self, batch: BatchRef, uids: Sequence[str], scores: Sequence[float], dropped: Sequence[bool] = ()
    ) -> None:
        """What one try made: `scores` [rows] of the samples, `uids` [rows] of their prompts. Groups with a
        `dropped` row are not kept.
        """
        self.tries += 1
        self.n_rows += batch.n_rows
        groups: dict[str, list[int]] = {}
        for row, uid in enumerate(uids):
            groups.setdefault(uid, []).append(row)
        self.n_groups += len(groups)
        lost = set(np.flatnonzero(dropped).tolist())
        chosen: list[int] = []
        for rows in groups.values():
            if lost.intersection(rows):
                self.n_dropped += 1
                continue
            values = [scores[row] for row in rows]
            self.score_sum += sum(values)
            self.n_scored += len(values)
            if min(values) == max(values):
                self.equal[values[0]] += 1
            elif self.n_kept < self.spec.prompts:
                self.n_kept += 1
                chosen += rows
        if chosen:
            self._kept.append(batch.take(chosen))

    @property
    def full(self) -> bool:
        """Whether there are groups enough."""
        return self.n_kept >= self.spec.prompts

    @property
    def exhausted(self) -> bool:
        """Whether no further try is allowed."""
        return self.tries >= self.spec.tries

    def batch(self) -> BatchRef:
        """The rows of the kept groups, in the order in which they were made."""
        shared = set.intersection(*(set(batch.columns) for batch in self._kept))  # see `join_parts`
        return BatchRef.concat(
            [batch.select(name for name in batch.columns if name in shared) for batch in self._kept]
        )

    def metrics(self) -> dict[str, float]:
        """Tries (verl's `train/num_gen_batches`), groups kept and seen, and samples made."""
        return {
            "train/num_gen_batches": float(self.tries),
            "training/groups_kept": float(self.n_kept),
            "training/groups_seen": float(self.n_groups),
            "training/groups_without_spread": float(sum(self.equal.values())),
            "training/generated_rows": float(self.n_rows),
        }

    def shortfall(self) -> str:
        """Why the batch is not full, in numbers, and what to do."""
        mean = f"{self.score_sum / self.n_scored:.4g}" if self.n_scored else "unknown"
        common = "; ".join(
            f"in {n} of them every sample got {score:.4g}" for score, n in self.equal.most_common(2)
        )
        lost = f", {self.n_dropped} lost samples to a failed reward" if self.n_dropped else ""
        return (
            f"dynamic sampling kept {self.n_kept} groups of the {self.spec.prompts} that a step needs, after "
            f"{self.tries} tries with {self.n_groups} groups ({self.n_rows} samples). Mean score {mean}; "
            f"{sum(self.equal.values())} groups have equal scores{f' ({common})' if common else ''}{lost}. "
            "Prompts that are always or never solved teach nothing: use others or more samples per prompt "
            "(batch.samples_per_prompt), allow more (algorithm.dynamic_sampling.tries), or leave such steps "
            "out (algorithm.dynamic_sampling.at_limit: skip)"
        )
