"""REINFORCE++ (Hu 2025): no critic; returns, or scores less their group's mean, whitened over the batch."""

from collections.abc import Hashable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rolemesh.engine.algorithms.estimators import Advantages, register_estimator
from rolemesh.engine.algorithms.scores import compare_scores, over_tokens
from rolemesh.kernels import discounted_returns, masked_whiten


@register_estimator("reinforce_plus_plus")
def reinforce_plus_plus_advantage(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    gamma: float,
    group: dist.ProcessGroup | None = None,
    **_: object,
) -> Advantages:
    """verl's `compute_reinforce_plus_plus_outcome_advantage`: discounted returns, whitened over all tokens.

    Tokens outside of the mask are skipped, also in the middle of a response (tool turns), where verl starts
    anew. Returns are not whitened. Whitening is over all ranks of `group`.
    """
    returns = discounted_returns(token_level_rewards, response_mask, gamma)
    return Advantages(masked_whiten(returns, response_mask, group=group), returns)


@register_estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline_advantage(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable] | np.ndarray | None,
    group: dist.ProcessGroup | None = None,
    **_: object,
) -> Advantages:
    """verl's `compute_reinforce_plus_plus_baseline_outcome_advantage`: score - group mean, whitened over all
    response tokens of all ranks.

    A group of one keeps its score before whitening. Returns equal the advantages. Metrics count the groups as
    `grpo`'s do. ValueError as there.
    """
    scores, statistics, metrics = compare_scores(
        "reinforce_plus_plus_baseline", token_level_rewards, response_mask, index, group
    )
    centred = scores - torch.where(statistics.count > 1, statistics.mean, 0.0)
    column = over_tokens(centred, response_mask, token_level_rewards.dtype)
    column = masked_whiten(column, response_mask, group=group)
    return Advantages(column, column, metrics)
