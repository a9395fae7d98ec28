"""KL estimates, and the policy and value losses with their gradients, as Triton kernels.

Arithmetic is float64 throughout: these tensors are a vocabulary smaller than the logits, so that memory and
launches decide the time, and k3 = e^r - r - 1 would lose its digits for small r.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rolemesh.kernels.triton.convert import store, to_float64

_BLOCK = 512


def kl(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """The estimate `kind` (`k1`, `abs`, `k2`, `k3`) for each of the tokens, in the promoted dtype."""
    dtype = torch.promote_types(log_prob.dtype, ref_log_prob.dtype)
    return _each_token(None, log_prob, ref_log_prob, kind, dtype)


def kl_backward(grad: Tensor, log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """`grad` times the estimate's derivative in `log_prob`, in its dtype; 0 where k3 is clamped."""
    return _each_token(grad, log_prob, ref_log_prob, kind, log_prob.dtype)


def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    mode: str,
    loss_denominator: float,
    token_denominator: float,
) -> tuple[Tensor, Tensor]:
    """Sums [4] float64 (loss, clipfrac, clipfrac_lower, ppo_kl) and d loss / d log_prob [m, R]."""
    m, n_steps = log_prob.shape
    sums = torch.zeros(4, m, dtype=torch.float64, device=log_prob.device)  # by row: no atomics
    grad = torch.empty(log_prob.shape, dtype=log_prob.dtype, device=log_prob.device)
    if m:
        with torch.cuda.device_of(log_prob):
            _policy_kernel[(m,)](
                old_log_prob.contiguous(),
                log_prob.contiguous(),
                advantages.contiguous(),
                mask.contiguous(),
                sums,
                grad,
                m,
                n_steps,
                clip_low,
                clip_high,
                dual_clip,
                loss_denominator,
                token_denominator,
                ROW_MEAN=mode == "seq-mean-token-mean",
                BLOCK=_BLOCK,
                num_warps=4,
            )
    return sums.sum(dim=1), grad


def value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor,
    mask: Tensor,
    value_clip: float,
    mode: str,
    loss_denominator: float,
    token_denominator: float,
) -> tuple[Tensor, Tensor]:
    """Sums [3] float64 (loss, clipfrac, vpred_mean) and d loss / d values [m, R]."""
    m, n_steps = values.shape
    sums = torch.zeros(3, m, dtype=torch.float64, device=values.device)
    grad = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    if m:
        with torch.cuda.device_of(values):
            _value_kernel[(m,)](
                values.contiguous(),
                returns.contiguous(),
                old_values.contiguous(),
                mask.contiguous(),
                sums,
                grad,
                m,
                n_steps,
                value_clip,
                loss_denominator,
                token_denominator,
                ROW_MEAN=mode == "seq-mean-token-mean",
                BLOCK=_BLOCK,
                num_warps=4,
            )
    return sums.sum(dim=1), grad


def _each_token(
    grad: Tensor | None, log_prob: Tensor, ref_log_prob: Tensor, kind: str, dtype: torch.dtype
) -> Tensor:
    out = torch.empty(log_prob.shape, dtype=dtype, device=log_prob.device)
    n = out.numel()
    if n:
        with torch.cuda.device_of(log_prob):
            _kl_kernel[(triton.cdiv(n, _BLOCK),)](
                None if grad is None else grad.contiguous(),
                log_prob.contiguous(),
                ref_log_prob.contiguous(),
                out,
                n,
                KIND=kind,
                BLOCK=_BLOCK,
                num_warps=4,
            )
    return out


