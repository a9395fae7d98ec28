"""Rollout against trainer: how far the engine's log-probs are from the trainer's, and weights against it.

The rollout engine samples with other kernels, another type or older weights than the trainer scores with, so
the samples come from another policy. With r = exp(old_log_probs - rollout_log_probs) per token, a token's
advantage is multiplied by a weight: truncated importance sampling (Yao et al. 2025), 0 where the token's r is
out of bounds (IcePop, Ling team 2025), 0 where the whole sequence's is. A weight of 0 takes the token's
gradient; the token stays in the loss's denominators, as in the IcePop paper (verl takes it out).
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rolemesh.kernels import kl, masked_mean

Bounds = tuple[float, float]


@dataclass(frozen=True)
class Correction:
    """What is done about the difference.

    Attributes:
        weights: "token": each token's r; "sequence": the product of its sequence's; "none": 1.
        max_weight: weights are truncated here.
        mask: a token whose r lies outside of these bounds gets weight 0.
        reject: a sequence whose ratio lies outside of these bounds gets weight 0, all of it.
        reject_by: the sequence's ratio is the "product" of its tokens' r, or their geometric "mean".

    Raises ValueError for bounds that no ratio can meet, and for a `max_weight` not above 0.
    """

    weights: Literal["none", "token", "sequence"] = "none"
    max_weight: float = 2.0
    mask: Bounds | None = None
    reject: Bounds | None = None
    reject_by: Literal["product", "mean"] = "product"

    def __post_init__(self) -> None:
        if not self.max_weight > 0:
            raise ValueError(f"max_weight is {self.max_weight}, must be above 0")
        for name in ("mask", "reject"):
            bounds = getattr(self, name)
            if bounds is not None and not (len(bounds) == 2 and 0 <= bounds[0] < bounds[1]):
                raise ValueError(f"{name} is {[*bounds]}, must be two numbers, 0 <= low < high")

    @property
    def is_off(self) -> bool:
        """Whether every weight is 1."""
        return self.weights == "none" and self.mask is None and self.reject is None


@dataclass(frozen=True)
class Weights:
    """Of each token [b, R]: `weights` fp32, 0 outside of the response and where rejected; `cut`: truncated at
    `max_weight`; `rejected`: set to 0.
    """

    weights: Tensor
    cut: Tensor
    rejected: Tensor


def correct(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, correction: Correction
) -> Weights:
    """Weights of the tokens [b, R]. Each row's come from that row alone; log ratios are clamped to +-20."""
    mask = response_mask.bool()
    token, total, mean = _log_ratios(old_log_probs, rollout_log_probs, mask)
    cap = correction.max_weight
    if correction.weights == "none":
        weights, cap = torch.ones_like(token), 1.0
    else:
        weights = _exp(token if correction.weights == "token" else total.expand_as(token))
    cut = mask & (weights > cap)
    rejected = torch.zeros_like(mask)
    if correction.mask is not None:
        rejected |= _outside(token, correction.mask)
    if correction.reject is not None:
        rejected |= _outside(total if correction.reject_by == "product" else mean, correction.reject)
    weights = torch.where(mask & ~rejected, weights.clamp(max=cap), 0.0)
    return Weights(weights.float(), cut, rejected & mask)


def correction_metrics(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    weights: Weights | None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """verl's `rollout_corr/...` over the rows of all ranks of `group`; with `weights` how they came out.

    `kl` and `k3_kl` estimate KL(rollout || trainer) per token, `chi2_*` their chi-square divergence from mean
    squared ratios, `*_ppl` are perplexities, `rollout_is_*` describe the weights, `rollout_rs_*` the shares
    of tokens and sequences that were rejected.
    """
    mask = response_mask.bool()
    rows = mask.any(dim=1)
    old, rollout = (torch.where(mask, x.double(), 0.0) for x in (old_log_probs, rollout_log_probs))
    token, total, _ = _log_ratios(old, rollout, mask)
    lengths = mask.sum(dim=1).clamp(min=1)
    tokens = {
        "kl": kl(rollout, old, "k1"),
        "k3_kl": kl(rollout, old, "k3"),
        "chi2_token": _exp(2 * token) - 1,
    }
    sequences = {
        "chi2_seq": _exp(2 * total[:, 0]) - 1,
        "training_ppl": (-old.sum(dim=1) / lengths).exp(),
        "rollout_ppl": (-rollout.sum(dim=1) / lengths).exp(),
    }
    if weights is not None:
        tokens |= {
            "rollout_is_mean": weights.weights,
            "squares": weights.weights.double().square(),
            "rollout_is_ratio_fraction_high": weights.cut.double(),
            "rollout_rs_masked_fraction": weights.rejected.double(),
        }
        sequences["rollout_rs_seq_masked_fraction"] = weights.rejected.any(dim=1).double()
    means = {name: masked_mean(x, mask, group=group).item() for name, x in tokens.items()}
    means |= {name: masked_mean(x, rows, group=group).item() for name, x in sequences.items()}
    if weights is not None:
        squares, mean = means.pop("squares"), means["rollout_is_mean"]
        means["rollout_is_eff_sample_size"] = mean**2 / squares if squares else 0.0
        means["rollout_is_max"] = _maximum(weights.weights, group)
    return {f"rollout_corr/{name}": value for name, value in means.items()}


def _log_ratios(old: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token [b, R], and each sequence's sum and mean [b, 1]; float64, 0 outside of the mask."""
    token = torch.where(mask, old.double() - rollout.double(), 0.0)
    total = token.sum(dim=1, keepdim=True)
    return token, total, total / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-20, 20).exp()


def _outside(log_ratio: Tensor, bounds: Bounds) -> Tensor:
    ratio = _exp(log_ratio)
    return ~((ratio >= bounds[0]) & (ratio <= bounds[1]))  # NaN is outside


def _maximum(values: Tensor, group: dist.ProcessGroup | None) -> float:
    largest = values.max() if values.numel() else values.new_zeros(())
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.item()
