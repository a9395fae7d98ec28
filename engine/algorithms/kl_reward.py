"""KL to the reference model as a part of the reward, and how its weight follows a target."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from rolemesh.kernels import kl, masked_mean


def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    *,
    kl_coef: float,
    kind: str = "kl",
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, float]:
    """Scores less `kl_coef` times the KL estimate `kind`: all [b, R], 0 outside of the mask.

    Returns `token_level_rewards` and, for the metric and an adaptive weight, the mean over sequences of their
    mean KL per token, in nats as `kind` estimates them: over all ranks of `group`, and over the sequences
    that have a response (verl counts the others as 0).
    """
    keep = response_mask.bool()
    token_kl = torch.where(keep, kl(old_log_probs, ref_log_prob, kind), 0.0)
    rewards = torch.where(keep, token_level_scores - kl_coef * token_kl, 0.0)
    sequence_kl = token_kl.sum(dim=1) / keep.sum(dim=1).clamp(min=1)
    return rewards, masked_mean(sequence_kl, keep.any(dim=1), group=group).item()


@dataclass(frozen=True)
class FixedKLController:
    """A KL weight that stays at `value`."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> "FixedKLController":
        """The controller for the next step: this one."""
        return self


@dataclass(frozen=True)
class AdaptiveKLController:
    """A KL weight `value` that rises while the KL is above `target` and falls below (Ziegler et al. 2019,
    2.2).

    `horizon` is in samples: the larger, the slower. ValueError when target or horizon is not above 0.
    """

    value: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(f"target is {self.target} and horizon is {self.horizon}, both must be above 0")

    def update(self, current_kl: float, n_steps: int) -> "AdaptiveKLController":
        """The controller for the next step, after `n_steps` samples with a mean KL of `current_kl`."""
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        return replace(self, value=self.value * (1 + error * n_steps / self.horizon))
