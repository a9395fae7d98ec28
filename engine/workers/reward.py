"""The reward role as a scalar-head model on Megatron ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from rolemesh.engine.algorithms import at_last_token
from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.response import own_tokens
from rolemesh.engine.workers.baseline import as_reward, as_samples, prompts_once
from rolemesh.engine.workers.megatron import MegatronWorker
from rolemesh.parallel.micro_batches import MicroBatch, response_index


class RewardWorker(MegatronWorker):
    """Reward model on one rank: one score per sample, read at the sample's last token."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto | None:
        """Column `rm_scores`, fp32 `[b, R]`: the score at the model's last token, 0 elsewhere."""

        def score(output: Tensor, micro_batch: MicroBatch) -> dict[str, Tensor]:
            return {"score": self.last_token_scores(output, micro_batch)}

        scored = self.infer(data, score)
        if scored is None:
            return None
        at_last = at_last_token(scored.batch["score"], own_tokens(data).to(scored.batch["score"].device))
        return DataProto.from_dict({"rm_scores": at_last}, meta_info=scored.meta_info)

    def last_token_scores(self, output: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Scores at each row's last token, the model's or an observation's, as fp32 `[m]`; 0 for a row whose
        response is empty.
        """
        m, width = micro_batch.columns["responses"].shape
        rows = response_index(micro_batch, width).row.unique()
        ends = (micro_batch.starts + micro_batch.lengths - 1)[rows]
        scores = output.new_zeros(m, dtype=torch.float32)
        scores[rows] = self.values_at(output, micro_batch, ends)
        return scores

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_baseline(self, data: DataProto) -> DataProto | None:
        """Column `reward_baselines`, fp32 `[b]`: the score of each prompt's greedy answer."""
        once, own = prompts_once(data)
        scored = self.compute_rm_score(as_samples(once))
        return None if scored is None else as_reward(scored, own)
