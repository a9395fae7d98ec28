"""What one process packs, sends, reads and copies in each round of a transfer: follows from the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from rolemesh.parallel.weights.transfer_plan import Landing, Move, TransferPlan, aligned, rounds


class Route(Enum):
    """How numbers come from one process to another."""

    SAME = auto()  # a copy inside the process
    SHARED = auto()  # the reader sees the sender's host memory
    IPC = auto()  # the reader sees the sender's CUDA memory: two processes on one GPU
    GLOO = auto()
    NCCL = auto()

    @property
    def is_read(self) -> bool:
        """Whether the receiver reads the sender's memory in place."""
        return self in (Route.SHARED, Route.IPC)

    @property
    def on_device(self) -> bool:
        """Whether the numbers are packed in the device's memory."""
        return self in (Route.IPC, Route.NCCL)


@dataclass(frozen=True)
class Packet:
    """Moves that one process packs one after the other for the same readers, `offset` bytes into memory."""

    process: int
    readers: tuple[int, ...]  # processes
    on_device: bool
    offset: int
    moves: tuple[Move, ...]
    starts: tuple[int, ...]  # of each move, bytes into the packet
    n_bytes: int


class Copy(NamedTuple):
    """A move that ends in a tensor of this process."""

    move: Move
    landing: Landing


@dataclass
class Step:
    """One round, as one process sees it."""

    copies: list[Copy] = field(default_factory=list)
    outgoing: list[Packet] = field(default_factory=list)
    incoming: list[Packet] = field(default_factory=list)

    def received_bytes(self, on_device: bool) -> int:
        """What comes by message, not read in place, is what needs room; this is the most that it can be."""
        return sum(packet.n_bytes for packet in self.incoming if packet.on_device == on_device)


@dataclass(frozen=True)
class Crossing:
    """Which processes the ranks of both sides are, and how each pair exchanges."""

    source_process: Callable[[int], int]
    target_process: Callable[[int], int]
    route: Callable[[int, int], Route]

    def far(self, move: Move) -> tuple[Landing, ...]:
        """The landings in other processes."""
        own = self.source_process(move.source)
        return tuple(landing for landing in move.to if self.target_process(landing.rank) != own)


def steps_of(plan: TransferPlan, crossing: Crossing, process: int, bucket_bytes: int) -> list[Step]:
    """The rounds of `process`, the same number for every process of the transfer."""
    return [_step(plan, crossing, process, moves) for moves in rounds(plan, bucket_bytes, crossing.far)]


def _step(plan: TransferPlan, crossing: Crossing, process: int, moves: Sequence[Move]) -> Step:
    step, bundles = Step(), dict[tuple[int, bool, tuple[int, ...]], list[Move]]()
    for move in moves:
        own = crossing.source_process(move.source)
        to = [(landing, crossing.target_process(landing.rank)) for landing in move.to]
        step.copies += [Copy(move, landing) for landing, at in to if own == at == process]
        for on_device in (False, True):
            apart = [at for _, at in to if at != own and crossing.route(own, at).on_device == on_device]
            if apart:
                bundles.setdefault((own, on_device, tuple(dict.fromkeys(apart))), []).append(move)
    used: dict[tuple[int, bool], int] = {}
    for (own, on_device, readers), bundled in bundles.items():
        offset = used.get((own, on_device), 0)
        starts, end = list[int](), 0
        for move in bundled:
            starts.append(end)
            end += aligned(plan.n_bytes(move))
        used[own, on_device] = offset + end
        packet = Packet(own, readers, on_device, offset, tuple(bundled), tuple(starts), end)
        if own == process:
            step.outgoing.append(packet)
        if process in readers:
            step.incoming.append(packet)
    return step
