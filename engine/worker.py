"""The worker side of a role: one object per rank, living in the process of a pool's device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rolemesh.engine.batch_ref import BatchRef
from rolemesh.engine.protocol import DataProto
from rolemesh.placement.layout import Layout


@dataclass(frozen=True)
class WorkerContext:
    """Where a worker stands. `fetch` brings the batch of a handle into this process, read-only."""

    role: str
    pool: str
    rank: int
    world_size: int
    local_rank: int  # among this pool's processes on the node
    node: str
    device: str  # "cpu" or "cuda"
    layout: Layout
    collective_timeout_s: float  # limit of every torch.distributed operation
    fetch: Callable[[BatchRef], DataProto]


class Worker:
    """Base of every role. The process that hosts the worker sets `context` before it calls `__init__`.

    torch.distributed is initialised by then, with the ranks of the pool as its world. Methods that the
    driver may call carry `@register(...)`.
    """

    context: WorkerContext

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    @property
    def layout(self) -> Layout:
        return self.context.layout

    @property
    def device(self) -> torch.device:
        return torch.device(self.context.device)
