"""One measurement: what was run, on how much, in how many seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles

import torch

LEAST_RUNS = 5
SLOW_S = 0.1  # a run that takes longer is made three times only


@dataclass(frozen=True)
class Point:
    """One measurement.

    `sizes` are m, n, k of a `gemm`; batch, heads, tokens, head width of `attention_*`; the number of layers
    of `layers_*`; else bytes. The bytes of a collective are those of the whole tensor: what every rank ends
    with after an all-reduce or all-gather, or starts with before a reduce-scatter.
    """

    kind: str
    dtype: str
    sizes: tuple[int, ...]
    seconds: float

    def row(self) -> list[str | int | float]:
        """As a list for a file."""
        return [self.kind, self.dtype, *self.sizes, float(f"{self.seconds:.4g}")]

    @classmethod
    def of_row(cls, row: Sequence[str | int | float]) -> Point:
        """What `row` made."""
        kind, dtype, *sizes, seconds = row
        return cls(str(kind), str(dtype), tuple(int(size) for size in sizes), float(seconds))


def seconds_of(run: Callable[[], object], device: torch.device, budget_s: float, runs: int = 0) -> float:
    """Seconds of one `run`: the lower quartile of several, after one that does not count.

    What else the machine does only ever makes a run longer, so that the quicker ones tell what it can do. At
    least five runs, then for as long as the budget lasts; or `runs` of them, which collectives need: every
    rank must make the same number.
    """
    least = runs or (LEAST_RUNS if _timed(run, device) < SLOW_S else 3)
    end = time.perf_counter() + budget_s
    taken: list[float] = []
    while len(taken) < least or (not runs and time.perf_counter() < end):
        taken.append(_timed(run, device))
    return quantiles(taken, n=4, method="inclusive")[0]


def _timed(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
