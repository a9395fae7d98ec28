"""The worker side of a role: one object per rank, living in the process of a pool's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rolemesh.engine.batch_ref import BatchRef
from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.protocol import DataProto
from rolemesh.parallel import random_state
from rolemesh.placement.layout import Layout


def _untold(phase: str) -> None:
    """Nobody asks this process what it does."""


@dataclass(frozen=True)
class WorkerContext:
    """Where a worker stands. `fetch` brings the batch of a handle into this process, read-only.

    `notes` are shown with the running call's span; `shared` is what the roles of this process have in common.
    `logs` is the run's folder of logs, if it has one. `phase(text)` says what the running operation does now
    ("loading weights"; empty: what its name says), for heartbeats.
    """

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
    notes: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    logs: str | None = None
    phase: Callable[[str], None] = _untold


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

    @property
    def name(self) -> str:
        """This worker in messages."""
        return f"{self.context.role} rank {self.rank} on node {self.context.node}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def random_state(self) -> dict[str, Any]:
        """This process's random states; roles of one process share them."""
        return random_state.get()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_random_state(self, of_ranks: Sequence[Mapping[str, Any]]) -> None:
        """Take up this rank's part of what `random_state` gave on all ranks."""
        random_state.put(of_ranks[self.rank])
