"""Clipped policy and value losses of PPO, and their means over a mini-batch that is spread over ranks.

A mini-batch is cut into micro-batches and over dp ranks. Each part's loss and metrics are divided by the
*mini-batch's* numbers of tokens or sequences (`loss_denominators`), so the plain sum over all parts is the
mini-batch's mean, however it is cut. All take masks that are bool, integer or float; what lies outside of the
mask (NaN, inf) reaches no loss, metric or gradient; inside, NaN stays visible in the loss and the gradient.
Losses, their metrics and their gradients come from one pass over the inputs, in float64.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rolemesh.kernels.arrays import check_rows, mask_bytes, wide_dtype
from rolemesh.kernels.forms import Kernel
from rolemesh.kernels.library import torch_op

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class LossDenominators:
    """What a mini-batch's sums are divided by; at least 1, so a mini-batch of nothing has loss 0."""

    loss: float  # tokens, sequences or a constant, as the aggregation mode says
    tokens: float


def loss_denominators(
    response_mask: Tensor,
    mode: str,
    group: dist.ProcessGroup | None = None,
    *,
    norm_tokens: float | None = None,
) -> LossDenominators:
    """Count what the mode divides by in a whole mini-batch: its tokens, or its sequences that have a token.

    `response_mask` [b, R] is this rank's part. With `group` (the dp ranks) all of them call, also those
    without rows. `seq-mean-token-sum-norm` divides by the constant `norm_tokens`, R if it is None. ValueError
    for an unknown mode. The counts are Python numbers, so `torch.compile` must take them as arguments.
    """
    _check_mode(mode)
    mask = response_mask.bool()
    counts = torch.stack([mask.sum(), mask.any(dim=1).sum()]).double()
    if group is not None:
        dist.all_reduce(counts, group=group)
    tokens, sequences = counts.clamp(min=1).tolist()
    by_mode = {"token-mean": tokens, "seq-mean-token-sum-norm": norm_tokens or max(mask.shape[1], 1.0)}
    return LossDenominators(loss=by_mode.get(mode, sequences), tokens=tokens)


def aggregate(loss_mat: Tensor, mask: Tensor, mode: str, denominators: LossDenominators) -> Tensor:
    """This part's share of the mini-batch's mean of `loss_mat` [m, R], a scalar; see verl's `agg_loss`.

    `token-mean`: over all tokens. `seq-mean-token-sum`: over the sequences' sums. `seq-mean-token-mean`: over
    the sequences' means. `seq-mean-token-sum-norm` (Dr. GRPO): in spite of verl's name no mean over the
    sequences, but their sum divided by a constant. ValueError for an unknown mode.
    """
    _check_mode(mode)
    mask = mask.bool()
    per_sequence = torch.where(mask, loss_mat, 0.0).sum(dim=1)
    if mode == "seq-mean-token-mean":
        per_sequence = per_sequence / mask.sum(dim=1).clamp(min=1)
    return per_sequence.sum() / denominators.loss


def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    denominators: LossDenominators,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    loss_agg: str = "token-mean",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate loss (Schulman et al. 2017, eq. 7), with dual clip (Ye et al. 2020, eq. 5).

    Args:
        old_log_prob, log_prob, advantages, mask: [m, R]; the loss is differentiable in `log_prob`, once. The
            log ratio is clamped to +-20.
        denominators: of the whole mini-batch, for the mode `loss_agg`.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: where the advantage is negative, the loss is at most -advantage * dual_clip. None: no
            bound.

    Returns:
        The loss, float64 if an input is, else float32, and detached float64 scalars in verl's meaning, each
        this part's share of the mean over the mini-batch's tokens: `pg_clipfrac` (ratio clipped),
        `pg_clipfrac_lower` (dual clip active), `ppo_kl` (k1 estimate of KL(old || new)).

    Raises:
        ValueError: shapes differ, `dual_clip` is not above 1, or the mode is unknown.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(
            f"dual_clip is {dual_clip}, must be above 1 (verl's default is 3.0), or None for none"
        )
    _check_mode(loss_agg)
    check_rows("log-probabilities, advantages and mask", old_log_prob, log_prob, advantages, mask)
    sums, _ = _policy_loss(
        old_log_prob.detach(),
        log_prob,
        advantages.detach(),
        mask,
        clip_low,
        clip_high,
        math.inf if dual_clip is None else dual_clip,
        loss_agg,
        denominators.loss,
        denominators.tokens,
    )
    _, clipfrac, clipfrac_lower, ppo_kl = sums.detach().unbind()
    stats = {"pg_clipfrac": clipfrac, "pg_clipfrac_lower": clipfrac_lower, "ppo_kl": ppo_kl}
    return sums[0].to(wide_dtype(old_log_prob, log_prob, advantages)), stats


