"""Sources: groups of prompts that an epoch uses more or less often than once."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rolemesh.engine.data.files import DataError


@dataclass(frozen=True)
class Source:
    """The prompts `rows` of a data set (int64, [n]) that an epoch uses `weight` times on average.

    Passes over the source follow each other, each in an order of its own, and every epoch takes the next
    `per_epoch` prompts: with a weight of 0.5 two epochs use each prompt once, with 1.5 three times.
    """

    name: str
    rows: np.ndarray
    weight: float

    @property
    def per_epoch(self) -> int:
        """Prompts that each epoch takes: at least one, unless the weight is 0."""
        return per_epoch(len(self.rows), self.weight)

    def drawn(self, seed: int, epoch: int) -> np.ndarray:
        """The prompts [per_epoch] of one epoch: a function of the source and these arguments alone."""
        n, taken = len(self.rows), self.per_epoch
        if taken == 0:
            return self.rows[:0]
        first, name = epoch * taken, zlib.crc32(self.name.encode())
        passes = range(first // n, -(-(first + taken) // n))
        stream = np.concatenate([np.random.default_rng([seed, name, i]).permutation(n) for i in passes])
        start = first - passes.start * n
        return self.rows[stream[start : start + taken]]


def per_epoch(n_rows: int, weight: float) -> int:
    """How many of a source's `n_rows` prompts an epoch takes."""
    return max(1, round(n_rows * weight)) if n_rows and weight > 0 else 0


def weighted(rows: Mapping[str, Sequence[int]], weights: Mapping[str, float]) -> tuple[Source, ...]:
    """The sources of a data set with their weights, 1 where none is given; none at all without `weights`.

    Raises:
        DataError: a weight for a source that is not there, or no prompt left.
    """
    if not weights:
        return ()
    check_weights({name: len(numbers) for name, numbers in rows.items()}, weights)
    return tuple(
        Source(name, np.asarray(numbers, dtype=np.int64), weights.get(name, 1.0))
        for name, numbers in rows.items()
    )


def check_weights(n_rows: Mapping[str, int], weights: Mapping[str, float]) -> int:
    """Prompts of an epoch over sources with so many rows. Raises DataError as `weighted`."""
    if unknown := sorted(set(weights) - set(n_rows)):
        raise DataError(f"data.weights names {unknown}, but the prompts are of {sorted(n_rows)}")
    total = sum(per_epoch(n, weights.get(name, 1.0)) for name, n in n_rows.items())
    if total == 0:
        raise DataError("data.weights leaves no prompt: every source has weight 0")
    return total
