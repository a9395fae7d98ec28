"""Advantages of the batch, computed where the critic lives (the actor where there is none)."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rolemesh.engine.algorithms import (
    Advantages,
    Correction,
    SoftOverlong,
    advantage_estimator,
    apply_kl_penalty,
    at_last_token,
    correct,
    correction_metrics,
    load_algorithm_file,
    overlong_penalty,
    truncated_rows,
)
from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.response import response_tokens
from rolemesh.engine.worker import Worker
from rolemesh.engine.workers.metrics import all_reduce_dict
from rolemesh.parallel.model import ParallelModel


@dataclass(frozen=True)
class AdvantageSpec:
    """Which estimator, its numbers, and what is done to rewards before and to advantages after.

    `kl_kind` is None when the KL term is not part of the reward. `end_ids` leaves the rows out that were cut
    at the longest length, without one of these tokens at their end; None keeps them. `file` registers a
    user's estimator.
    """

    estimator: str = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    kl_kind: str | None = None
    norm_adv_by_std: bool = True
    overlong: SoftOverlong | None = None
    correction: Correction | None = None
    end_ids: tuple[int, ...] | None = None
    file: str | None = None


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
        version: int | None = None,
    ) -> DataProto:
        """Columns `token_level_scores`, `token_level_rewards`, `advantages`, `returns`, fp32 `[b, R]`.

        Statistics (whitening, groups by `uid`) are those of the whole batch: ranks combine them over dp. The
        result's `meta_info["metrics"]` describes the whole batch in verl's names and is equal on every rank.
        Rows whose `uid` is among `dropped`, and those that `spec.end_ids` leaves out, count in none of them,
        and are 0 in the columns. Advantages are those of the estimator times the weights of
        `spec.correction`. `version` of the actor's weights: the metrics tell how much older those are that
        made the tokens.
        """
        if not dropped:
            return self._advantage(data, spec, kl_coef, version)
        kept = np.array([uid not in dropped for uid in data.non_tensor_batch["uid"]], dtype=bool)
        result = self._advantage(data.select_idxs(np.flatnonzero(kept)), spec, kl_coef, version)
        columns = {}
        for name, column in result.batch.items():
            columns[name] = column.new_zeros((len(kept), column.shape[1]))
            columns[name][torch.from_numpy(kept)] = column
        return DataProto.from_dict(tensors=columns, meta_info=result.meta_info)

    def _advantage(
        self, data: DataProto, spec: AdvantageSpec, kl_coef: float, version: int | None
    ) -> DataProto:
        load_algorithm_file(spec.file)
        group = self.model.groups.dp
        counts = ~_left_out(data, spec.end_ids)
        data = without_truncated(data, spec.end_ids)
        mask = data.batch["response_mask"].bool()
        scores = torch.where(mask, data.batch["rm_scores"], 0.0)
        rewards, metrics = self._rewards(data, scores, spec, kl_coef)
        result = self._estimate(data, rewards, spec, torch.nonzero(counts).flatten())
        columns = {
            "token_level_scores": scores,
            "token_level_rewards": rewards,
            "advantages": result.advantages,
            "returns": result.returns,
        }
        metrics |= batch_metrics(data, columns, counts, group, version) | result.metrics
        if "critic/score/mean" not in metrics:  # of no rows there is no KL
            metrics = {name: value for name, value in metrics.items() if "reward_kl_penalty" not in name}
        if not metrics["training/response_tokens"]:
            warnings.warn("no response token of this batch counts: its losses are 0", stacklevel=2)
        if "rollout_log_probs" in data.batch and "old_log_probs" in data.batch:
            pair = (data.batch["old_log_probs"], data.batch["rollout_log_probs"], mask)
            weights = correct(*pair, spec.correction) if spec.correction is not None else None
            metrics |= correction_metrics(*pair, weights, group)
            if weights is not None:
                columns["advantages"] = columns["advantages"] * weights.weights
        return DataProto.from_dict(tensors=columns, meta_info={"metrics": metrics})

    def _rewards(
        self, data: DataProto, scores: Tensor, spec: AdvantageSpec, kl_coef: float
    ) -> tuple[Tensor, dict[str, float]]:
        """The scores [b, R] less the penalties for length and for the distance to the reference."""
        mask, group = data.batch["response_mask"].bool(), self.model.groups.dp
        rewards, metrics = scores, dict[str, float]()
        if spec.overlong is not None:
            penalty = overlong_penalty(response_lengths(data), spec.overlong)
            rewards = rewards - at_last_token(penalty, mask)
            named = {"reward/overlong_penalty": penalty[mask.any(dim=1)].double()}
            metrics |= _summaries(named, group)
        if spec.kl_kind is not None:
            rewards, kl_mean = apply_kl_penalty(
                rewards,
                data.batch["old_log_probs"],
                data.batch["ref_log_prob"],
                mask,
                kl_coef=kl_coef,
                kind=spec.kl_kind,
                group=group,
            )
            metrics |= {"actor/reward_kl_penalty": kl_mean, "actor/reward_kl_penalty_coeff": kl_coef}
        return rewards, metrics

    def _estimate(self, data: DataProto, rewards: Tensor, spec: AdvantageSpec, rows: Tensor) -> Advantages:
        """What the estimator says of the `rows` that count; 0 in the others."""
        kept = data.select_idxs(rows)
        result = advantage_estimator(spec.estimator)(
            token_level_rewards=rewards[rows],
            response_mask=kept.batch["response_mask"].bool(),
            values=kept.batch.get("values", None),
            reward_baselines=kept.batch.get("reward_baselines", None),
            index=kept.non_tensor_batch.get("uid"),
            gamma=spec.gamma,
            lam=spec.lam,
            norm_adv_by_std=spec.norm_adv_by_std,
            group=self.model.groups.dp,
        )
        advantages, returns = (
            torch.zeros_like(rewards).index_copy(0, rows, x.to(rewards.dtype))
            for x in (result.advantages, result.returns)
        )
        return Advantages(advantages, returns, result.metrics)


def without_truncated(data: DataProto, end_ids: tuple[int, ...] | None) -> DataProto:
    """The batch with an all-zero `response_mask` in rows that were cut at the longest length; None: as it is.

    Every mask that an update uses is this one, tool turns' holes included.
    """
    if end_ids is None:
        return data
    mask = data.batch["response_mask"].masked_fill(_left_out(data, end_ids)[:, None], 0)
    return DataProto.from_dict({**data.batch, "response_mask": mask}, data.non_tensor_batch, data.meta_info)


def _left_out(data: DataProto, end_ids: tuple[int, ...] | None) -> Tensor:
    """[b] bool: the rows that count nowhere."""
    if end_ids is None:
        return data.batch["response_mask"].new_zeros(len(data), dtype=torch.bool)
    return truncated_rows(data.batch["responses"], response_tokens(data), end_ids)


def response_lengths(data: DataProto) -> Tensor:
    """Tokens of each row's response [b], also those that do not count: an agent's, and of rows left out."""
    return response_tokens(data).sum(-1)


def batch_metrics(
    data: DataProto,
    columns: dict[str, Tensor],
    counts: Tensor,
    group: torch.distributed.ProcessGroup,
    version: int | None = None,
) -> dict[str, float]:
    """verl's data metrics over the whole batch: scores, rewards, advantages, returns, values, lengths.

    Sequence quantities are over samples, token quantities over response tokens. Samples that do not count
    (`counts` [b] False) are in the lengths only, and in `response_length/excluded_rows`.
    `critic/vf_explained_var` is 1 - Var(returns - values) / Var(returns), as verl has it.
    `training/staleness` is how many updates older than `version` the weights are that made each token.
    A response's length is that of all of its tokens, as verl has it; with an agent `agent/model_tokens` and
    `agent/observation_tokens` say whose they are.
    """
    mask = data.batch["response_mask"].bool()
    attention = data.batch["attention_mask"]
    prompt_width = attention.shape[1] - mask.shape[1]
    responses = response_lengths(data)
    series = {
        "critic/score": columns["token_level_scores"].sum(-1)[counts],
        "critic/rewards": columns["token_level_rewards"].sum(-1)[counts],
        "critic/advantages": columns["advantages"][mask],
        "critic/returns": columns["returns"][mask],
        "response_length": responses,
        "response_length/clipped": (responses == mask.shape[1]),
        "prompt_length": attention[:, :prompt_width].sum(-1),
    }
    if "num_turns" in data.batch:
        series["agent/turns"] = data.batch["num_turns"]
        series["agent/model_tokens"] = mask.sum(-1)[counts]
        series["agent/observation_tokens"] = (responses - mask.sum(-1))[counts]
        series["agent/tool_s"] = data.batch["tool_s"]
    if "values" in data.batch:
        series["critic/values"] = data.batch["values"][mask]
        series["error"] = series["critic/returns"] - series["critic/values"]
    if "rollout_log_probs" in data.batch and "old_log_probs" in data.batch:
        gap = data.batch["rollout_log_probs"].exp() - data.batch["old_log_probs"].exp()
        series["training/rollout_probs_diff"] = gap[mask].abs()
    if version is not None and "weight_versions" in data.batch:
        series["training/staleness"] = version - data.batch["weight_versions"][mask]
    totals = {"training/response_tokens": float(mask.sum())}
    if not counts.all():
        totals["response_length/excluded_rows"] = float((~counts).sum())
    summaries = _summaries({name: part.double() for name, part in series.items()}, group)
    return summaries | all_reduce_dict(totals, group)


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
