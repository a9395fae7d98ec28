"""Clipped policy and value losses of PPO, and their means over a mini-batch that is spread over ranks.

A mini-batch is cut into micro-batches and over dp ranks. Each part's loss and metrics are divided by the
*mini-batch's* numbers of tokens or sequences (`loss_denominators`), so the plain sum over all parts is the
mini-batch's mean, however it is cut. All take masks that are bool, integer or float; what lies outside of the
mask (NaN, inf) reaches no loss, metric or gradient.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


@dataclass(frozen=True)
class LossDenominators:
    """What a mini-batch's sums are divided by; at least 1, so a mini-batch of nothing has loss 0."""

    loss: float  # tokens or sequences, as the aggregation mode says
    tokens: float


def loss_denominators(
    response_mask: Tensor, mode: str, group: dist.ProcessGroup | None = None
) -> LossDenominators:
    """Count what the mode divides by in a whole mini-batch: its tokens, or its sequences that have a token.

    `response_mask` [b, R] is this rank's part. With `group` (the dp ranks) all of them call, also those
    without rows. ValueError for an unknown mode.
    """
    _check_mode(mode)
    mask = response_mask.bool()
    counts = torch.stack([mask.sum(), mask.any(dim=1).sum()]).double()
    if group is not None:
        dist.all_reduce(counts, group=group)
    tokens, sequences = counts.clamp(min=1).tolist()
    return LossDenominators(loss=tokens if mode == "token-mean" else sequences, tokens=tokens)


def aggregate(loss_mat: Tensor, mask: Tensor, mode: str, denominators: LossDenominators) -> Tensor:
    """This part's share of the mini-batch's mean of `loss_mat` [m, R], a scalar; see verl's `agg_loss`.

    `token-mean`: over all tokens. `seq-mean-token-sum`: over the sequences' sums. `seq-mean-token-mean`: over
    the sequences' means. ValueError for an unknown mode.
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
        old_log_prob, log_prob, advantages, mask: [m, R]; the loss is differentiable in `log_prob`. The log
            ratio is clamped to +-20.
        denominators: of the whole mini-batch, for the mode `loss_agg`.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: where the advantage is negative, the loss is at most -advantage * dual_clip. None: no
            bound.

    Returns:
        The loss and detached scalars in verl's meaning, each this part's share of the mean over the
        mini-batch's tokens: `pg_clipfrac` (ratio clipped), `pg_clipfrac_lower` (dual clip active), `ppo_kl`
        (k1 estimate of KL(old || new)).

    Raises:
        ValueError: `dual_clip` is not above 1, or the mode is unknown.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(
            f"dual_clip is {dual_clip}, must be above 1 (verl's default is 3.0), or None for none"
        )
    keep = mask.bool()
    log_ratio = torch.where(keep, log_prob - old_log_prob, 0.0).clamp(-20, 20)
    advantages = torch.where(keep, advantages, 0.0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss_mat = torch.maximum(unclipped, clipped)
    lower = torch.zeros_like(keep)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        lower = (advantages < 0) & (loss_mat > bound)
        loss_mat = torch.where(advantages < 0, torch.minimum(loss_mat, bound), loss_mat)
    stats = {
        "pg_clipfrac": _token_mean(clipped > unclipped, keep, denominators),
        "pg_clipfrac_lower": _token_mean(lower, keep, denominators),
        "ppo_kl": _token_mean(-log_ratio, keep, denominators),
    }
    return aggregate(loss_mat, keep, loss_agg, denominators), stats


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

    `values` (differentiable), `returns`, `old_values` and `mask` are [m, R]; `denominators` are the whole
    mini-batch's, for the mode `loss_agg`. Returns the loss and detached scalars in verl's meaning, each this
    part's share of the mean over the mini-batch's tokens: `vf_clipfrac` (clipped error is the larger),
    `vpred_mean`.
    """
    keep = mask.bool()
    error = torch.where(keep, values - returns, 0.0)
    clipped_values = torch.clamp(values, old_values - value_clip, old_values + value_clip)
    clipped_error = torch.where(keep, clipped_values - returns, 0.0)
    loss_mat = 0.5 * torch.maximum(error.square(), clipped_error.square())
    stats = {
        "vf_clipfrac": _token_mean(clipped_error.square() > error.square(), keep, denominators),
        "vpred_mean": _token_mean(values, keep, denominators),
    }
    return aggregate(loss_mat, keep, loss_agg, denominators), stats


def _token_mean(values: Tensor, keep: Tensor, denominators: LossDenominators) -> Tensor:
    return torch.where(keep, values.detach(), 0).double().sum() / denominators.tokens


def _check_mode(mode: str) -> None:
    if mode not in LOSS_AGG_MODES:
        raise ValueError(f"unknown loss aggregation {mode!r}; there are {', '.join(LOSS_AGG_MODES)}")
