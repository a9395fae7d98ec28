"""Statistics of groups of scores as a Triton kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def group_moments(scores: Tensor, group: Tensor, n_groups: int) -> Tensor:
    """Count, mean and sum of squared deviations [3, n_groups] float64 of each `group`'s `scores` [n]."""
    moments = torch.zeros(3, n_groups, dtype=torch.float64, device=scores.device)
    n = scores.numel()
    if n and n_groups:
        with torch.cuda.device_of(scores):
            _group_kernel[(n_groups,)](
                scores.contiguous(), group.contiguous(), moments, n, n_groups, BLOCK=1024, num_warps=4
            )
    return moments


@triton.jit
def _group_kernel(scores, group, moments, n, n_groups, BLOCK: tl.constexpr):
    """One program a group: it looks at every row's group, twice, and reads its own scores. No atomics: the
    order of the sums is fixed."""
    mine = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    counts = tl.full([BLOCK], 0.0, tl.float64)
    sums = tl.full([BLOCK], 0.0, tl.float64)
    for start in range(0, n, BLOCK):
        at = start + lane
        keep = tl.load(group + at, mask=at < n, other=-1) == mine
        counts += keep.to(tl.float64)
        sums += tl.load(scores + at, mask=keep, other=0.0)
    count = tl.sum(counts)
    mean = tl.sum(sums) / tl.maximum(count, 1.0)
    squares = tl.full([BLOCK], 0.0, tl.float64)
    for start in range(0, n, BLOCK):
        at = start + lane
        keep = tl.load(group + at, mask=at < n, other=-1) == mine
        deviation = tl.where(keep, tl.load(scores + at, mask=keep, other=0.0) - mean, 0.0)
        squares += deviation * deviation
    tl.store(moments + mine, count)
    tl.store(moments + n_groups + mine, mean)
    tl.store(moments + 2 * n_groups + mine, tl.sum(squares))
