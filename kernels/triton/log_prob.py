"""Softmax statistics of rows of logits, and the gradient through them, as Triton kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Exponents are held above this, where exp and exp2 are 0 in any type, so that 0 * log(0) is 0, not NaN.
ZERO = tl.constexpr(-2000.0)


def log_prob_stats(
    logits: Tensor, labels: Tensor, stats: Tensor, inv_temperature: float, entropy: bool
) -> None:
    """Take the tile `logits` [n, v] into `stats` [4, n], in place: max, sum, sum of x * exp, label's logit.

    Every row is read once. `labels` count from the tile's first column; others are not here.
    """
    n, v = logits.shape
    if n == 0 or v == 0:
        return
    assert logits.stride(1) == 1 or v == 1
    # 16 elements a thread, and few enough registers (float64 takes two each) for several programs on an SM.
    block = min(4096 if stats.dtype == torch.float32 else 2048, max(triton.next_power_of_2(v), 256))
    with torch.cuda.device_of(logits):
        _stats_kernel[(n,)](
            logits,
            logits.stride(0),
            labels.contiguous(),
            stats,
            stats.stride(0),
            v,
            inv_temperature,
            ENTROPY=entropy,
            BLOCK=block,
            num_warps=8 if block >= 2048 else 4,
        )


def log_prob_backward(
    logits: Tensor, labels: Tensor, numbers: Tensor, inv_temperature: float, entropy: bool, out: Tensor
) -> None:
    """Write d loss / d logits [n, v] to `out`, which may be the memory of `logits`.

    `numbers` [5, n]: max, log of the sum, entropy, gradient of the log-probability, gradient of the entropy.
    """
    n, v = logits.shape
    if n == 0 or v == 0:
        return
    assert v == 1 or (logits.stride(1) == 1 and out.stride(1) == 1)
    block = min(4096 if numbers.dtype == torch.float32 else 2048, max(triton.next_power_of_2(v), 256))
    with torch.cuda.device_of(logits):
        _backward_kernel[(n * triton.cdiv(v, block),)](
            logits,
            logits.stride(0),
            labels.contiguous(),
            numbers,
            numbers.stride(0),
            out,
            out.stride(0),
            v,
            inv_temperature,
            ENTROPY=entropy,
            BLOCK=block,
            num_warps=8 if block >= 2048 else 4,
        )


@triton.jit
def _stats_kernel(
    logits,
    logits_stride,
    labels,
    stats,
    stats_stride,
    v,
    inv_temperature: tl.float64,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row. Sums stay apart in BLOCK lanes until the end; only the maximum is shared before."""
    accumulate: tl.constexpr = stats.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    stats += row
    scale = (tl.full((), inv_temperature, tl.float64) * LOG2E).to(accumulate)  # to powers of 2
    columns = tl.arange(0, BLOCK)

    first_max = tl.load(stats)
    row_max = first_max
    sums = tl.full([BLOCK], 0.0, accumulate)
    products = tl.full([BLOCK], 0.0, accumulate)  # of exp2 and its exponent
    whole = v // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        x = tl.load(logits + start + columns, eviction_policy="evict_first").to(accumulate)
        row_max, sums, products = _add_columns(x, row_max, sums, products, scale, ENTROPY)
    if whole < v:
        inside = columns < v - whole
        x = tl.load(logits + whole + columns, mask=inside, other=-float("inf")).to(accumulate)
        row_max, sums, products = _add_columns(x, row_max, sums, products, scale, ENTROPY)

    # What earlier tiles left, brought to the new maximum.
    moved = _move(first_max, row_max, scale)
    factor = tl.exp2(moved)
    first_sum = tl.load(stats + stats_stride)
    tl.store(stats, row_max)
    tl.store(stats + stats_stride, first_sum * factor + tl.sum(sums))
    if ENTROPY:
        first_product = tl.load(stats + 2 * stats_stride)
        first_product = (first_product + first_sum * moved * LN2) * factor
        tl.store(stats + 2 * stats_stride, first_product + tl.sum(products) * LN2)

    label = tl.load(labels + row)
    here = (label >= 0) & (label < v)
    at_label = tl.load(logits + tl.where(here, label, 0), mask=here, other=0.0).to(accumulate)
    tl.store(stats + 3 * stats_stride, tl.load(stats + 3 * stats_stride) + at_label)


@triton.jit
def _add_columns(x, row_max, sums, products, scale, ENTROPY: tl.constexpr):
    # tl.max may drop a NaN or return it; tl.maximum drops it. The sum keeps it.
    new_max = tl.maximum(row_max, tl.max(x))
    if new_max > row_max:
        moved = _move(row_max, new_max, scale)
        factor = tl.exp2(moved)
        if ENTROPY:
            products = (products + sums * moved) * factor
        sums = sums * factor
    exponent = (x - _finite(new_max)) * scale  # first the difference, which is exact near the maximum
    if ENTROPY:
        exponent = tl.maximum(exponent, ZERO, propagate_nan=tl.PropagateNan.ALL)
    exp = tl.exp2(exponent)
    if ENTROPY:
        products += exp * exponent
    return new_max, sums + exp, products


@triton.jit
def _move(old_max, new_max, scale):
    """What the exponents change by, in powers of 2: finite also from -inf, where the sums are 0 anyway."""
    return tl.maximum((old_max - _finite(new_max)) * scale, ZERO, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _finite(row_max):
    """0 for -inf: -inf less -inf would be NaN, but nothing was seen and all exponentials are to be 0."""
    return tl.where(row_max == -float("inf"), 0.0, row_max)


@triton.jit
def _backward_kernel(
    logits,
    logits_stride,
    labels,
    numbers,
    numbers_stride,
    out,
    out_stride,
    v,
    inv_temperature: tl.float64,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a block of a row; a one-dimensional grid, as others end at 65,535."""
    accumulate: tl.constexpr = numbers.dtype.element_ty
    n_blocks = tl.cdiv(v, BLOCK)
    row = (tl.program_id(0) // n_blocks).to(tl.int64)
    columns = tl.program_id(0) % n_blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < v
    scale = tl.full((), inv_temperature, tl.float64).to(accumulate)
    numbers += row
    row_max = tl.load(numbers)
    log_sum = tl.load(numbers + numbers_stride)
    weight = tl.load(numbers + 3 * numbers_stride)
    label = tl.load(labels + row)

    x = tl.load(logits + row * logits_stride + columns, mask=inside, other=0.0).to(accumulate)
    log_p = (x - row_max) * scale - log_sum
    if ENTROPY:
        log_p = tl.maximum(log_p, ZERO, propagate_nan=tl.PropagateNan.ALL)
    p = tl.exp2(log_p * LOG2E)
    grad = weight * (tl.where(columns == label, 1.0, 0.0) - p)
    if ENTROPY:
        entropy = tl.load(numbers + 2 * numbers_stride)
        grad -= tl.load(numbers + 4 * numbers_stride) * p * (log_p + entropy)
    result = (grad * scale).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + columns, result, mask=inside)
