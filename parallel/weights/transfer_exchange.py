"""One transfer through one process: pack, send, receive, put in place, round after round."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rolemesh.parallel.weights.transfer_link import HALVES, Link
from rolemesh.parallel.weights.transfer_packets import Packet, Route, Step
from rolemesh.parallel.weights.transfer_plan import Box, Move, TransferError

Land = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
"""(name, shape, type) to the memory where that tensor is to lie."""

_POLL_S = 0.0005
_DATA, _READY, _READ = 0, 1, 2  # kinds of messages: numbers; they can be read here; they were read


@dataclass
class TransferReport:
    """What went through one process, counted where it is sent, received or read.

    `copied_bytes` came from the process's own memory; `by_route` are the received bytes by the way they came.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    copied_bytes: int = 0
    seconds: float = 0.0
    by_route: dict[str, int] = field(default_factory=dict)


class _Under(NamedTuple):
    """Something under way between this process and another one."""

    work: Any
    other: int
    on_device: bool = False


class _Arriving(NamedTuple):
    """A packet on its way here, and where its bytes will be."""

    under: _Under
    packet: Packet
    memory: Tensor
    route: Route


class Exchange:
    """`tensors` are what this process gives, `land` says where what it takes is to lie (None: a source)."""

    def __init__(self, link: Link, tensors: Mapping[str, Tensor], land: Land | None) -> None:
        self.link, self.tensors, self.land = link, tensors, land
        self.report = TransferReport()
        self._missing = {} if land is None else dict(link.expected)
        self._landed: dict[str, Tensor] = {}
        self._sending: dict[int, list[_Under]] = defaultdict(list)  # by round
        self._arriving: dict[int, list[_Arriving]] = defaultdict(list)

    def run(self) -> Iterator[tuple[str, Tensor]]:
        """Every round in turn; a round is packed while the one before is on its way."""
        begin, steps = time.perf_counter(), self.link.steps
        for name in [name for name, n in self._missing.items() if n == 0]:
            yield name, self._place(name)
        for n, step in enumerate(steps):
            self._wait_until_read(n - HALVES)
            self._start(n, step)
            yield from self._copy(step)
            yield from self._arrive(n - 1)
        yield from self._arrive(len(steps) - 1)
        for n in sorted(self._sending):
            self._wait_until_read(n)
        self.report.seconds = time.perf_counter() - begin

    def _start(self, n: int, step: Step) -> None:
        """Pack what goes out in round `n` and start all its sends and receives."""
        together: list[tuple[Callable[..., Any], Tensor, int]] = []  # NCCL wants a round's in one group
        for packet in step.outgoing:
            self._send(n, packet, self._pack(n, packet), together)
        self._announce(n, step)
        arriving = self._expect(n, step, together)
        if together:
            work = _Under(_grouped(self.link.nccl, together), self.link.process, on_device=True)
            self._sending[n].append(work)
            arriving = [a._replace(under=work) if a.route is Route.NCCL else a for a in arriving]
        self._arriving[n] = arriving

    def _pack(self, n: int, packet: Packet) -> Tensor:
        memory = self.link.device if packet.on_device else self.link.host
        assert memory is not None, "a process that sends has memory to pack into"
        packed = memory[n % HALVES][packet.offset : packet.offset + packet.n_bytes]
        for move, start in zip(packet.moves, packet.starts, strict=True):
            self._numbers(packed, move, start).copy_(_part(self.tensors[move.name], move.start, move.box))
        return packed

    def _send(self, n: int, packet: Packet, packed: Tensor, together: list[Any]) -> None:
        for reader in packet.readers:
            route = self.link.crossing.route(self.link.process, reader)
            self.report.sent_bytes += packet.n_bytes
            if route is Route.NCCL:
                together.append((self.link.nccl.send, packed, reader))
            elif route is Route.GLOO:
                self._sending[n].append(self._begin(self.link.gloo.send, packed, reader, n, _DATA))

    def _announce(self, n: int, step: Step) -> None:
        """Tell those who read this process's memory that the round is there; they tell when it is read."""
        readers = self._read_by(step.outgoing)
        if self.link.device is not None and readers:
            torch.cuda.current_stream().synchronize()
        for reader in readers:
            ready, done = torch.ones(1, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)
            self._sending[n].append(self._begin(self.link.gloo.send, ready, reader, n, _READY))
            self._sending[n].append(self._begin(self.link.gloo.recv, done, reader, n, _READ))

    def _read_by(self, outgoing: list[Packet]) -> list[int]:
        own, route = self.link.process, self.link.crossing.route
        return list(dict.fromkeys(r for packet in outgoing for r in packet.readers if route(own, r).is_read))

    def _expect(self, n: int, step: Step, together: list[Any]) -> list[_Arriving]:
        """Start to receive what comes in round `n`."""
        arriving, told = list[_Arriving](), set[int]()
        used = {False: 0, True: 0}
        for packet in step.incoming:
            other = packet.process
            route = self.link.crossing.route(other, self.link.process)
            if route.is_read:
                under = _Under(
                    None, other
                )  # a message is waited for once, also where several packets follow it
                if other not in told:
                    ready = torch.empty(1, dtype=torch.uint8)
                    under = self._begin(self.link.gloo.recv, ready, other, n, _READY)
                    told.add(other)
                    self._count(1, route)
                memory = self.link.read[other, packet.on_device][n % HALVES][packet.offset :]
                arriving.append(_Arriving(under, packet, memory, route))
                continue
            start = used[packet.on_device]
            used[packet.on_device] += packet.n_bytes
            memory = self.link.room(packet.on_device)[n % HALVES][start : start + packet.n_bytes]
            if route is Route.NCCL:
                together.append((self.link.nccl.recv, memory, other))
                under = _Under(None, other)
            else:
                under = self._begin(self.link.gloo.recv, memory, other, n, _DATA)
            arriving.append(_Arriving(under, packet, memory, route))
        return arriving

    def _begin(self, call: Callable[..., Any], memory: Tensor, other: int, n: int, kind: int) -> _Under:
        """Start a send or receive over gloo, which may know already that the other has ended."""
        try:
            return _Under(call([memory], other, _tag(n, kind)), other)
        except RuntimeError as error:
            raise self._lost(other, n, error) from error

    def _arrive(self, n: int) -> Iterator[tuple[str, Tensor]]:
        """Put in place what comes in round `n`; the tensors that are whole with it."""
        readable = dict[int, None]()
        for under, packet, memory, route in self._arriving.pop(n, []):
            self._wait(under, n)
            self._count(packet.n_bytes, route)
            for move, start in zip(packet.moves, packet.starts, strict=True):
                yield from self._put(move, self._numbers(memory, move, start))
            if route.is_read:
                readable[packet.process] = None
        if readable and self._on_gpu:
            torch.cuda.current_stream().synchronize()
        for other in readable:
            read = torch.ones(1, dtype=torch.uint8)
            self._sending[n].append(self._begin(self.link.gloo.send, read, other, n, _READ))

    def _copy(self, step: Step) -> Iterator[tuple[str, Tensor]]:
        """What stays in this process."""
        for move, landing in step.copies:
            self.report.copied_bytes += self.link.plan.n_bytes(move)
            part = _part(self.tensors[move.name], move.start, move.box)
            yield from self._put(move._replace(to=(landing,)), part)

    def _put(self, move: Move, numbers: Tensor) -> Iterator[tuple[str, Tensor]]:
        for landing in move.to:
            if landing.rank != self.link.target_rank:
                continue
            _part(self._place(landing.name), landing.start, move.box).copy_(numbers)
            self._missing[landing.name] -= move.n_numbers
            if self._missing[landing.name] == 0:
                yield landing.name, self._landed.pop(landing.name)

    def _place(self, name: str) -> Tensor:
        """Where a tensor of the target lies."""
        if name not in self._landed:
            assert self.land is not None
            side, rank = self.link.plan.target, self.link.target_rank
            shape = self.link.holding[name].shape
            place = self.land(name, shape, side.dtype_of(name))
            if tuple(place.shape) != shape:
                raise TransferError(
                    f"{self._me}, target rank {rank}: {name} is {list(place.shape)} there, the weights that "
                    f"come are {list(shape)}: is it another model?"
                )
            self._landed[name] = place
        return self._landed[name]

    def _numbers(self, memory: Tensor, move: Move, start: int) -> Tensor:
        """A move's numbers among packed bytes, in its box's shape."""
        plan = self.link.plan
        return memory[start : start + plan.n_bytes(move)].view(plan.wire(move.tensor)).view(move.box.shape)

    def _count(self, n_bytes: int, route: Route) -> None:
        self.report.received_bytes += n_bytes
        name = route.name.lower()
        self.report.by_route[name] = self.report.by_route.get(name, 0) + n_bytes

    def _wait_until_read(self, n: int) -> None:
        """Until others have all that this process sent in round `n`: its memory is free then."""
        for under in self._sending.pop(n, []):
            self._wait(under, n)

    def _wait(self, under: _Under, n: int) -> None:
        limit_s = self.link.meeting.limit_s
        try:
            if under.work is None:
                return
            if under.on_device:
                _wait_on_device(under.work, limit_s)
            else:
                under.work.wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            raise self._lost(under.other, n, error) from error

    def _lost(self, other: int, n: int, error: Exception) -> TransferError:
        """What a send or receive that failed in round `n` says of the one at its other end."""
        name, limit_s = self.link.members[other].what, self.link.meeting.limit_s
        late = "timed out" in str(error).lower()
        why = f"waited {limit_s:g} s for {name}" if late else f"lost {name}: it has ended or given up"
        where = f"transfer {self.link.meeting.pair}, round {n + 1} of {len(self.link.steps)}"
        return TransferError(f"{where}: {self._me} {why} ({str(error).splitlines()[0]})")

    @property
    def _me(self) -> str:
        return self.link.members[self.link.process].what

    @property
    def _on_gpu(self) -> bool:
        return self.link.members[self.link.process].gpu is not None


def _part(tensor: Tensor, start: tuple[int, ...], box: Box) -> Tensor:
    """The box's numbers in a tensor that holds them from `start`."""
    return tensor[tuple(slice(low, low + size) for low, size in zip(start, box.shape, strict=True))]


def _tag(n: int, kind: int) -> int:
    """What a message of round `n` is known by between two processes."""
    return 3 * n + kind


def _grouped(group: Any, together: list[tuple[Callable[..., Any], Tensor, int]]) -> Any:
    """Start NCCL's sends and receives at once: one after the other they could wait for each other."""
    device = together[0][1].device
    group._start_coalescing(device)
    for call, memory, other in together:
        call([memory], other, 0)
    return group._end_coalescing(device)


def _wait_on_device(work: Any, limit_s: float) -> None:
    work.wait()
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + limit_s
    while not done.query():
        if time.monotonic() > deadline:
            raise RuntimeError(f"timed out after {limit_s:g} s on the GPU")
        time.sleep(_POLL_S)
