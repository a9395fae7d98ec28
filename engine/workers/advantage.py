"""Advantages of the batch, computed where the critic lives (the actor where there is none)."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rolemesh.engine.algorithms import advantage_estimator, apply_kl_penalty
from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.worker import Worker
from rolemesh.engine.workers.metrics import all_reduce_dict
from rolemesh.parallel.model import ParallelModel


@dataclass(frozen=True)
class AdvantageSpec:
    """Which estimator, and its numbers. `kl_kind` is None when the KL term is not part of the reward."""

    estimator: str = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    kl_kind: str | None = None
    norm_adv_by_std: bool = True


class AdvantageWorker(Worker):
    """The `advantage` operation; mixed into the Megatron roles that may run it."""

    model: ParallelModel

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_advantage(
        self,
        data: DataProto,
        spec: AdvantageSpec,
        kl_coef: float = 0.0,
        dropped: Collection[Hashable] = (),
    ) -> DataProto:
        """Columns `token_level_scores`, `token_level_rewards`, `advantages`, `returns`, fp32 `[b, R]`.

        Statistics (whitening, groups by `uid`) are those of the whole batch: ranks combine them over dp. The
        result's `meta_info["metrics"]` describes the whole batch in verl's names and is equal on every rank.
        Rows whose `uid` is among `dropped` count in none of them, and are 0 in the columns.
        """
        if not dropped:
            return self._advantage(data, spec, kl_coef)
        kept = np.array([uid not in dropped for uid in data.non_tensor_batch["uid"]], dtype=bool)
        result = self._advantage(data.select_idxs(np.flatnonzero(kept)), spec, kl_coef)
        columns = {}
        for name, column in result.batch.items():
            columns[name] = column.new_zeros((len(kept), column.shape[1]))
            columns[name][torch.from_numpy(kept)] = column
        return DataProto.from_dict(tensors=columns, meta_info=result.meta_info)

    def _advantage(self, data: DataProto, spec: AdvantageSpec, kl_coef: float) -> DataProto:
        group = self.model.groups.dp
        mask = data.batch["response_mask"].bool()
        scores = data.batch["rm_scores"] * mask
        rewards, kl_mean = scores, None
        if spec.kl_kind is not None:
            rewards, kl_mean = apply_kl_penalty(
                scores,
                data.batch["old_log_probs"],
                data.batch["ref_log_prob"],
                mask,
                kl_coef=kl_coef,
                kind=spec.kl_kind,
                group=group,
            )
        result = advantage_estimator(spec.estimator)(
            token_level_rewards=rewards,
            values=data.batch.get("values", None),
            response_mask=mask,
            index=data.non_tensor_batch.get("uid"),
            gamma=spec.gamma,
            lam=spec.lam,
            norm_adv_by_std=spec.norm_adv_by_std,
            group=group,
        )
        columns = {
            "token_level_scores": scores,
            "token_level_rewards": rewards,
            "advantages": result.advantages,
            "returns": result.returns,
        }
        metrics = batch_metrics(data, columns, mask, group) | result.metrics
        if kl_mean is not None and "critic/score/mean" in metrics:  # of no rows there is no KL
            metrics |= {"actor/reward_kl_penalty": kl_mean, "actor/reward_kl_penalty_coeff": kl_coef}
        return DataProto.from_dict(tensors=columns, meta_info={"metrics": metrics})


def batch_metrics(
    data: DataProto, columns: dict[str, Tensor], mask: Tensor, group: torch.distributed.ProcessGroup
) -> dict[str, float]:
    """verl's data metrics over the whole batch: scores, rewards, advantages, returns, values, lengths.

    Sequence quantities are over samples, token quantities over response tokens. `critic/vf_explained_var` is
    1 - Var(returns - values) / Var(returns), as verl has it.
    """
    attention = data.batch["attention_mask"]
    prompt_width = attention.shape[1] - mask.shape[1]
    responses = attention[:, prompt_width:].sum(-1)
    series = {
        "critic/score": columns["token_level_scores"].sum(-1),
        "critic/rewards": columns["token_level_rewards"].sum(-1),
        "critic/advantages": columns["advantages"][mask],
        "critic/returns": columns["returns"][mask],
        "response_length": responses,
        "response_length/clipped": (responses == mask.shape[1]),
        "prompt_length": attention[:, :prompt_width].sum(-1),
    }
    if "values" in data.batch:
        series["critic/values"] = data.batch["values"][mask]
        series["error"] = series["critic/returns"] - series["critic/values"]
    if "rollout_log_probs" in data.batch and "old_log_probs" in data.batch:
        gap = data.batch["rollout_log_probs"].exp() - data.batch["old_log_probs"].exp()
        series["training/rollout_probs_diff"] = gap[mask].abs()
    return _summaries({name: part.double() for name, part in series.items()}, group)


def _summaries(series: dict[str, Tensor], group: torch.distributed.ProcessGroup) -> dict[str, float]:
    """mean / max / min of each series over the group's ranks, in verl's names; ranks may hold empty parts.

    A series without values on any rank is left out.
    """
    local: dict[str, float] = {}
    for name, part in series.items():
        local |= {
            f"{name}|n": float(part.numel()),
            f"{name}|sum": part.sum().item(),
            f"{name}|sq": (part**2).sum().item(),
        }
        if part.numel():
            local |= {f"{name}|hi_max": part.max().item(), f"{name}|lo_max": -part.min().item()}
    total = all_reduce_dict(local, group)
    series = {name: part for name, part in series.items() if total[f"{name}|n"]}
    mean = {name: total[f"{name}|sum"] / total[f"{name}|n"] for name in series}
    variance = {name: total[f"{name}|sq"] / total[f"{name}|n"] - mean[name] ** 2 for name in series}
    out: dict[str, float] = {}
    for name in series:
        if name == "response_length/clipped":
            out["response_length/clip_ratio"] = mean[name]
        elif name != "error":
            out[f"{name}/mean"] = mean[name]
            out[f"{name}/max"] = total[f"{name}|hi_max"]
            out[f"{name}/min"] = -total[f"{name}|lo_max"]
    if "error" in series:
        out["critic/vf_explained_var"] = 1.0 - variance["error"] / (variance["critic/returns"] + 1e-5)
    return out
