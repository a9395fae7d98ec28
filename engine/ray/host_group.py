"""All processes of one torch.distributed world on a pool: starting them, running one operation on them.

The watcher waits for all ranks at once: the first exception or death ends the call within seconds, whatever
the other ranks wait for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from rolemesh.engine.batch_ref import BatchRef
from rolemesh.engine.errors import CallError, CallTimeout, WorkerDied, WorkerError
from rolemesh.engine.parts import PartRef
from rolemesh.engine.ray.host import STACK_GAP, Host, HostInfo, HostPlace, HostState, PartHead, Reply, Request
from rolemesh.engine.worker_log import ENDED
from rolemesh.parallel.weights.transfer_plan import TransferError

SILENT_S = 300.0
_GRACE_S = 5.0  # for the other ranks once one has failed: most fail too, or end
_BEAT_S = 2.0
_POLL_S = 0.5
_CONTROL_S = 5.0
_LOG_LINES = 20
_LAST_WORDS_S = 2.0


@dataclass(frozen=True)
class Seat:
    """Where one process goes: its place in the pool and Ray's options for the actor."""

    place: HostPlace
    options: dict[str, Any]


class HostGroup:
    """Handles on the processes. Once `broken` is set they are killed and every call raises.

    `store` is where rank 0 keeps the rendezvous store of their world, once they are connected. A process
    whose control thread answers nothing for `silent_s` is taken for dead.
    """

    def __init__(self, seats: Sequence[Seat], silent_s: float = SILENT_S) -> None:
        actor = ray.remote(concurrency_groups={"compute": 1, "control": 2})(Host)  # type: ignore[call-overload]
        self._places = [seat.place for seat in seats]
        self._hosts = [actor.options(max_restarts=0, **seat.options).remote(seat.place) for seat in seats]
        self._infos: list[HostInfo | None] = [None] * len(seats)
        self.broken: BaseException | None = None
        self.store: tuple[str, int] | None = None
        self.silent_s = silent_s
        self._beats = [Heartbeat() for _ in seats]
        self._oom_kills = _oom_kills()
        self._last = "before the first"  # operation

    def connect(self, timeout_s: float) -> None:
        """Wait for the processes and their common world; any failure names the rank and breaks the group.

        Raises WorkerError, WorkerDied, CallTimeout.
        """
        try:
            self._connect(time.monotonic() + timeout_s, timeout_s)
        except BaseException as error:
            self.break_with(error)
            raise

    def run(
        self,
        requests: Sequence[Request],
        timeout_s: float,
        made: Callable[[int, PartRef], None] = lambda rank, part: None,
    ) -> list[Reply]:
        """Carry out one operation on ranks 0 to len(requests) - 1; their replies, blocks in place.

        `made(rank, part)` is told each part of a call that makes parts, rows counted in the rank's share.
        Raises WorkerError (the first rank that raised), WorkerDied, CallTimeout. When ranks are still busy
        after that, all processes are killed and the group is broken.
        """
        step = "" if requests[0].step is None else f" of step {requests[0].step}"
        self._last = f"after {requests[0].role}.{requests[0].method}{step}"
        return _Watch(self, requests, timeout_s, made).replies()

    def stacks(self, ranks: Iterable[int] | None = None, timeout_s: float = _CONTROL_S) -> dict[int, str]:
        """The Python stacks of the processes, by rank, also while they compute."""
        ranks = range(len(self._hosts)) if ranks is None else ranks
        asked = {rank: self._control(rank, "stacks") for rank in ranks}
        return self._answers(asked, timeout_s)

    def states(self, timeout_s: float = _CONTROL_S) -> dict[int, Any]:
        """What every process is doing (`HostState`), by rank; a message where one does not answer."""
        asked = {rank: self._control(rank, "state") for rank in range(len(self._hosts))}
        return self._answers(asked, timeout_s)

    def memory(self, timeout_s: float = _CONTROL_S) -> dict[int, Any]:
        """The most each process has held (`HostMemory`), by rank; a message where one does not answer."""
        asked = {rank: self._control(rank, "memory") for rank in range(len(self._hosts))}
        return self._answers(asked, timeout_s)

    def ask(
        self, role: str, method: str, args: tuple[Any, ...], ranks: Sequence[int], timeout_s: float
    ) -> list[Any]:
        """What a method that neither computes nor communicates returns on `ranks`, also while they compute.

        Raises WorkerError, WorkerDied, CallTimeout.
        """
        refs = {
            self._hosts[rank].ask.options(concurrency_group="control").remote(role, method, args): rank
            for rank in ranks
        }
        _, late = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
        if late:
            where = ", ".join(f"rank {refs[ref]} on {self._places[refs[ref]].node}" for ref in late)
            raise CallTimeout(f"{role}.{method} not answered within {timeout_s:g} s by {where}")
        for ref, rank in refs.items():
            try:
                ray.get(ref)
            except RayActorError as error:
                raise self.death(rank, role, method, error) from error
            except RayError as error:
                raise WorkerError(role, rank, self._places[rank].node, method, str(error)) from error
        return ray.get(list(refs))

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank (each on its own node)."""
        return [info.pid for info in self._infos if info is not None]

    def kill(self) -> None:
        """End all processes at once."""
        for host in self._hosts:
            with contextlib.suppress(RayError):
                ray.kill(host)

    def break_with(self, cause: BaseException) -> None:
        """Kill the processes and remember the first cause."""
        self.broken = self.broken or cause
        self.kill()

    def start(self, rank: int, request: Request) -> Any:
        """Ray's stream of one rank's blocks and reply."""
        method = self._hosts[rank].run.options(num_returns="streaming", concurrency_group="compute")
        return method.remote(request)

    def place(self, rank: int) -> HostPlace:
        return self._places[rank]

    def lost(self) -> CallError | None:
        """The death or hang that keeps the processes from going on; None where all answer, or where an
        operation that raised has ended them.
        """
        if self.broken is not None:
            return self.broken if isinstance(self.broken, WorkerDied | CallTimeout) else None
        return self.unreachable(range(len(self._hosts)), self._places[0].pool, f"no operation, {self._last}")

    def unreachable(self, ranks: Iterable[int], role: str, operation: str) -> WorkerDied | None:
        """The error for the first of `ranks` that is dead or does not answer, if any."""
        asked = {rank: self._control(rank, "state") for rank in ranks}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_CONTROL_S)
        for rank, ref in asked.items():
            try:
                ray.get(ref, timeout=0.1)
            except GetTimeoutError:
                return self.silent(rank, role, operation, _CONTROL_S)
            except RayError as error:
                return self.death(rank, role, operation, error)
        return None

    def heartbeat(self, rank: int) -> float:
        """Ask a rank for its state, unless it owes the last one; for how many seconds it has owed that."""
        beat = self._beats[rank]
        if beat.asked is not None:
            ready, _ = ray.wait([beat.asked], timeout=0)
            if not ready:
                return time.monotonic() - beat.asked_s
            with contextlib.suppress(RayError):  # a death ends the rank's stream too
                beat.last, beat.last_s = ray.get(beat.asked), time.monotonic()
        beat.asked, beat.asked_s = self._control(rank, "state"), time.monotonic()
        return 0.0

    def silent(self, rank: int, role: str, operation: str, for_s: float) -> WorkerDied:
        """The error for a process that answers nothing: stopped, without a processor, or cut off."""
        how = f"it has answered nothing for {for_s:.0f} s: stopped, swapped out, or its node is gone"
        return self._died(rank, role, operation, how)

    def death(self, rank: int, role: str, operation: str, error: RayError) -> WorkerDied:
        """The error for a process that is gone: how, and the end of its log."""
        return self._died(rank, role, operation, _ray_reason(error))

    def _died(self, rank: int, role: str, operation: str, how: str) -> WorkerDied:
        info, beat, memory = self._infos[rank], self._beats[rank], psutil.virtual_memory()
        lines = [] if info is None else _last_lines(info)
        told = [line.partition("| ")[2] for line in lines[-1:] if ENDED in line] + [how]
        if beat.last is not None:
            told.append(f"last heartbeat {time.monotonic() - beat.last_s:.0f} s before: {beat.last}")
        told.append(
            f"the driver's node has {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB memory "
            f"available now"
        )
        if (kills := _oom_kills() - self._oom_kills) > 0:
            told.append(f"its kernel ended {kills} processes for want of memory since the workers started")
        where = "it left no log" if info is None else f"last lines of {info.log_path} (on that node):"
        log = "\n".join([where, *lines])
        return WorkerDied(role, rank, self._places[rank].node, operation, "\n".join(told), log)

    def _control(self, rank: int, method: str) -> Any:
        return getattr(self._hosts[rank], method).options(concurrency_group="control").remote()

    def _answers(self, asked: dict[int, Any], timeout_s: float) -> dict[int, Any]:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
        answers = {}
        for rank, ref in asked.items():
            try:
                answers[rank] = ray.get(ref, timeout=0.1)
            except (GetTimeoutError, RayError) as error:
                answers[rank] = f"rank {rank} does not answer: {type(error).__name__}"
        return answers

    def _connect(self, deadline: float, limit_s: float) -> None:
        self._infos = self._on_all("start", [host.info.remote() for host in self._hosts], deadline, limit_s)
        opened = [self._hosts[0].open_store.options(concurrency_group="compute").remote()]
        [(address, port)] = self._on_all("rendezvous", opened, deadline, limit_s)
        self.store = (address, port)
        joins = [
            host.connect.options(concurrency_group="compute").remote(address, port) for host in self._hosts
        ]
        self._on_all("rendezvous", joins, deadline, limit_s)

    def _on_all(self, step: str, refs: list[Any], deadline: float, limit_s: float) -> list[Any]:
        ranks = {ref: rank for rank, ref in enumerate(refs)}
        pending, pool = list(refs), self._places[0].pool
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(f"rank {ranks[ref]} on {self._places[ranks[ref]].node}" for ref in pending)
                raise CallTimeout(f"pool {pool!r}: {step} not done within {limit_s:g} s by {late}")
            rank = ranks[ready[0]]
            try:
                ray.get(ready[0])
            except RayActorError as error:
                raise self.death(rank, f"pool {pool}", step, error) from error
            except RayError as error:
                raise WorkerError(f"pool {pool}", rank, self._places[rank].node, step, str(error)) from error
        return ray.get(refs)


@dataclass
class Heartbeat:
    """What a process last said that it does, and the question that it still owes an answer."""

    last: HostState | None = None
    last_s: float = 0.0
    asked: Any = None
    asked_s: float = 0.0


class _Watch:
    """One operation under way: the ranks still busy, what arrived of each, and the first failure."""

    def __init__(
        self,
        group: HostGroup,
        requests: Sequence[Request],
        timeout_s: float,
        made: Callable[[int, PartRef], None],
    ) -> None:
        self._group = group
        self._made = made
        self._in_parts = requests[0].parts
        self._heads: dict[int, PartHead] = {}  # of the part that a rank's stream is in
        self._role, self._operation = requests[0].role, requests[0].method
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._busy = {group.start(rank, request): rank for rank, request in enumerate(requests)}
        self._arrived: list[list[Any]] = [[] for _ in requests]
        self._replies: list[Reply | None] = [None] * len(requests)
        self._failures: list[tuple[float, CallError]] = []  # when it happened, what
        self._dead = False
        self._next_beat_s = time.monotonic() + _BEAT_S

    def replies(self) -> list[Reply]:
        while self._busy:
            limit_s = self._deadline - time.monotonic()
            if limit_s <= 0:
                break
            ready, _ = ray.wait(
                list(self._busy), num_returns=1, timeout=min(limit_s, _POLL_S), fetch_local=False
            )
            for stream in ready:
                self._advance(stream)
            self._listen()
        if self._busy and not self._failures:
            self._failures.append((time.time(), self._late()))
        if self._failures:
            error = self._cause()
            if self._busy or self._dead:
                self._group.break_with(error)
            raise error
        return [reply for reply in self._replies if reply is not None]

    def _listen(self) -> None:
        """Ask the busy ranks for a heartbeat, now and then; one that is silent for too long is dead."""
        if self._dead or time.monotonic() < self._next_beat_s:
            return
        self._next_beat_s = time.monotonic() + _BEAT_S
        for rank in self._busy.values():
            silent_s = self._group.heartbeat(rank)
            if silent_s > self._group.silent_s and not self._dead:
                self._fail(
                    time.time(), self._group.silent(rank, self._role, self._operation, silent_s), dead=True
                )

    def _cause(self) -> CallError:
        """The failure that the others come from: a death, else the first; where ranks are still busy after an
        error, one of them may be gone, which was the cause then.
        """
        by_time = [
            error
            for _, error in sorted(self._failures, key=lambda failure: (_follows(failure[1]), failure[0]))
        ]
        death = next((error for error in by_time if isinstance(error, WorkerDied)), None)
        if death is None and self._busy and isinstance(by_time[0], WorkerError):
            death = self._group.unreachable(self._busy.values(), self._role, self._operation)
            self._dead = self._dead or death is not None
        if death is not None and death is not by_time[0]:
            death.__cause__ = by_time[0]
        return death or by_time[0]

    def _advance(self, stream: Any) -> None:
        """Take what a rank's stream has ready; at its end, its last item is the reply."""
        rank = self._busy[stream]
        try:
            item = next(stream)
            if item == stream.completed():  # Ray's own last item, in place of any that a dead process owed
                ray.get(item, timeout=_CONTROL_S)
            self._arrived[rank].append(item)
            if self._in_parts:
                self._advance_part(rank)
            return
        except StopIteration:
            del self._busy[stream]
        except RayError as error:
            del self._busy[stream]
            self._fail(time.time(), self._group.death(rank, self._role, self._operation, error), dead=True)
            return
        *blocks, last = self._arrived[rank]
        place = self._group.place(rank)
        try:
            reply = ray.get(last, timeout=_CONTROL_S)
        except RayError as error:
            self._fail(time.time(), self._group.death(rank, self._role, self._operation, error), dead=True)
            return
        if reply.remote_traceback is None:
            self._replies[rank] = replace(reply, value=_with_blocks(reply.value, blocks, place.node))
            return
        failure = WorkerError(self._role, rank, place.node, self._operation, reply.remote_traceback)
        failure.__cause__ = reply.error
        self._fail(reply.end_s, failure)

    def _advance_part(self, rank: int) -> None:
        """Tell of the part that a rank's stream is in, once its head and all its blocks are there."""
        first, *blocks = self._arrived[rank]
        if rank not in self._heads:
            head = ray.get(first, timeout=_CONTROL_S)
            if not isinstance(head, PartHead):
                return  # the reply, which ends the stream
            self._heads[rank] = head
        head = self._heads[rank]
        if len(blocks) == len(head.manifest.blocks):
            del self._heads[rank]
            self._arrived[rank] = []
            ref = head.manifest.stored(blocks, self._group.place(rank).node)
            self._made(rank, PartRef(head.rows, ref))

    def _fail(self, when_s: float, error: CallError, dead: bool = False) -> None:
        if not self._failures:
            self._deadline = min(self._deadline, time.monotonic() + _GRACE_S)
        self._failures.append((when_s, error))
        self._dead = self._dead or dead

    def _late(self) -> CallTimeout:
        ranks = sorted(self._busy.values())
        stacks, states = self._group.stacks(ranks), self._group.states()
        described = "\n".join(
            f"{self._role} rank {rank} on node {self._group.place(rank).node}, last seen in "
            f"{getattr(states[rank], 'doing', states[rank])}:\n{stacks[rank].partition(STACK_GAP)[0]}"
            for rank in ranks
        )
        done = [rank for rank, reply in enumerate(self._replies) if reply is not None]
        return CallTimeout(
            f"{self._role}.{self._operation} not done within {self._timeout_s:g} s: late ranks {ranks}, "
            f"done ranks {done}\n{described}"
        )


def _with_blocks(value: Any, blocks: list[Any], node: str) -> Any:
    if isinstance(value, BatchRef):
        return value.stored(blocks, node)
    return value


def _follows(error: CallError) -> bool:
    """Whether a rank failed as another one left a transfer, which comes before that one tells its error."""
    return isinstance(error.__cause__, TransferError)


def _ray_reason(error: RayError) -> str:
    """What Ray knows of a death, without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = " ".join(lines).partition(" Some common causes include")[0]
    return reason.partition("Worker exit detail: ")[2] or reason or type(error).__name__


def _oom_kills() -> int:
    """Processes that this machine's kernel has ended for want of memory."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(counters.get("oom_kill", 0))


def _last_lines(info: HostInfo) -> list[str]:
    """The end of a process's log; of one that has just ended, with how, where that is known."""
    path, deadline = Path(info.log_path), time.monotonic() + _LAST_WORDS_S
    while True:
        try:
            lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        except OSError:
            return []
        if any(ENDED in line for line in lines[-1:]) or time.monotonic() > deadline:
            return lines
        time.sleep(0.05)