def value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor,
    mask: Tensor,
    *,
    denominators: LossDenominators,
    value_clip: float = 0.5,
    loss_agg: str = "token-mean",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the values, or of those clipped to `old_values` +- `value_clip` if larger.

    `values` (differentiable, once), `returns`, `old_values` and `mask` are [m, R]; `denominators` are the
    whole mini-batch's, for the mode `loss_agg`. Returns the loss, float64 if an input is, else float32, and
    detached float64 scalars in verl's meaning, each this part's share of the mean over the mini-batch's
    tokens: `vf_clipfrac` (clipped error is the larger), `vpred_mean`. ValueError when shapes differ or the
    mode is unknown.
    """
    _check_mode(loss_agg)
    check_rows("values, returns, old values and mask", values, returns, old_values, mask)
    sums, _ = _value_loss(
        values,
        returns.detach(),
        old_values.detach(),
        mask,
        value_clip,
        loss_agg,
        denominators.loss,
        denominators.tokens,
    )
    _, clipfrac, vpred_mean = sums.detach().unbind()
    stats = {"vf_clipfrac": clipfrac, "vpred_mean": vpred_mean}
    return sums[0].to(wide_dtype(values, returns, old_values)), stats


def _check_mode(mode: str) -> None:
    if mode not in LOSS_AGG_MODES:
        raise ValueError(f"unknown loss aggregation {mode!r}; there are {', '.join(LOSS_AGG_MODES)}")


def _to_common_dtype(*tensors: Tensor) -> list[Tensor]:
    dtype = wide_dtype(*tensors)
    return [tensor.to(dtype) for tensor in tensors]


def _empty_results(n_sums: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    first = tensors[0]
    sums = first.new_empty(n_sums, dtype=torch.float64)
    return sums, first.new_empty(first.shape, dtype=wide_dtype(*tensors))


# Both operations return their sums, loss first, and d loss / d input. Backward multiplies the latter.


def _saver(position: int) -> Callable[..., None]:
    """Set-up of an operation that returns the gradient of its argument at `position`."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])
        ctx.position, ctx.dtype, ctx.n_inputs = position, inputs[position].dtype, len(inputs)

    return save


