"""GRPO's advantages (Shao et al. 2024): each sample's score against the other samples of its prompt."""

from collections.abc import Hashable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rolemesh.engine.algorithms.estimators import Advantages, register_estimator


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

    Metrics: `grpo/groups`, and how many are `grpo/zero_variance_groups` (several rows, all scores equal: they
    teach nothing) or `grpo/single_row_groups`. ValueError when there is no `index`, or not one for each row.
    """
    rows = len(token_level_rewards)
    if index is None or len(index) != rows:
        found = "none" if index is None else str(len(index))
        raise ValueError(f"the advantage estimator 'grpo' needs a 'uid' for each of {rows} rows, got {found}")
    mask = response_mask.bool()
    scores = torch.where(mask, token_level_rewards, 0.0).double().sum(dim=1).tolist()
    groups = _scores_by_group(list(index), scores, group)
    advantages = torch.tensor(
        [
            _advantage(score, groups[key], norm_adv_by_std, epsilon)
            for key, score in zip(index, scores, strict=True)
        ],
        dtype=token_level_rewards.dtype,
        device=token_level_rewards.device,
    )
    column = torch.where(mask, advantages[:, None], 0.0)
    members = [np.asarray(group_scores) for group_scores in groups.values()]
    metrics = {
        "grpo/groups": float(len(members)),
        "grpo/zero_variance_groups": float(sum(len(m) > 1 and np.ptp(m) == 0 for m in members)),
        "grpo/single_row_groups": float(sum(len(m) == 1 for m in members)),
    }
    return Advantages(column, column, metrics)


def _scores_by_group(
    index: list[Hashable], scores: list[float], group: dist.ProcessGroup | None
) -> dict[Hashable, list[float]]:
    """Scores of each prompt's rows on all ranks, in rank and row order, so that every rank sums alike."""
    parts = [(index, scores)]
    if group is not None:
        parts = [([], [])] * group.size()
        dist.all_gather_object(parts, (index, scores), group=group)
    groups: dict[Hashable, list[float]] = {}
    for keys, values in parts:
        for key, value in zip(keys, values, strict=True):
            groups.setdefault(key, []).append(value)
    return groups


def _advantage(score: float, members: list[float], norm_adv_by_std: bool, epsilon: float) -> float:
    several = len(members) > 1
    mean, std = (float(np.mean(members)), float(np.std(members, ddof=1))) if several else (0.0, 1.0)
    return (score - mean) / (std + epsilon) if norm_adv_by_std else score - mean
