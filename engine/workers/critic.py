"""The critic: a scalar value per response token, trained on returns; and the batch's advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.workers.advantage import AdvantageWorker, without_truncated
from rolemesh.engine.workers.megatron import MegatronWorker, RoleSpec
from rolemesh.engine.workers.metrics import combine_steps
from rolemesh.kernels import loss_denominators, value_loss
from rolemesh.parallel.micro_batches import MicroBatch


@dataclass(frozen=True)
class ValueLoss:
    """The critic's objective: squared error to the returns, clipped around the old values by `value_clip`
    (None: freely). The other fields as in `PolicyLoss`.
    """

    value_clip: float | None = 0.5
    loss_agg: str = "token-mean"
    norm_tokens: int | None = None
    epochs: int = 1
    end_ids: tuple[int, ...] | None = None


class CriticWorker(AdvantageWorker, MegatronWorker):
    """Value model on one rank. `loss` is read by `update_critic` only."""

    def __init__(self, spec: RoleSpec, loss: ValueLoss) -> None:
        super().__init__(spec)
        self.loss = loss

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto | None:
        """Column `values`, fp32 `[b, R]`: the value of the state before each response token, 0 outside."""
        return self.infer(data, lambda output, part: {"values": self.response_values(output, part)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_critic(
        self, data: DataProto, sizes: Sequence[Sequence[int]] | None = None
    ) -> dict[str, float]:
        """`epochs` passes over the batch; `sizes[dp_rank][k]` rows of a shard belong to mini-batch k.

        Without `sizes` the whole batch is one mini-batch. Returns metrics over the whole batch, equal on
        every rank: `critic/vf_loss`, `critic/vf_clipfrac`, ...
        """
        data = without_truncated(data, self.loss.end_ids)
        results = self.train_mini_batches(
            data, sizes, self.loss.epochs, ["response_mask", "values", "returns"], self._loss_of
        )
        return {
            f"critic/{name}": value for name, value in combine_steps(results, self.model.groups.dp).items()
        }

    def _loss_of(
        self, mini_batch: DataProto
    ) -> Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]:
        mode = self.loss.loss_agg
        denominators = loss_denominators(
            mini_batch.batch["response_mask"], mode, self.model.groups.dp, norm_tokens=self.loss.norm_tokens
        )

        def compute(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            c = micro_batch.columns
            loss, stats = value_loss(
                self.response_values(output, micro_batch),
                c["returns"],
                c["values"],
                c["response_mask"],
                denominators=denominators,
                value_clip=math.inf if self.loss.value_clip is None else self.loss.value_clip,
                loss_agg=mode,
            )
            return loss, {"vf_loss": loss.detach(), **stats}

        return compute
