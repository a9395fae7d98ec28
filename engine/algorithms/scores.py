"""One score per sample, compared with those of the samples that answer the same prompt."""

from collections.abc import Hashable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rolemesh.kernels import GroupStatistics, group_statistics


def compare_scores(
    name: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable] | np.ndarray | None,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, GroupStatistics, dict[str, float]]:
    """Each row's score, float64 [b], the sum of its rewards [b, R] under the mask; its group's statistics.

    Rows with one `index` are a group, on all ranks of `group`. The metrics count the groups, under the
    estimator's `name`. ValueError when there is no `index`, or not one for each row.
    """
    rows = len(token_level_rewards)
    if index is None or len(index) != rows:
        found = "none" if index is None else str(len(index))
        raise ValueError(
            f"the advantage estimator {name!r} needs a 'uid' for each of {rows} rows, got {found}"
        )
    scores = torch.where(response_mask.bool(), token_level_rewards, 0.0).double().sum(dim=1)
    statistics = group_statistics(scores, index, group=group)
    metrics = {
        f"{name}/groups": float(statistics.n_groups),
        f"{name}/zero_variance_groups": float(statistics.n_constant),
        f"{name}/single_row_groups": float(statistics.n_single),
    }
    return scores, statistics, metrics


def over_tokens(per_row: Tensor, response_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Each row's number [b] at all of its response tokens, [b, R] of `dtype`; 0 outside of the mask."""
    return torch.where(response_mask.bool(), per_row.to(dtype)[:, None], 0.0)
