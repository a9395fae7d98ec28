"""The process on one device of a pool: a Ray actor that hosts every role of the pool.

One thread computes, one operation at a time; another answers state and stack dumps meanwhile. What an
operation returns goes out as a stream of stored blocks that ends with a small `Reply`.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
import torch.distributed as dist

from rolemesh.engine.batch_ref import BatchRef, pack
from rolemesh.engine.dispatch import OutputCuts
from rolemesh.engine.loggers.secrets import MORE
from rolemesh.engine.parts import Part
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.ray.blocks import fetch_batch
from rolemesh.engine.ray.cluster import LAUNCHER_VARIABLES
from rolemesh.engine.user_file import UserClass
from rolemesh.engine.worker import Worker, WorkerContext
from rolemesh.engine.worker_log import WorkerLog
from rolemesh.kernels.forms import record_kernels
from rolemesh.placement.layout import Layout

STACK_GAP = "\n\n"  # between the threads of a stack dump
_OF_THE_DRIVER = ("ROLEMESH_KERNELS", MORE)


def _drivers_choices() -> dict[str, str]:
    return {name: os.environ[name] for name in _OF_THE_DRIVER if os.environ.get(name)}


@dataclass(frozen=True)
class HostPlace:
    """Where a process stands in its pool, and the limits it works under.

    `environ` are variables of the process that makes the place, the driver: its choice of kernels, and of
    what logs hide, holds on every node, whatever environment the node's Ray was started in. Its log goes into
    the folder `logs`; None: where Ray puts it.
    """

    pool: str
    rank: int
    world_size: int
    local_rank: int
    node: str
    device: str
    threads: int
    collective_timeout_s: float
    fetch_timeout_s: float
    logs: str | None = None
    environ: Mapping[str, str] = field(default_factory=_drivers_choices)


@dataclass(frozen=True)
class HostInfo:
    """How to find a process and its output."""

    pid: int
    log_path: str


@dataclass(frozen=True)
class WorkerSpec:
    """A worker to create: its class, the arguments of its constructor and its layout."""

    cls: type[Worker] | UserClass
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    layout: Layout


@dataclass(frozen=True)
class Request:
    """One operation for one rank; `create` makes the role's worker instead of calling a method of it."""

    role: str
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    materialize: bool = True
    cuts: OutputCuts | None = None
    create: WorkerSpec | None = None
    parts: bool = False
    step: int | None = None


@dataclass(frozen=True)
class PartHead:
    """Announces a part in the stream of a call that makes them; the blocks of `manifest` follow."""

    rows: tuple[int, ...]
    manifest: BatchRef


@dataclass(frozen=True)
class Reply:
    """The end of a stream: the value (its blocks by their place in the stream) or what was raised.

    `kernels` are the forms that ran, as `record_kernels` writes them, in order of their names; `notes` what
    the worker noted.
    """

    value: Any
    start_s: float
    end_s: float
    nbytes_fetched: int
    kernels: tuple[str, ...] = ()
    remote_traceback: str | None = None
    error: BaseException | None = None
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HostState:
    """What a process is doing: the operation, or None, and for how long; what memory it and its node have.

    `phase` is what the operation is at, where its name does not say it; without an operation what the process
    does instead, and `step` that of the last one.
    """

    operation: str | None
    seconds: float
    step: int | None = None
    resident_bytes: int = 0
    available_bytes: int = 0  # of its node
    phase: str = ""

    @property
    def doing(self) -> str:
        """The operation and its phase, or the phase between operations."""
        if self.operation is None:
            return self.phase or "between operations"
        return f"{self.operation}{f' ({self.phase})' if self.phase else ''}"

    def __str__(self) -> str:
        step = "" if self.step is None else f" of step {self.step}"
        return (
            f"{self.doing}{step}{'' if self.operation else ','} for {self.seconds:.0f} s, "
            f"{self.resident_bytes / 2**30:.2f} GiB resident, "
            f"{self.available_bytes / 2**30:.1f} GiB of its node's memory available"
        )


@dataclass(frozen=True)
class HostMemory:
    """The most that a process has held so far; `what` says of which memory.

    `base_bytes` of it were there before the first model; `device_bytes` is what its device has in all (0
    where that is no device's own).
    """

    peak_bytes: int
    what: str
    base_bytes: int = 0
    device_bytes: int = 0


