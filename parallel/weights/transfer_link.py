"""The processes of a transfer find each other: who they are, how each pair exchanges, the plan.

All of it is made once and serves every later transfer between the same processes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rolemesh.parallel.sealed import SealError, sealed, unsealed
from rolemesh.parallel.weights.pieces import Cut
from rolemesh.parallel.weights.transfer_memory import HostMemory, ipc_handle, open_host_memory, open_ipc
from rolemesh.parallel.weights.transfer_packets import Crossing, Route, Step, steps_of
from rolemesh.parallel.weights.transfer_plan import (
    FAR,
    NEAR,
    SAME,
    TransferError,
    TransferPlan,
    plan_transfer,
)
from rolemesh.parallel.weights.transfer_sides import Side

HALVES = 2
"""A process packs one bucket while others still read the one before."""


@dataclass(frozen=True)
class Meeting:
    """Where the processes of a transfer meet; the same for all of them.

    `pair` names the two roles; `id` is new whenever their processes are, and known to them alone. `together`
    says that source rank i and target rank i are one process. Every wait for another process has `limit_s`
    seconds.
    Without `shared`, processes of one machine exchange as if they were on two.
    """

    pair: str
    id: str
    address: str
    port: int
    n_sources: int
    n_targets: int
    together: bool = False
    limit_s: float = 600.0
    bucket_bytes: int = 16 << 20
    shared: bool = True

    @property
    def n_processes(self) -> int:
        return self.n_targets if self.together else self.n_sources + self.n_targets

    def source_process(self, rank: int) -> int:
        return rank

    def target_process(self, rank: int) -> int:
        return rank if self.together else self.n_sources + rank


@dataclass(frozen=True)
class Member:
    """What a process tells the others of itself. `gpu` is None on a CPU; rank 0 of a side describes it."""

    what: str
    gpu: str | None
    source: Side | None = None
    target: Side | None = None


@dataclass(frozen=True)
class _Memories:
    """A source process's memory as others open it."""

    path: str | None
    handle: Any


@dataclass
class Link:
    """One process's end of a transfer; `Link.meet` makes it.

    `host`, `device` [HALVES, bucket] uint8: what this process packs into, where it sends at all.
    `read` holds the memory of other processes that are read in place. `holding` is what this process's target
    rank holds, `expected` how many numbers are to come for each of its tensors; both empty for a source.
    """

    meeting: Meeting
    process: int
    members: list[Member]
    plan: TransferPlan
    crossing: Crossing
    steps: list[Step]
    host: Tensor | None
    device: Tensor | None
    read: Mapping[tuple[int, bool], Tensor]
    holding: Mapping[str, Cut]
    expected: Mapping[str, int]
    gloo: Any
    nccl: Any = None
    closed: bool = False
    _rooms: dict[bool, Tensor] = field(default_factory=dict)

    @classmethod
    def meet(cls, meeting: Meeting, process: int, member: Member) -> Link:
        """Meet all other processes; every one of them must call this. Raises TransferError naming those that
        did not come within the limit.
        """
        return _Meet(meeting, process, member).link()

    @property
    def target_rank(self) -> int:
        """This process's rank on the target side; negative for one that only sends."""
        return self.process if self.meeting.together else self.process - self.meeting.n_sources

    def room(self, on_device: bool) -> Tensor:
        """Where this process receives into, [HALVES, bytes of the largest round] uint8."""
        if on_device not in self._rooms:
            most = max(step.received_bytes(on_device) for step in self.steps)
            device = "cuda" if on_device else "cpu"
            self._rooms[on_device] = torch.empty((HALVES, most), dtype=torch.uint8, device=device)
        return self._rooms[on_device]

    @property
    def buffer_bytes(self) -> int:
        """What this process holds to send from and to receive into."""
        return sum(
            room.numel() for room in (self.host, self.device, *self._rooms.values()) if room is not None
        )

    def close(self) -> None:
        """End it; others that wait for this process learn of it at once."""
        if not self.closed:
            self.closed = True
            for group in (self.gloo, self.nccl):
                if group is not None:
                    group.abort()
            self.gloo = self.nccl = None


