"""Sums, means, variances and whitening over the positions that a mask keeps, on all ranks of a group.

`mask` is bool, integer or float: a position counts where it is not 0, and what lies in the others (NaN, inf)
is never read. Sums are taken in float64, and a variance from deviations: sums of squares would lose a large
mean's digits.

With a process group the statistics are over all its ranks: each calls, also one with no rows or with nothing
kept. That is one exchange of three numbers, and no gradient flows to any value. Without a group all are
differentiable in `values`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rolemesh.kernels.arrays import mask_bytes, wide
from rolemesh.kernels.forms import Kernel, gather_ranks, group_name, group_named
from rolemesh.kernels.library import torch_op


def masked_sum(values: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum of the kept `values` (any shape, as `mask`), a float64 scalar."""
    _check(values, mask)
    # Not count * mean, which would round: the sum of whole numbers is whole.
    total = torch.where(mask.bool(), values, 0).sum(dtype=torch.float64)
    return total if group is None else _all_gather(total.detach(), group_name(group)).sum()


def masked_mean(values: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Mean of the kept `values`, a float64 scalar; 0 where nothing is kept."""
    return _moments(values, mask, group)[1]


def masked_var(values: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Unbiased variance of the kept `values`, a float64 scalar.

    0 where fewer than two are kept; verl raises ValueError, which ends a run for one short batch.
    """
    count, _, squares = _moments(values, mask, group).unbind()
    return squares / (count - 1).clamp(min=1)


def masked_whiten(
    values: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None, shift_mean: bool = True
) -> Tensor:
    """`values` brought to mean 0 and variance 1 over the kept positions: (values - mean) / sqrt(var + 1e-8).

    `shift_mean=False` adds the mean back, as verl does; see `masked_scale` to divide only. Fewer than two
    kept values have no spread: with `shift_mean` they become 0, else they stay. Returns `values`' dtype, 0
    outside of the mask.
    """
    count, mean, squares = _moments(values, mask, group).unbind()
    add = torch.zeros_like(mean) if shift_mean else mean
    return _normalized(values, mask, group, [mean, _inverse_std(count, squares), add])


def masked_scale(values: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """`values` brought to variance 1 with their zero kept in place: values / sqrt(var + 1e-8).

    Fewer than two kept values stay as they are. 0 outside of the mask.
    """
    count, _, squares = _moments(values, mask, group).unbind()
    zero = torch.zeros_like(count)
    return _normalized(values, mask, group, [zero, _inverse_std(count, squares), zero])


def _inverse_std(count: Tensor, squares: Tensor) -> Tensor:
    var = squares / (count - 1).clamp(min=1)
    return torch.where(count < 2, 1.0, torch.rsqrt(var + 1e-8))


def _moments(values: Tensor, mask: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[3] float64: count, mean and squared deviations, of all ranks."""
    _check(values, mask)
    if group is None:
        return _masked_moments(values, mask.bool())
    counts, means, squares = _all_gather(
        _masked_moments(values.detach(), mask.bool()), group_name(group)
    ).unbind(1)
    count = counts.sum()  # in the order of ranks: equal on all of them
    mean = (counts * means).sum() / count.clamp(min=1)
    # Each rank's deviations moved to the common mean (Chan, Golub and LeVeque 1979).
    return torch.stack([count, mean, (squares + counts * (means - mean).square()).sum()])


def _normalized(
    values: Tensor, mask: Tensor, group: dist.ProcessGroup | None, numbers: list[Tensor]
) -> Tensor:
    values = values if group is None else values.detach()
    return _masked_normalize(values, mask.bool(), torch.stack(numbers))


def _check(values: Tensor, mask: Tensor) -> None:
    if values.shape != mask.shape:
        raise ValueError(f"values are {[*values.shape]}, the mask is {[*mask.shape]}")


def _floating(values: Tensor) -> Tensor:
    return values if values.is_floating_point() else values.double()


def _fake_gather(numbers: Tensor, group_name: str) -> Tensor:
    return numbers.new_empty(dist.get_world_size(group_named(group_name)), *numbers.shape)


@torch_op(fake=_fake_gather)
def _all_gather(numbers: Tensor, group_name: str) -> Tensor:
    return gather_ranks(numbers, group_named(group_name))


def _fake_moments(values: Tensor, mask: Tensor) -> Tensor:
    return values.new_empty(3, dtype=torch.float64)


def _save_moments(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _moments_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    # d mean / d x = 1 / count, d squares / d x = 2 (x - mean).
    values, mask, moments = ctx.saved_tensors
    count, mean, _ = moments.unbind()
    numbers = torch.stack([mean, 2 * grad[2], grad[1] / count.clamp(min=1)])
    return _masked_normalize(values, mask, numbers), None


@torch_op(fake=_fake_moments, setup=_save_moments, backward=_moments_backward)
def _masked_moments(values: Tensor, mask: Tensor) -> Tensor:
    return _moments_kernel(_floating(values).reshape(-1), mask.reshape(-1))


def _fake_normalize(values: Tensor, mask: Tensor, numbers: Tensor) -> Tensor:
    return values.new_empty(values.shape, dtype=_floating(values).dtype)


def _save_normalize(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _normalize_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None]:
    values, mask, numbers = ctx.saved_tensors
    shift, scale, _ = numbers.unbind()
    to_values = _masked_normalize(grad, mask, numbers * numbers.new_tensor([0.0, 1.0, 0.0]))
    if not ctx.needs_input_grad[2]:
        return to_values, None, None
    kept = torch.where(mask, grad.double(), 0.0)
    total, moment = kept.sum(), (kept * torch.where(mask, values.double() - shift, 0.0)).sum()
    return to_values, None, torch.stack([-scale * total, moment, total])


@torch_op(fake=_fake_normalize, setup=_save_normalize, backward=_normalize_backward)
def _masked_normalize(values: Tensor, mask: Tensor, numbers: Tensor) -> Tensor:
    """(values - numbers[0]) * numbers[1] + numbers[2] where `mask`, else 0."""
    return _normalize_kernel(_floating(values).reshape(-1), mask.reshape(-1), numbers).view(values.shape)


def masked_moments_reference(values: Tensor, mask: Tensor) -> Tensor:
    """[3] float64: count, mean, and squared deviations from it, of the kept `values` [N]."""
    count = mask.sum().double()
    mean = torch.where(mask, values.double(), 0.0).sum() / count.clamp(min=1)
    return torch.stack([count, mean, torch.where(mask, values.double() - mean, 0.0).square().sum()])


def masked_normalize_reference(values: Tensor, mask: Tensor, numbers: Tensor) -> Tensor:
    """The kept `values` [N] less `numbers`' shift, times its scale, plus what it adds, in float64."""
    shift, scale, add = numbers.unbind()
    return torch.where(mask, (values.double() - shift) * scale + add, 0.0).to(values.dtype)


def _moments_cpp(cpu: Any, values: Tensor, mask: Tensor) -> Tensor:
    out = values.new_empty(3, dtype=torch.float64)
    cpu.masked_moments(wide(values), mask_bytes(mask), out, torch.get_num_threads())
    return out


def _normalize_cpp(cpu: Any, values: Tensor, mask: Tensor, numbers: Tensor) -> Tensor:
    contiguous = wide(values)
    out = torch.empty_like(contiguous)
    cpu.masked_normalize(contiguous, mask_bytes(mask), *numbers.tolist(), out, torch.get_num_threads())
    return out.to(values.dtype)


_moments_kernel = Kernel(
    "masked_moments", reference=masked_moments_reference, cpp=_moments_cpp, triton="masked"
)
_normalize_kernel = Kernel(
    "masked_normalize", reference=masked_normalize_reference, cpp=_normalize_cpp, triton="masked"
)
