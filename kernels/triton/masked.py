"""Statistics of the values that a mask keeps, and their normalisation, as Triton kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rolemesh.kernels.triton.convert import store, to_float64

_BLOCK = 1024
_MAX_PARTS = 1024  # programs of the first pass: several for each SM, and one block for the second pass


def masked_moments(values: Tensor, mask: Tensor) -> Tensor:
    """Count, mean and sum of squared deviations [3] float64 of the kept `values` [N]; zeros if none is kept.

    The partition depends on N alone and parts are merged in a fixed order: the result is deterministic.
    """
    n = values.numel()
    moments = torch.zeros(3, dtype=torch.float64, device=values.device)
    if n == 0:
        return moments
    blocks_each = triton.cdiv(triton.cdiv(n, _BLOCK), _MAX_PARTS)
    n_parts = triton.cdiv(n, blocks_each * _BLOCK)
    parts = torch.empty(3, n_parts, dtype=torch.float64, device=values.device)
    with torch.cuda.device_of(values):
        _parts_kernel[(n_parts,)](
            values.contiguous(), mask.contiguous(), parts, n, blocks_each, n_parts, BLOCK=_BLOCK, num_warps=4
        )
        _merge_kernel[(1,)](parts, moments, n_parts, BLOCK=triton.next_power_of_2(n_parts), num_warps=4)
    return moments


def masked_normalize(values: Tensor, mask: Tensor, numbers: Tensor) -> Tensor:
    """(values - shift) * scale + add where `mask` [N] keeps, else 0.

    `numbers` [3] float64: shift, scale, add.
    """
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    n = values.numel()
    if n:
        with torch.cuda.device_of(values):
            _normalize_kernel[(triton.cdiv(n, _BLOCK),)](
                values.contiguous(), mask.contiguous(), numbers, out, n, BLOCK=_BLOCK, num_warps=4
            )
    return out


@triton.jit
def _parts_kernel(values, mask, parts, n, blocks_each, n_parts, BLOCK: tl.constexpr):
    """Each block's mean and squares, exact in registers, merged as in Chan, Golub and LeVeque (1983)."""
    part = tl.program_id(0)
    count = tl.full((), 0.0, tl.float64)
    mean = tl.full((), 0.0, tl.float64)
    squares = tl.full((), 0.0, tl.float64)
    for block in range(0, blocks_each):
        at = (part.to(tl.int64) * blocks_each + block) * BLOCK + tl.arange(0, BLOCK)
        keep = tl.load(mask + at, mask=at < n, other=False)
        x = tl.where(keep, to_float64(tl.load(values + at, mask=at < n, other=0.0)), 0.0)
        block_count = tl.sum(keep.to(tl.float64))
        block_mean = tl.sum(x) / tl.maximum(block_count, 1.0)
        deviation = tl.where(keep, x - block_mean, 0.0)
        delta = block_mean - mean
        share = block_count / tl.maximum(count + block_count, 1.0)
        squares += tl.sum(deviation * deviation) + delta * delta * count * share
        mean += delta * share
        count += block_count
    tl.store(parts + part, count)
    tl.store(parts + n_parts + part, mean)
    tl.store(parts + 2 * n_parts + part, squares)


@triton.jit
def _merge_kernel(parts, moments, n_parts, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    inside = lane < n_parts
    counts = tl.load(parts + lane, mask=inside, other=0.0)
    means = tl.load(parts + n_parts + lane, mask=inside, other=0.0)
    squares = tl.load(parts + 2 * n_parts + lane, mask=inside, other=0.0)
    count = tl.sum(counts)
    mean = tl.sum(counts * means) / tl.maximum(count, 1.0)
    deviations = means - mean
    tl.store(moments, count)
    tl.store(moments + 1, mean)
    tl.store(moments + 2, tl.sum(squares + counts * deviations * deviations))


@triton.jit
def _normalize_kernel(values, mask, numbers, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    keep = tl.load(mask + at, mask=inside, other=False)
    x = to_float64(tl.load(values + at, mask=inside, other=0.0))
    y = (x - tl.load(numbers)) * tl.load(numbers + 1) + tl.load(numbers + 2)
    store(out + at, tl.where(keep, y, 0.0), inside)