class _Meet:
    """The steps of a meeting, over a store that all processes reach."""

    def __init__(self, meeting: Meeting, process: int, member: Member) -> None:
        self.meeting, self.process, self.member = meeting, process, member
        self.deadline = time.monotonic() + meeting.limit_s
        limit = timedelta(seconds=meeting.limit_s)
        try:
            store = dist.TCPStore(meeting.address, meeting.port, is_master=False, timeout=limit)
        except RuntimeError as error:
            raise TransferError(
                f"{member.what} cannot reach the store of transfer {meeting.pair} at {meeting.address}:"
                f"{meeting.port} within {meeting.limit_s:g} s: has its process ended? ({error})"
            ) from error
        self.secret = meeting.id.encode()
        self.store = dist.PrefixStore(f"transfer/{hashlib.sha256(self.secret).hexdigest()}", store)

    def link(self) -> Link:
        meeting, process = self.meeting, self.process
        members: list[Member] = self._exchange("member", self.member)
        gpus = [member.gpu for member in members]
        nccl = None not in gpus and len(set(gpus)) == len(gpus)
        sends = process < meeting.n_sources
        memory = HostMemory(HALVES * meeting.bucket_bytes, meeting.shared) if sends and not nccl else None
        try:
            device = self._device_memory(gpus) if sends else None
            handle = None if nccl or device is None else ipc_handle(device)
            told = _Memories(memory.path if memory else None, handle)
            read = self._open(self._exchange("memory", told), gpus, nccl)
            seen: list[set[int]] = self._exchange("seen", {other for other, on_gpu in read if not on_gpu})
        finally:
            if memory is not None:
                memory.forget()

        def route(source: int, target: int) -> Route:
            if source == target:
                return Route.SAME
            if nccl:
                return Route.NCCL
            if gpus[source] is not None and gpus[source] == gpus[target]:
                return Route.IPC
            return Route.SHARED if source in seen[target] else Route.GLOO

        crossing = Crossing(meeting.source_process, meeting.target_process, route)
        plan = self._plan(members, crossing)
        halves = (HALVES, meeting.bucket_bytes)
        holding, expected = self._expected(plan)
        gloo = self._group("gloo", dist.ProcessGroupGloo)
        nccl_group = self._group("nccl", dist.ProcessGroupNCCL) if nccl else None
        self._exchange("joined", True)  # no one may be done, and gone, while another still connects
        return Link(
            meeting,
            process,
            members,
            plan,
            crossing,
            steps_of(plan, crossing, process, meeting.bucket_bytes),
            memory.bytes.view(halves) if memory else None,
            device,
            read,
            holding,
            expected,
            gloo,
            nccl_group,
        )

    def _plan(self, members: list[Member], crossing: Crossing) -> TransferPlan:
        source = next(member.source for member in members if member.source is not None)
        target = next(member.target for member in members if member.target is not None)
        for side, n in ((source, self.meeting.n_sources), (target, self.meeting.n_targets)):
            if side.n_ranks != n:
                raise TransferError(f"{self.meeting.pair}: {side} is {side.n_ranks} ranks, {n} have come")

        def distance(source_rank: int, target_rank: int) -> int:
            at = crossing.source_process(source_rank), crossing.target_process(target_rank)
            route = crossing.route(*at)
            return SAME if route is Route.SAME else NEAR if route.is_read else FAR

        return plan_transfer(source, target, distance)

    def _expected(self, plan: TransferPlan) -> tuple[Mapping[str, Cut], dict[str, int]]:
        rank = self.process if self.meeting.together else self.process - self.meeting.n_sources
        if rank < 0:
            return {}, {}
        holding = plan.target.holdings()[rank]
        expected = dict.fromkeys(holding, 0)
        for move in plan.moves:
            for landing in move.to:
                if landing.rank == rank:
                    expected[landing.name] += move.n_numbers
        return holding, expected

    def _device_memory(self, gpus: list[str | None]) -> Tensor | None:
        own = gpus[self.process]
        if own is None or len(gpus) == 1:
            return None
        return torch.empty((HALVES, self.meeting.bucket_bytes), dtype=torch.uint8, device="cuda")

    def _open(
        self, memories: list[_Memories], gpus: list[str | None], nccl: bool
    ) -> dict[tuple[int, bool], Tensor]:
        """The memory of other source processes that this one can read, by (process, whether on the GPU)."""
        read: dict[tuple[int, bool], Tensor] = {}
        if nccl or (self.process < self.meeting.n_sources and not self.meeting.together):
            return read
        halves = (HALVES, self.meeting.bucket_bytes)
        for other, told in enumerate(memories[: self.meeting.n_sources]):
            if other == self.process:
                continue
            if told.handle is not None and gpus[other] == gpus[self.process]:
                read[other, True] = open_ipc(told.handle)
            if told.path is not None:
                opened = open_host_memory(told.path, HALVES * self.meeting.bucket_bytes)
                if opened is not None:
                    read[other, False] = opened.view(halves)
        return read

    def _exchange(self, what: str, value: Any) -> list[Any]:
        """Every process's value, by process."""
        own = f"{what}/{self.process}"
        self.store.set(own, sealed(value, self.secret, own))  # type: ignore[arg-type]  # bytes too
        keys = [f"{what}/{other}" for other in range(self.meeting.n_processes)]
        left_s = max(0.05, self.deadline - time.monotonic())
        try:
            self.store.wait(keys, timedelta(seconds=left_s))
            told = self.store.multi_get(keys)
            return [unsealed(value, self.secret, key) for key, value in zip(keys, told, strict=True)]
        except SealError as error:
            raise TransferError(f"transfer {self.meeting.pair}: {error}") from error
        except RuntimeError as error:
            raise TransferError(self._late(what, error)) from error

    def _late(self, what: str, error: Exception) -> str:
        try:
            late = [p for p in range(self.meeting.n_processes) if not self.store.check([f"{what}/{p}"])]
        except RuntimeError:
            return f"the store of transfer {self.meeting.pair} is gone: its process has ended ({error})"
        names = ", ".join(_name(self.meeting, process) for process in late)
        return (
            f"transfer {self.meeting.pair}: {self.member.what} waited {self.meeting.limit_s:g} s for "
            f"{names}, which did not come ({what})"
        )

    def _group(self, backend: str, cls: Any) -> Any:
        if self.meeting.n_processes == 1:
            return None
        limit = timedelta(seconds=self.meeting.limit_s)
        store = dist.PrefixStore(backend, self.store)
        try:
            if backend == "gloo":
                return cls(store, self.process, self.meeting.n_processes, limit)
            options = cls.Options()
            options._timeout = limit
            return cls(store, self.process, self.meeting.n_processes, options)
        except RuntimeError as error:
            raise TransferError(
                f"transfer {self.meeting.pair}: {self.member.what} could not join {backend} with "
                f"{self.meeting.n_processes - 1} others within {self.meeting.limit_s:g} s: {error}"
            ) from error


def _name(meeting: Meeting, process: int) -> str:
    if process < meeting.n_sources:
        return f"source rank {process}"
    return f"target rank {process - meeting.n_sources}"
