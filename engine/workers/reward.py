"""The reward role as a scalar-head model on Megatron ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.workers.baseline import as_reward, as_samples, prompts_once
from rolemesh.engine.workers.megatron import MegatronWorker
from rolemesh.parallel.micro_batches import MicroBatch, response_index


class RewardWorker(MegatronWorker):
    """Reward model on one rank: one score per sample, read at the sample's last token."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto | None:
        """Column `rm_scores`, fp32 `[b, R]`: the score at the last response token, 0 elsewhere."""
        return self.infer(
            data, lambda output, micro_batch: {"rm_scores": self.last_token_scores(output, micro_batch)}
        )

    def last_token_scores(self, output: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Scores at each row's last token, put at its last response column, as fp32 `[m, R]`.

        A row whose response is empty has no column to hold a score and stays 0.
        """
        m, width = micro_batch.columns["responses"].shape
        index = response_index(micro_batch, width)
        last = index.row.new_full((m,), -1).scatter_reduce(0, index.row, index.column, "amax")
        rows = torch.nonzero(last >= 0).flatten()
        ends = (micro_batch.starts + micro_batch.lengths - 1)[rows]
        scores = output.new_zeros((m, width), dtype=torch.float32)
        scores[rows, last[rows]] = self.values_at(output, micro_batch, ends)
        return scores

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_baseline(self, data: DataProto) -> DataProto | None:
        """Column `reward_baselines`, fp32 `[b]`: the score of each prompt's greedy answer."""
        once, own = prompts_once(data)
        scored = self.compute_rm_score(as_samples(once))
        return None if scored is None else as_reward(scored, own)
