"""Sums, means, variances and whitening over the positions that a mask keeps, on all ranks of a group.

`mask` is bool, integer or float: a position counts where it is not 0, and what lies in the others (NaN, inf)
is never read. With a process group the statistics are over all its ranks: each calls, also one with no rows
or with nothing kept; a gradient then flows to no value. Sums are taken in float64.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum of the kept `values` (any shape, as `mask`), a float64 scalar."""
    return _totals(values, mask, group)[0]


def masked_mean(values: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Mean of the kept `values`, a float64 scalar; 0 where nothing is kept."""
    total, count = _totals(values, mask, group)
    return total / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Unbiased variance of the kept `values`, a float64 scalar.

    0 where fewer than two are kept; verl raises ValueError, which ends a run for one short batch.
    """
    return _moments(values, mask, group)[1]


def masked_whiten(
    values: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None, shift_mean: bool = True
) -> Tensor:
    """`values` brought to mean 0 and variance 1 over the kept positions: (values - mean) / sqrt(var + 1e-8).

    `shift_mean=False` adds the mean back, as verl does; see `masked_scale` to divide only. Fewer than two
    kept values have no spread: with `shift_mean` they become 0, else they stay. Returns `values`' dtype, 0
    outside of the mask.
    """
    mean, var, count = _moments(values, mask, group)
    kept = torch.where(mask.bool(), values.double(), mean)
    whitened = (kept - mean) * _inverse_std(var, count)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask.bool(), whitened, 0.0).to(values.dtype)


def masked_scale(values: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """`values` brought to variance 1 with their zero kept in place: values / sqrt(var + 1e-8).

    Fewer than two kept values stay as they are. 0 outside of the mask.
    """
    _, var, count = _moments(values, mask, group)
    kept = torch.where(mask.bool(), values.double(), 0.0)
    return (kept * _inverse_std(var, count)).to(values.dtype)


def _inverse_std(var: Tensor, count: Tensor) -> Tensor:
    return torch.where(count < 2, 1.0, torch.rsqrt(var + 1e-8))


def _moments(values: Tensor, mask: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, unbiased variance and count; from deviations, as sums of squares lose a large mean's digits."""
    total, count = _totals(values, mask, group)
    mean = total / count.clamp(min=1)
    squares, _ = _totals((values.double() - mean).square(), mask, group)
    return mean, squares / (count - 1).clamp(min=1), count


def _totals(values: Tensor, mask: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[2] float64: sum and number of kept values."""
    if values.shape != mask.shape:
        raise ValueError(f"values are {[*values.shape]}, the mask is {[*mask.shape]}")
    keep = mask.bool()
    totals = torch.stack([torch.where(keep, values.double(), 0.0).sum(), keep.sum().double()])
    if group is not None:
        totals = totals.detach()
        dist.all_reduce(totals, group=group)
    return totals
