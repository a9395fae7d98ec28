"""GRPO's advantages (Shao et al. 2024): each sample's score against the other samples of its prompt."""

from collections.abc import Hashable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rolemesh.engine.algorithms.estimators import Advantages, register_estimator
from rolemesh.engine.algorithms.scores import compare_scores, over_tokens


@register_estimator("grpo")
def grpo_outcome_advantage(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable] | np.ndarray | None,
    norm_adv_by_std: bool = True,
    epsilon: float = 1e-6,
    group: dist.ProcessGroup | None = None,
    **_: object,
) -> Advantages:
    """verl's `compute_grpo_outcome_advantage`: (score - mean) / (std + epsilon) on every response token.

    A row's score is the sum of its rewards under the mask; mean and unbiased std are over the rows with its
    `index` on all ranks of `group`, in float64. A group of equal scores has advantage 0. A group of one has
    no one to compare with and keeps its score (mean 0, std 1), as in verl. Returns equal the advantages.
    Without `norm_adv_by_std` nothing is divided (Dr. GRPO, Liu et al. 2025).

    Metrics: `grpo/groups`, and how many are `grpo/zero_variance_groups` (several rows, all scores equal: they
    teach nothing) or `grpo/single_row_groups`. ValueError when there is no `index`, or not one for each row.
    """
    scores, statistics, metrics = compare_scores("grpo", token_level_rewards, response_mask, index, group)
    several = statistics.count > 1
    advantages = scores - torch.where(several, statistics.mean, 0.0)
    if norm_adv_by_std:
        advantages = advantages / (torch.where(several, statistics.std, 1.0) + epsilon)
    column = over_tokens(advantages, response_mask, token_level_rewards.dtype)
    return Advantages(column, column, metrics)
