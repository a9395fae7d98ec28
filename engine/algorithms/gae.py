"""PPO's advantages: generalised advantage estimation with a critic."""

import torch.distributed as dist
from torch import Tensor

from rolemesh.engine.algorithms.estimators import Advantages, register_estimator
from rolemesh.kernels import gae, masked_whiten


@register_estimator("gae")
def gae_advantage_return(
    *,
    token_level_rewards: Tensor,
    values: Tensor | None,
    response_mask: Tensor,
    gamma: float,
    lam: float,
    group: dist.ProcessGroup | None = None,
    **_: object,
) -> Advantages:
    """verl's `compute_gae_advantage_return`: advantages whitened over the whole batch, returns as they are.

    Whitening is over all ranks of `group`. A batch with a single response token is no error as in verl: its
    advantage is 0. ValueError when there are no values.
    """
    if values is None:
        raise ValueError("the advantage estimator 'gae' needs the column 'values': give the recipe a critic")
    advantages, returns = gae(token_level_rewards, values, response_mask, gamma, lam)
    return Advantages(masked_whiten(advantages, response_mask, group=group), returns)
