"""Supervised fine-tuning: the likelihood of given answers, on the tokens that count."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.workers.megatron import MegatronWorker
from rolemesh.engine.workers.metrics import all_reduce_dict, combine_steps
from rolemesh.kernels import aggregate, loss_denominators, raise_bad_labels
from rolemesh.parallel.micro_batches import MicroBatch


class SftWorker(MegatronWorker):
    """Language model on one rank. The loss is the mean of -log p over the tokens of `response_mask`."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, data: DataProto, sizes: Sequence[Sequence[int]] | None = None) -> dict[str, float]:
        """One optimizer step per mini-batch; `sizes[dp_rank][k]` rows of a shard belong to mini-batch k.

        Without `sizes` the whole batch is one mini-batch. Returns `train/loss`, `train/grad_norm`,
        `train/lr`, ... of the whole batch, equal on every rank.
        """
        results = self.train_mini_batches(data, sizes, 1, ["response_mask"], self._loss_of)
        metrics = combine_steps(results, self.model.groups.dp)
        return {f"train/{name}": value for name, value in metrics.items()}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def evaluate(self, data: DataProto) -> dict[str, float]:
        """`val/loss`: mean of -log p over all tokens of the batch that count; nothing changes."""

        def score(hidden: Tensor, micro_batch: MicroBatch) -> dict[str, Tensor]:
            log_probs, _ = self.log_probs(hidden, micro_batch, entropy=False)
            mask = micro_batch.columns["response_mask"].bool()
            return {"loss": -log_probs.double()[mask].sum(), "tokens": mask.sum()}

        outputs = self.model.infer(self.cut(data, ["response_mask"]), score) or []
        raise_bad_labels(self.device)
        sums = {name: sum(float(output[name]) for output in outputs) for name in ("loss", "tokens")}
        total = all_reduce_dict(sums, self.model.groups.dp)
        return {"val/loss": total["loss"] / max(total["tokens"], 1.0)}

    def _loss_of(
        self, mini_batch: DataProto
    ) -> Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]:
        mode = "token-mean"
        denominators = loss_denominators(mini_batch.batch["response_mask"], mode, self.model.groups.dp)

        def compute(hidden: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs, _ = self.log_probs(hidden, micro_batch, entropy=False)
            loss = aggregate(-log_probs, micro_batch.columns["response_mask"], mode, denominators)
            return loss, {"loss": loss.detach()}

        return compute
