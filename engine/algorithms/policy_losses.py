"""Policy losses by name, in verl's names: functions of a micro-batch's columns, registered here or by a user.

Each returns its part of the mini-batch's loss, a scalar that is differentiable in `log_prob`, and detached
scalars that describe it; both are divided by the *mini-batch's* `denominators`, so that plain sums over
micro-batches and ranks are the mini-batch's values. What lies outside of the mask reaches nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rolemesh.kernels import LossDenominators, aggregate, policy_loss

# Called with all of these by keyword; a loss names those it reads and takes the others as `**_`:
#   old_log_prob, log_prob, advantages, mask (all [m, R]), denominators, loss_agg (for `aggregate`),
#   clip_low, clip_high, dual_clip.
PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Tensor]]]

_LOSSES: dict[str, PolicyLossFn] = {}


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Make the decorated function the policy loss `name`. ValueError when the name is taken."""

    def register(loss: PolicyLossFn) -> PolicyLossFn:
        if name in _LOSSES:
            raise ValueError(f"policy loss {name!r} is in {_LOSSES[name].__module__} already")
        _LOSSES[name] = loss
        return loss

    return register


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The loss registered as `name`. ValueError lists those that exist."""
    if name not in _LOSSES:
        raise ValueError(f"unknown policy loss {name!r}; there are {', '.join(policy_loss_names())}")
    return _LOSSES[name]


def policy_loss_names() -> tuple[str, ...]:
    """Names of the policy losses there are."""
    return tuple(sorted(_LOSSES))


@register_policy_loss("vanilla")
def clipped_surrogate(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominators: LossDenominators,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    loss_agg: str = "token-mean",
    **_: object,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate with dual clip: see `rolemesh.kernels.policy_loss`."""
    return policy_loss(
        old_log_prob,
        log_prob,
        advantages,
        mask,
        denominators=denominators,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        loss_agg=loss_agg,
    )


@register_policy_loss("gspo")
def sequence_surrogate(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominators: LossDenominators,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    loss_agg: str = "seq-mean-token-mean",
    **_: object,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO (Zheng et al. 2025): the clipped surrogate of one ratio per sequence, exp of its mean log ratio.

    Every token of a sequence has that ratio and its own gradient (the paper's GSPO-token, equal to GSPO where
    a sequence has one advantage). The mean log ratio is bounded by 10, as in verl. ValueError for a
    `loss_agg` other than `seq-mean-token-mean`.
    """
    if loss_agg != "seq-mean-token-mean":
        raise ValueError(
            f"loss_agg is {loss_agg}, but gspo's loss is a mean over sequences: seq-mean-token-mean"
        )
    keep = mask.bool()
    difference = torch.where(keep, log_prob.detach() - old_log_prob, 0.0).double()
    mean = difference.sum(dim=1, keepdim=True) / keep.sum(dim=1, keepdim=True).clamp(min=1)
    # The value is the sequence's mean log ratio, the gradient each token's own.
    wide = log_prob.to(torch.promote_types(log_prob.dtype, torch.float32))
    log_ratio = (mean.to(wide.dtype) + (wide - wide.detach())).clamp(max=10)
    return policy_loss(
        torch.zeros_like(wide),
        log_ratio,
        advantages,
        mask,
        denominators=denominators,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=None,
        loss_agg=loss_agg,
    )


@register_policy_loss("cispo")
def clipped_weight_reinforce(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominators: LossDenominators,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    loss_agg: str = "token-mean",
    **_: object,
) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO (MiniMax-M1, 2025): REINFORCE weighted by the clipped ratio, so no token loses its gradient.

    The log ratio is clamped to +-20. `pg_clipfrac` is the share of tokens whose ratio was clipped.
    """
    keep = mask.bool()
    log_prob = torch.where(keep, log_prob.to(torch.promote_types(log_prob.dtype, torch.float32)), 0.0)
    log_ratio = (log_prob.detach() - torch.where(keep, old_log_prob, 0.0)).clamp(-20, 20)
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss_mat = -weight * torch.where(keep, advantages, 0.0) * log_prob
    sums = {"pg_clipfrac": (ratio != weight).double(), "ppo_kl": -log_ratio.double()}
    stats = {name: torch.where(keep, value, 0.0).sum() / denominators.tokens for name, value in sums.items()}
    stats["pg_clipfrac_lower"] = torch.zeros_like(stats["ppo_kl"])
    return aggregate(loss_mat, mask, loss_agg, denominators), stats
