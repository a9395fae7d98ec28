"""Statistics of one call, made equal on every rank of a dp group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist

from rolemesh.parallel.model import TrainResult


def combine_steps(results: Sequence[TrainResult], group: dist.ProcessGroup) -> dict[str, float]:
    """One value per statistic over the optimizer steps of a call.

    A micro-batch's statistic is already divided by the global denominator, so its sum over micro-batches
    and dp ranks is the mini-batch's value, and the call's value is the mean over its steps. Names that end
    in `_max` take the maximum instead. Earlier pipeline stages have no statistics and report only
    `grad_norm`, `lr` and `router_loss`. A call without steps has counts of 0 and no more.
    """
    if not results:
        return {"optimizer_steps": 0.0, "skipped_steps": 0.0}
    n = len(results)
    steps = [
        {name: value.item() if name.endswith("_max") else value.item() / n for name, value in stats.items()}
        for result in results
        for stats in result.stats
    ]
    norms = [result.grad_norm for result in results if not result.skipped]
    metrics = {
        "grad_norm": sum(norms) / len(norms) if norms else math.nan,
        "lr": results[-1].lr,
        "optimizer_steps": float(len(norms)),
        "skipped_steps": float(n - len(norms)),
    }
    if routed := [result.router_loss for result in results if result.router_loss is not None]:
        metrics["router_loss"] = sum(routed) / len(routed)
    return metrics | all_reduce_dict(merge(steps), group)


def merge(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sum each key over the parts that have it; the maximum for names ending in `_max`."""
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            else:
                merged[name] = max(merged[name], value) if name.endswith("_max") else merged[name] + value
    return merged


def all_reduce_dict(local: Mapping[str, float], group: dist.ProcessGroup) -> dict[str, float]:
    """`merge` over the ranks of the group; ranks may hold different keys, or none."""
    parts: list[Mapping[str, float]] = [{}] * group.size()
    dist.all_gather_object(parts, dict(local), group=group)
    return merge(parts)