class Host:
    """Body of the actor; `run` has the compute thread, the rest may be called while it is busy."""

    def __init__(self, place: HostPlace) -> None:
        self._place = place
        self._roles: dict[str, Worker] = {}
        self._store: dist.Store | None = None
        self._operation: str | None = None
        self._step: int | None = None
        self._since_s, self._phase = time.monotonic(), "starting"
        self._compute_thread = 0
        self._nbytes_fetched = 0
        self._notes: dict[str, Any] = {}
        self._shared: dict[str, Any] = {}
        self._log: WorkerLog | None = None
        self._base_bytes = 0
        _isolate(place)
        if place.logs is not None:
            self._log = _own_log(place, Path(place.logs))

    def info(self) -> HostInfo:
        path = os.readlink("/proc/self/fd/2") if self._log is None else str(self._log.path)
        return HostInfo(pid=os.getpid(), log_path=path)

    def open_store(self) -> tuple[str, int]:
        """Rank 0: bind the pool's rendezvous store to a free port and keep it; its address."""
        address = ray.util.get_node_ip_address()
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return address, port

    def connect(self, address: str, port: int) -> None:
        """Join torch.distributed: the pool is its world."""
        place = self._place
        self._since_s, self._phase = time.monotonic(), "meeting the other ranks"
        timeout = timedelta(seconds=place.collective_timeout_s)
        _use_interface_of(ray.util.get_node_ip_address())
        store = self._store or dist.TCPStore(address, port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if place.device == "cuda" else "gloo",
            store=dist.PrefixStore("world", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
        )
        self._since_s, self._phase = time.monotonic(), "before its first operation"

    def run(self, request: Request) -> Generator[Any, Any, None]:
        """Carry out one operation: blocks, then a `Reply`. What it raises is in the reply, never raised."""
        start_s = time.time()
        self._since_s, self._step, self._phase = time.monotonic(), request.step, ""
        self._operation = f"{request.role}.{request.method}"
        if self._log is not None:
            self._log.begin(f"{request.role} rank {self._place.rank}", request.step, request.method)
        self._compute_thread = threading.get_ident()
        self._nbytes_fetched = 0
        self._notes.clear()
        try:
            with record_kernels() as kernels:
                made = self._parts if request.parts else self._blocks
                value = yield from made(self._invoke(request), request.cuts)
            reply = Reply(value, start_s, time.time(), self._nbytes_fetched, tuple(sorted(kernels)))
        except BaseException as error:
            trace = traceback.format_exc()
            reply = Reply(
                None,
                start_s,
                time.time(),
                self._nbytes_fetched,
                remote_traceback=trace,
                error=_sendable(error),
            )
        self._since_s, self._phase = time.monotonic(), f"between operations, after {self._operation}"
        self._operation = None
        if self._log is not None:
            self._log.end(f"{self._place.pool} rank {self._place.rank}")
        reply.notes.update(self._notes)
        yield reply

    def state(self) -> HostState:
        resident, available = psutil.Process().memory_info().rss, psutil.virtual_memory().available
        seconds = time.monotonic() - self._since_s
        return HostState(self._operation, seconds, self._step, resident, available, self._phase)

    def ask(self, role: str, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of a role's worker that neither computes nor communicates, beside what runs."""
        return getattr(self._roles[role], method)(*args)

    def memory(self) -> HostMemory:
        """On a GPU what torch's allocator gave out; on a CPU the whole process, its libraries included."""
        if self._place.device == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            return HostMemory(torch.cuda.max_memory_allocated(), "torch's allocator", device_bytes=total)
        status = Path("/proc/self/status").read_text()
        (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
        return HostMemory(int(peak) * 1024, "resident memory, libraries included", self._base_bytes)

    def stacks(self) -> str:
        """The Python stack of every thread, the computing one first."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        frames.pop(threading.get_ident())
        order = sorted(frames, key=lambda ident: ident != self._compute_thread)
        return STACK_GAP.join(
            f"thread {'compute' if ident == self._compute_thread else names.get(ident, ident)}\n"
            + "".join(traceback.format_stack(frames[ident])).rstrip()
            for ident in order
        )

    def _invoke(self, request: Request) -> Any:
        if request.create is not None:
            self._base_bytes = self._base_bytes or psutil.Process().memory_info().rss
            self._roles[request.role] = self._create(request.role, request.create)
            return None
        self._phase = "fetching its inputs"
        args = [self._resolve(value, request.materialize) for value in request.args]
        kwargs = {name: self._resolve(value, request.materialize) for name, value in request.kwargs.items()}
        self._phase = ""
        return getattr(self._roles[request.role], request.method)(*args, **kwargs)

    def _create(self, role: str, spec: WorkerSpec) -> Worker:
        place = self._place
        cls: type[Worker] = spec.cls.load() if isinstance(spec.cls, UserClass) else spec.cls
        worker = object.__new__(cls)
        worker.context = WorkerContext(
            role=role,
            pool=place.pool,
            rank=place.rank,
            world_size=place.world_size,
            local_rank=place.local_rank,
            node=place.node,
            device=place.device,
            layout=spec.layout,
            collective_timeout_s=place.collective_timeout_s,
            fetch=self._fetch,
            notes=self._notes,
            shared=self._shared,
            logs=place.logs,
            phase=self._in_phase,
        )
        worker.__init__(*spec.args, **spec.kwargs)  # type: ignore[misc]
        return worker

    def _in_phase(self, phase: str) -> None:
        self._phase = phase

    def _resolve(self, value: Any, materialize: bool) -> Any:
        if isinstance(value, BatchRef) and materialize:
            return self._fetch(value)
        return value

    def _fetch(self, ref: BatchRef) -> DataProto:
        self._nbytes_fetched += ref.fetch_nbytes
        return fetch_batch(ref, self._place.fetch_timeout_s)

    def _blocks(self, value: Any, cuts: OutputCuts | None) -> Generator[Any, Any, Any]:
        """Yield the parts of a result that are stored, and return what stands for them in the reply."""
        if isinstance(value, DataProto):
            self._phase = "handing over its result"
            manifest, blocks = pack(value, cuts.of(len(value)) if cuts else ())
            for block in blocks:  # noqa: UP028  Ray sends a value into the generator: a list has no `send`
                yield block
            return manifest
        return value

    def _parts(self, parts: Iterable[Part], cuts: OutputCuts | None) -> Generator[Any, Any, Any]:
        """Yield the head and the blocks of every part as soon as it is made."""
        for part in parts:
            rows = tuple(int(row) for row in part.rows)
            manifest, blocks = pack(part.data, cuts.at(rows).of(len(rows)) if cuts else ())
            yield PartHead(rows, manifest)
            for block in blocks:  # noqa: UP028  as above
                yield block


def _isolate(place: HostPlace) -> None:
    """Set up the process: no launcher's world in its environment, its threads, its kernels, its device.

    A fatal signal leaves the Python stacks in the log.
    """
    faulthandler.enable()
    for name in list(os.environ):
        if name in LAUNCHER_VARIABLES or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = str(place.threads)
    torch.set_num_threads(place.threads)
    for name in _OF_THE_DRIVER:
        os.environ.pop(name, None)
    os.environ.update(place.environ)
    if place.device == "cuda":
        torch.cuda.set_device(0)  # Ray shows the process its own device only


def _own_log(place: HostPlace, folder: Path) -> WorkerLog | None:
    """Print into the run folder from now on; None where that cannot be written."""
    name = f"{place.pool} rank {place.rank}"
    try:
        log = WorkerLog(folder / f"{place.pool}_rank_{place.rank}.log", name)
    except OSError as error:
        print(f"no log in the run folder: {error}", file=sys.stderr)
        return None
    print(f"process {os.getpid()} on node {place.node}", file=sys.stderr, flush=True)
    return log


def _use_interface_of(address: str) -> None:
    """Let collectives use the interface that Ray reached this node by, unless the user chose one."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _sendable(error: BaseException) -> BaseException | None:
    """The exception without its frames if it survives the trip, else None."""
    try:
        return ray.cloudpickle.loads(ray.cloudpickle.dumps(error.with_traceback(None)))
    except Exception:
        return None
