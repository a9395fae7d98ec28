"""What the stages of a pipeline agree on: how many micro-batches they take in turn, and shapes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor


def group_size(n: int, pp: int) -> int:
    """How many of `n` micro-batches an interleaved stage's part takes in turn: the fewest such that the last
    turn has at least pp too.
    """
    return next(size for size in range(pp, n + 1) if n % size == 0 or n % size >= pp)


class StageLinks(P2PCommunicator):
    """megatron-core's messages between stages, with shapes told in a way that interleaved stages understand.

    They send activations on and gradients back at once. Where there are only two stages both messages go to
    the same rank, and megatron-core expects their shapes in another order than it sends them. It also waits
    until they are taken, before it sends anything: two stages may wait so for each other.
    """

    def __init__(self, group: dist.ProcessGroup, config: ModelParallelConfig, device: torch.device) -> None:
        super().__init__(pp_group=group, config=config)
        self._device = device
        self._sent: list[Any] = []  # shapes on their way, and what they wait on

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Shapes of what comes from the stage before, and from the one after; zeros where nothing comes."""
        before, after = (torch.zeros(3, dtype=torch.int64, device=self._device) for _ in range(2))
        messages = [
            (dist.isend, self._shape_of(tensor_send_next), self.next_rank),
            (dist.isend, self._shape_of(tensor_send_prev), self.prev_rank),
            (dist.irecv, before if recv_prev else None, self.prev_rank),
            (dist.irecv, after if recv_next else None, self.next_rank),
        ]
        ops = [
            dist.P2POp(kind, shape, peer, self.pp_group)
            for kind, shape, peer in messages
            if shape is not None
        ]
        requests = dist.batch_isend_irecv(ops) if ops else []
        one_each = len(requests) == len(ops)  # NCCL's are one for all, and no wait of the host
        for i, request in enumerate(requests):
            if not one_each or ops[i].op is dist.irecv:
                request.wait()
        self._sent = [ops, requests]  # taken before the tensors are, on which megatron-core waits
        return before.tolist(), after.tolist()

    def _shape_of(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.tensor(tensor.shape, device=self._device)
