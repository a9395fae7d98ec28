"""Statistics of the samples that answer one prompt: what GRPO and leave-one-out advantages compare with.

A score's group may lie on several ranks. Keys and scores of all ranks are exchanged once, and each group is
summed in the order of its scores, so that results do not depend on how rows lie on ranks, to the last bit.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rolemesh.kernels.forms import Kernel
from rolemesh.kernels.library import torch_op


@dataclass(frozen=True)
class GroupStatistics:
    """Of each row's group over all ranks, [n] float64; and of all groups, numbers equal on every rank.

    Attributes:
        count: rows in the group, this one included.
        mean, var: of the group's scores; `var` is unbiased. Equal scores have exactly their own value as mean
            and 0 as variance, as has a group of one.
        leave_one_out_mean: mean of the group's other scores; 0 where there is none.
        n_groups: groups there are.
        n_constant: groups of several rows whose scores are all equal.
        n_single: groups of one row.
    """

    count: Tensor
    mean: Tensor
    var: Tensor
    leave_one_out_mean: Tensor
    n_groups: int
    n_constant: int
    n_single: int

    @property
    def std(self) -> Tensor:
        return self.var.sqrt()


def group_statistics(
    scores: Tensor, index: Sequence[Hashable] | np.ndarray | Tensor, *, group: dist.ProcessGroup | None = None
) -> GroupStatistics:
    """Compare each row with the rows that have its key, on all ranks of `group`.

    Args:
        scores: [n] float, this rank's; no gradient flows through the statistics.
        index: n keys: any that can be in a dict, or an integer tensor [n]. All ranks name a group alike.
        group: every rank of it calls, also one without rows.

    Python objects are compared here, so `torch.compile` cannot take this function as a whole.

    Raises:
        ValueError: there is not one key for each score.
    """
    keys = index.tolist() if isinstance(index, (np.ndarray, Tensor)) else list(index)
    if scores.ndim != 1 or len(keys) != len(scores):
        raise ValueError(f"scores are {[*scores.shape]}, keys {len(keys)}: one key for each score [n]")
    first_row, keys, everyone = _exchange(keys, scores.detach().double(), group)
    numbers: dict[Hashable, int] = {}
    group_of_row = torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)
    return _compare(everyone, group_of_row.to(scores.device), len(numbers), first_row, len(scores))


def _exchange(
    keys: list[Hashable], scores: Tensor, group: dist.ProcessGroup | None
) -> tuple[int, list[Hashable], Tensor]:
    """Keys and scores of all ranks, by rank, and where this rank's start."""
    if group is None:
        return 0, keys, scores
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, (keys, scores.tolist()), group=group)
    first_row = sum(len(part_keys) for part_keys, _ in parts[: dist.get_rank(group)])
    all_scores = [score for _, part_scores in parts for score in part_scores]
    all_keys = [key for part_keys, _ in parts for key in part_keys]
    return first_row, all_keys, torch.tensor(all_scores, dtype=torch.float64, device=scores.device)


def _compare(scores: Tensor, group: Tensor, n_groups: int, first_row: int, n_rows: int) -> GroupStatistics:
    order = torch.argsort(scores, stable=True)
    order = order[torch.argsort(group[order], stable=True)]  # by group, and in it by score
    scores_in_order, group_in_order = scores[order], group[order]
    ends = torch.bincount(group, minlength=n_groups).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])[:n_groups]
    smallest, largest = scores_in_order[starts], scores_in_order[ends - 1]
    # Distances to the smallest score: the mean and variance of equal scores come out without rounding.
    distances = scores_in_order - smallest[group_in_order]
    count, mean_distance, squares = _group_moments(distances, group_in_order, n_groups).unbind()
    var = squares / (count - 1).clamp(min=1)
    own, own_group = scores[first_row : first_row + n_rows], group[first_row : first_row + n_rows]
    n, mean = count[own_group], (smallest + mean_distance)[own_group]
    others = mean + (mean - own) / (n - 1).clamp(min=1)
    return GroupStatistics(
        count=n,
        mean=mean,
        var=var[own_group],
        leave_one_out_mean=torch.where(n > 1, others, 0.0),
        n_groups=n_groups,
        n_constant=int(((count > 1) & (smallest == largest)).sum()),
        n_single=int((count == 1).sum()),
    )


def _fake_moments(scores: Tensor, group: Tensor, n_groups: int) -> Tensor:
    return scores.new_empty(3, n_groups)


@torch_op(fake=_fake_moments)
def _group_moments(scores: Tensor, group: Tensor, n_groups: int) -> Tensor:
    return _kernel(scores, group, n_groups)


def group_moments_reference(scores: Tensor, group: Tensor, n_groups: int) -> Tensor:
    """[3, n_groups] float64: count, mean and squared deviations of each `group`'s `scores` [n]."""
    moments = scores.new_zeros(3, n_groups)
    count, mean, squares = moments
    count.index_add_(0, group, torch.ones_like(scores))
    mean.index_add_(0, group, scores).div_(count.clamp(min=1))
    squares.index_add_(0, group, (scores - mean[group]).square())
    return moments


def _cpp(cpu: Any, scores: Tensor, group: Tensor, n_groups: int) -> Tensor:
    moments = scores.new_empty(3, n_groups)
    cpu.group_moments(scores.contiguous(), group.contiguous(), moments)
    return moments


_kernel = Kernel("group_moments", reference=group_moments_reference, cpp=_cpp, triton="groups")