def _backward(ctx: Any, to_sums: Tensor | None, to_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if to_grad is not None:
        raise RuntimeError("the policy and value losses can be differentiated once only")
    (grad,) = ctx.saved_tensors
    result: list[Tensor | None] = [None] * ctx.n_inputs
    if to_sums is not None:
        result[ctx.position] = (to_sums[0] * grad).to(ctx.dtype)
    return tuple(result)


def _fake_policy(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return _empty_results(4, old_log_prob, log_prob, advantages)


@torch_op(fake=_fake_policy, setup=_saver(1), backward=_backward)
def _policy_loss(
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
    tensors = _to_common_dtype(old_log_prob, log_prob, advantages)
    numbers = (clip_low, clip_high, dual_clip, mode, loss_denominator, token_denominator)
    return _policy_kernel(*tensors, mask.bool(), *numbers)


def _fake_value(values: Tensor, returns: Tensor, old_values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_results(3, values, returns, old_values)


@torch_op(fake=_fake_value, setup=_saver(0), backward=_backward)
def _value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor,
    mask: Tensor,
    value_clip: float,
    mode: str,
    loss_denominator: float,
    token_denominator: float,
) -> tuple[Tensor, Tensor]:
    tensors = _to_common_dtype(values, returns, old_values)
    return _value_kernel(*tensors, mask.bool(), value_clip, mode, loss_denominator, token_denominator)


def policy_loss_reference(
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
    """Sums [4] (loss, clipfrac, clipfrac_lower, ppo_kl) and d loss / d log_prob [m, R], by plain torch.

    Where two branches are equal the gradient is the mean of theirs, as autograd has it. That includes every
    token of a first update, where the ratio is 1: both branches have the same gradient there.
    """
    difference = torch.where(mask, log_prob.double() - old_log_prob.double(), 0.0)
    negative = -torch.where(mask, advantages.double(), 0.0)  # the slope of the loss in the ratio
    log_ratio = difference.clamp(-20, 20)
    ratio = log_ratio.exp()
    limited = ratio.clamp(1 - clip_low, 1 + clip_high)
    unclipped, clipped = negative * ratio, negative * limited
    loss, slope = _larger(unclipped, clipped, negative, torch.where(ratio == limited, negative, 0.0))
    bound = torch.where(negative > 0, negative * dual_clip, math.inf)
    lower = loss > bound
    slope = torch.where(loss == bound, slope / 2, slope).masked_fill(lower | (difference.abs() > 20), 0.0)
    sums = [_loss_sum(torch.where(lower, bound, loss), mask, mode, loss_denominator)]
    sums += [count.double().sum() / token_denominator for count in (clipped > unclipped, lower, -log_ratio)]
    grad = slope * ratio / _divisor(mask, mode, loss_denominator)
    return torch.stack(sums), grad.to(log_prob.dtype)


def value_loss_reference(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor,
    mask: Tensor,
    value_clip: float,
    mode: str,
    loss_denominator: float,
    token_denominator: float,
) -> tuple[Tensor, Tensor]:
    """Sums [3] (loss, clipfrac, vpred_mean) and d loss / d values [m, R], by plain torch; ties as above."""
    kept, target, old = (torch.where(mask, x.double(), 0.0) for x in (values, returns, old_values))
    limited = torch.clamp(kept, old - value_clip, old + value_clip)
    error, clipped_error = kept - target, limited - target
    square, clipped_square = error.square(), clipped_error.square()
    loss, slope = _larger(square, clipped_square, error, torch.where(kept == limited, clipped_error, 0.0))
    sums = [_loss_sum(0.5 * loss, mask, mode, loss_denominator)]
    sums += [total.double().sum() / token_denominator for total in (clipped_square > square, kept)]
    return torch.stack(sums), (slope / _divisor(mask, mode, loss_denominator)).to(values.dtype)


def _larger(left: Tensor, right: Tensor, left_slope: Tensor, right_slope: Tensor) -> tuple[Tensor, Tensor]:
    """Element by element the larger and its slope; where they are equal, the mean of both slopes."""
    tie = 0.5 * (left_slope + right_slope)
    slope = torch.where(left > right, left_slope, torch.where(left < right, right_slope, tie))
    return torch.maximum(left, right), slope


def _divisor(mask: Tensor, mode: str, denominator: float) -> Tensor | float:
    if mode != "seq-mean-token-mean":
        return denominator
    return mask.sum(dim=1, keepdim=True).clamp(min=1) * denominator


def _loss_sum(loss: Tensor, mask: Tensor, mode: str, denominator: float) -> Tensor:
    return (loss.sum(dim=1, keepdim=True) / _divisor(mask, mode, denominator)).sum()


def _policy_cpp(
    cpu: Any,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    mode: str,
    *denominators: float,
) -> tuple[Tensor, Tensor]:
    rows = [tensor.contiguous() for tensor in (old_log_prob, log_prob, advantages)]
    return _run(cpu.policy_loss, 4, rows, mask, (clip_low, clip_high, dual_clip), mode, denominators)


def _value_cpp(
    cpu: Any,
    values: Tensor,
    returns: Tensor,
    old_values: Tensor,
    mask: Tensor,
    value_clip: float,
    mode: str,
    *denominators: float,
) -> tuple[Tensor, Tensor]:
    rows = [tensor.contiguous() for tensor in (values, returns, old_values)]
    return _run(cpu.value_loss, 3, rows, mask, (value_clip,), mode, denominators)


def _run(
    function: Any,
    n_sums: int,
    rows: list[Tensor],
    mask: Tensor,
    clips: tuple[float, ...],
    mode: str,
    denominators: tuple[float, ...],
) -> tuple[Tensor, Tensor]:
    sums, grad = rows[0].new_empty(n_sums, dtype=torch.float64), torch.empty_like(rows[0])
    per_sequence = mode == "seq-mean-token-mean"
    function(
        *rows, mask_bytes(mask), *clips, per_sequence, *denominators, sums, grad, torch.get_num_threads()
    )
    return sums, grad


_policy_kernel = Kernel("policy_loss", reference=policy_loss_reference, cpp=_policy_cpp, triton="losses")
_value_kernel = Kernel("value_loss", reference=value_loss_reference, cpp=_value_cpp, triton="losses")
