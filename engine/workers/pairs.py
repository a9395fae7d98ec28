"""Reward-model training on pairs of answers, one preferred: Bradley and Terry's model of who wins.

A row of the batch is a pair. `input_ids` and `attention_mask` [b, 2W] hold the chosen sequence (prompt and
answer) in the first W columns and the rejected one in the others, so that no cut separates them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.workers.megatron import MegatronWorker
from rolemesh.engine.workers.metrics import all_reduce_dict, combine_steps
from rolemesh.kernels import loss_denominators
from rolemesh.parallel.micro_batches import MicroBatch, pack, partition

Loss = Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]


class PairsWorker(MegatronWorker):
    """Reward model on one rank: a score at a sequence's last token; the loss of a pair is
    -log sigmoid(score of the chosen - score of the rejected).
    """

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, data: DataProto, sizes: Sequence[Sequence[int]] | None = None) -> dict[str, float]:
        """One optimizer step per mini-batch; `sizes[dp_rank][k]` pairs of a shard belong to mini-batch k.

        Without `sizes` the whole batch is one mini-batch. Returns `train/loss`, `train/accuracy` (the share
        of pairs whose chosen sequence scores higher; equal scores count half), `train/chosen_score`,
        `train/rejected_score`, ... of the whole batch, equal on every rank.
        """
        results = self.train_mini_batches(data, sizes, 1, [], self._loss_of)
        metrics = combine_steps(results, self.model.groups.dp)
        return {f"train/{name}": value for name, value in metrics.items()}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def evaluate(self, data: DataProto) -> dict[str, float]:
        """`val/loss`, `val/accuracy` and mean scores over all pairs of the batch; nothing changes."""
        loss = self._loss_of(data)
        outputs = self.model.infer(self.cut(data), lambda output, part: loss(output, part)[1]) or []
        names = outputs[0] if outputs else []
        sums = {name: sum(float(output[name]) for output in outputs) for name in names}
        total = all_reduce_dict(sums, self.model.groups.dp)
        return {f"val/{name}": value for name, value in total.items()}

    def cut(self, data: DataProto, columns: Sequence[str] = ()) -> list[MicroBatch]:
        """The shard's pairs within the token budget: rows 2i and 2i + 1 of a micro-batch are one pair's."""
        if len(data) == 0:
            return []
        padding = self.model.padding
        ids, mask = (data.batch[name].reshape(2 * len(data), -1) for name in ("input_ids", "attention_mask"))
        taken_up = [padding.of_row(length) for length in mask.sum(dim=1).tolist()]
        of_pairs = [sum(both) for both in zip(taken_up[0::2], taken_up[1::2], strict=True)]
        parts = [
            pack(ids, mask, {}, [2 * pair + side for pair in pairs for side in (0, 1)], padding=padding)
            for pairs in partition(of_pairs, budget_tokens=self.spec.micro_batch_tokens)
        ]
        return [part.to(self.device) for part in parts]

    def _loss_of(self, mini_batch: DataProto) -> Loss:
        pairs = torch.ones(len(mini_batch), 1)
        n_pairs = loss_denominators(pairs, "token-mean", self.model.groups.dp).loss

        def compute(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            ends = micro_batch.starts + micro_batch.lengths - 1
            scores = self.values_at(output, micro_batch, ends)
            chosen, rejected = scores[0::2], scores[1::2]
            loss = -logsigmoid(chosen - rejected).sum() / n_pairs
            stats = {
                "loss": loss,
                "accuracy": ((chosen > rejected).sum() + 0.5 * (chosen == rejected).sum()) / n_pairs,
                "chosen_score": chosen.sum() / n_pairs,
                "rejected_score": rejected.sum() / n_pairs,
            }
            return loss, {name: value.detach() for name, value in stats.items()}

        return compute
