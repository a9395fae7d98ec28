"""ReMax (Li et al. 2024): the baseline is the reward of the prompt's greedy answer."""

import torch
from torch import Tensor

from rolemesh.engine.algorithms.estimators import Advantages, register_estimator
from rolemesh.kernels import discounted_returns


@register_estimator("remax")
def remax_outcome_advantage(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    reward_baselines: Tensor | None,
    **_: object,
) -> Advantages:
    """verl's `compute_remax_outcome_advantage`: the sum of a token's and the later rewards less the baseline.

    `reward_baselines` [b] is the greedy answer's whole reward. Returns are the sums. ValueError when there
    are no baselines.
    """
    if reward_baselines is None:
        raise ValueError(
            "the advantage estimator 'remax' needs the column 'reward_baselines', the reward of each "
            "prompt's greedy answer: use algorithm.name remax, whose step makes it"
        )
    returns = discounted_returns(token_level_rewards, response_mask, 1.0)
    advantages = returns - reward_baselines.to(returns.dtype)[:, None]
    return Advantages(torch.where(response_mask.bool(), advantages, 0.0), returns)
