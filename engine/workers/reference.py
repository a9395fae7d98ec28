"""The reference policy: frozen, scores the actor's samples for the KL term."""

from __future__ import annotations

from torch import Tensor

from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.workers.megatron import MegatronWorker
from rolemesh.parallel.micro_batches import MicroBatch


class RefWorker(MegatronWorker):
    """Reference policy on one rank."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto | None:
        """Column `ref_log_prob`, fp32 `[b, R]`, 0 outside the response."""

        def score(hidden: Tensor, micro_batch: MicroBatch) -> dict[str, Tensor]:
            return {"ref_log_prob": self.log_probs(hidden, micro_batch, entropy=False)[0]}

        return self.infer(data, score)