@triton.jit
def _kl_kernel(grad, log_prob, ref_log_prob, out, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """The estimate, or with `grad` its gradient."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    left = to_float64(tl.load(log_prob + at, mask=inside, other=0.0))
    difference = left - to_float64(tl.load(ref_log_prob + at, mask=inside, other=0.0))
    if KIND == "k1":
        value = difference
        slope = tl.full([BLOCK], 1.0, tl.float64)
    elif KIND == "abs":
        value = tl.abs(difference)
        slope = tl.where(difference > 0, 1.0, tl.where(difference < 0, -1.0, difference))  # keeps 0 and NaN
    elif KIND == "k2":
        value = 0.5 * difference * difference
        slope = difference
    else:
        tl.static_assert(KIND == "k3")
        log_ratio = _clamp(-difference, -20.0, 20.0)
        raw = _exp_less_tangent(log_ratio)
        value = tl.minimum(raw, 10.0, propagate_nan=tl.PropagateNan.ALL)
        slope = tl.where((raw > 10.0) | (difference > 20.0), 0.0, -(raw + log_ratio))
    if grad is not None:
        gradient = to_float64(tl.load(grad + at, mask=inside, other=0.0))
        value = tl.where(gradient == 0.0, 0.0, gradient * slope)  # a masked token's NaN stays out
    store(out + at, value, inside)


@triton.jit
def _exp_less_tangent(r):
    """e^r - r - 1: near 0 by its series, as the difference loses its digits there."""
    series = 1.0 + r * (1 / 6) * (1.0 + r * (1 / 7) * (1.0 + r * (1 / 8) * (1.0 + r * (1 / 9))))
    series = 1.0 + r * (1 / 3) * (1.0 + r * (1 / 4) * (1.0 + r * (1 / 5) * series))
    return tl.where(tl.abs(r) < 0.1, 0.5 * r * r * series, tl.exp(r) - r - 1.0)


@triton.jit
def _clamp(x, low, high):
    """`x` held between the bounds; NaN stays, also a bound's. Triton's own does not compile for float64."""
    x = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _load_kept(at, keep, inside):
    """float64, 0 outside of `keep`. Loads depend on `inside` only, so that they are wide and do not wait."""
    return tl.where(keep, tl.load(at, mask=inside, other=0.0).to(tl.float64), 0.0)


@triton.jit
def _token_weight(mask, n_steps, denominator, ROW_MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """What a kept token of the row counts in the loss; `mask` points to the row."""
    divisor = tl.full((), denominator, tl.float64)
    if ROW_MEAN:
        counts = tl.full([BLOCK], 0.0, tl.float64)
        for start in range(0, n_steps, BLOCK):
            t = start + tl.arange(0, BLOCK)
            counts += tl.load(mask + t, mask=t < n_steps, other=False).to(tl.float64)
        divisor *= tl.maximum(tl.sum(counts), 1.0)
    return 1.0 / divisor


@triton.jit
def _policy_kernel(
    old_log_prob,
    log_prob,
    advantages,
    mask,
    sums,
    grad,
    m,
    n_steps,
    clip_low: tl.float64,
    clip_high: tl.float64,
    dual_clip: tl.float64,
    loss_denominator: tl.float64,
    token_denominator: tl.float64,
    ROW_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    low = 1.0 - tl.full((), clip_low, tl.float64)
    high = 1.0 + tl.full((), clip_high, tl.float64)
    dual_clip = tl.full((), dual_clip, tl.float64)
    per_token = 1.0 / tl.full((), token_denominator, tl.float64)
    row = tl.program_id(0)
    first = row.to(tl.int64) * n_steps
    weight = _token_weight(mask + first, n_steps, loss_denominator, ROW_MEAN, BLOCK)
    losses = tl.full([BLOCK], 0.0, tl.float64)
    n_clipped = tl.full([BLOCK], 0.0, tl.float64)
    n_lower = tl.full([BLOCK], 0.0, tl.float64)
    log_ratios = tl.full([BLOCK], 0.0, tl.float64)
    for start in range(0, n_steps, BLOCK):
        t = start + tl.arange(0, BLOCK)
        at = first + t
        keep = tl.load(mask + at, mask=t < n_steps, other=False)
        difference = _load_kept(log_prob + at, keep, t < n_steps)
        difference -= _load_kept(old_log_prob + at, keep, t < n_steps)
        advantage = _load_kept(advantages + at, keep, t < n_steps)
        log_ratio = _clamp(difference, -20.0, 20.0)
        ratio = tl.exp(log_ratio)
        unclipped = -advantage * ratio
        clipped = -advantage * _clamp(ratio, low, high)
        loss = tl.maximum(unclipped, clipped, propagate_nan=tl.PropagateNan.ALL)
        # Where the clipped loss wins it is constant; elsewhere the derivative in log_prob is the loss itself.
        constant = (unclipped < clipped) | (tl.abs(difference) > 20.0)
        bound = -advantage * dual_clip
        lower = (advantage < 0.0) & (loss > bound)
        losses += tl.where(keep, tl.where(lower, bound, loss), 0.0)
        n_clipped += (keep & (clipped > unclipped)).to(tl.float64)
        n_lower += (keep & lower).to(tl.float64)
        log_ratios += tl.where(keep, log_ratio, 0.0)
        slope = tl.where(constant | lower, 0.0, unclipped * weight)
        slope = tl.where((advantage < 0.0) & (loss == bound), 0.5 * slope, slope)  # as autograd has ties
        slope = tl.where(keep, slope, 0.0)
        tl.store(grad + at, slope.to(grad.dtype.element_ty), mask=t < n_steps)
    tl.store(sums + row, tl.sum(losses) * weight)
    tl.store(sums + m + row, tl.sum(n_clipped) * per_token)
    tl.store(sums + 2 * m + row, tl.sum(n_lower) * per_token)
    tl.store(sums + 3 * m + row, -tl.sum(log_ratios) * per_token)


@triton.jit
def _value_kernel(
    values,
    returns,
    old_values,
    mask,
    sums,
    grad,
    m,
    n_steps,
    value_clip: tl.float64,
    loss_denominator: tl.float64,
    token_denominator: tl.float64,
    ROW_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    value_clip = tl.full((), value_clip, tl.float64)
    per_token = 1.0 / tl.full((), token_denominator, tl.float64)
    row = tl.program_id(0)
    first = row.to(tl.int64) * n_steps
    weight = _token_weight(mask + first, n_steps, loss_denominator, ROW_MEAN, BLOCK)
    losses = tl.full([BLOCK], 0.0, tl.float64)
    n_clipped = tl.full([BLOCK], 0.0, tl.float64)
    predictions = tl.full([BLOCK], 0.0, tl.float64)
    for start in range(0, n_steps, BLOCK):
        t = start + tl.arange(0, BLOCK)
        at = first + t
        keep = tl.load(mask + at, mask=t < n_steps, other=False)
        value = _load_kept(values + at, keep, t < n_steps)
        target = _load_kept(returns + at, keep, t < n_steps)
        old_value = _load_kept(old_values + at, keep, t < n_steps)
        error = value - target
        limited = _clamp(value, old_value - value_clip, old_value + value_clip)
        clipped_error = limited - target
        square = error * error
        clipped_square = clipped_error * clipped_error
        loss = 0.5 * tl.maximum(square, clipped_square, propagate_nan=tl.PropagateNan.ALL)
        clipped = clipped_square > square  # then the clipped value is a bound, which is constant
        losses += tl.where(keep, loss, 0.0)
        n_clipped += (keep & clipped).to(tl.float64)
        predictions += value
        slope = tl.where(clipped, 0.0, error * weight)
        slope = tl.where(
            (clipped_square == square) & (limited != value), 0.5 * slope, slope
        )  # autograd's ties
        slope = tl.where(keep, slope, 0.0)
        tl.store(grad + at, slope.to(grad.dtype.element_ty), mask=t < n_steps)
    tl.store(sums + row, tl.sum(losses) * weight)
    tl.store(sums + m + row, tl.sum(n_clipped) * per_token)
    tl.store(sums + 2 * m + row, tl.sum(predictions) * per_token)
