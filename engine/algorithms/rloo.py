"""RLOO's advantages (Ahmadian et al. 2024): a sample's score less the mean of its prompt's others."""

from collections.abc import Hashable, Sequence

import numpy as np
import torch.distributed as dist
from torch import Tensor

from rolemesh.engine.algorithms.estimators import Advantages, register_estimator
from rolemesh.engine.algorithms.scores import compare_scores, over_tokens


@register_estimator("rloo")
def rloo_outcome_advantage(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable] | np.ndarray | None,
    group: dist.ProcessGroup | None = None,
    **_: object,
) -> Advantages:
    """verl's `compute_rloo_outcome_advantage`: score - mean of the others' scores, on every response token.

    Groups are the rows with one `index` on all ranks of `group`; a group of one keeps its score. Returns
    equal the advantages. Metrics count the groups as `grpo`'s do. ValueError as there.
    """
    scores, statistics, metrics = compare_scores("rloo", token_level_rewards, response_mask, index, group)
    advantages = scores - statistics.leave_one_out_mean
    column = over_tokens(advantages, response_mask, token_level_rewards.dtype)
    return Advantages(column, column, metrics)
