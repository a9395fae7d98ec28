"""Memory, shared memory, limits and network devices of this machine."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rolemesh.launch.health.finding import Finding

SECTION = "machine"
GIB = 2**30
MIN_OPEN_FILES = 4096
MIN_PROCESSES = 4096
MIN_FREE_SHARE = 0.05  # Ray stops taking work on a disk that is fuller
LEAST_SHM, SMALL_SHM = 256 << 20, 4 << 30  # bytes of /dev/shm; a container's default is 64 MiB
HELD_SHARE = 0.5  # of the memory, by other processes
INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Holder:
    """A process that holds memory."""

    pid: int
    name: str
    user: str
    bytes: float

    def __str__(self) -> str:
        return f"{self.bytes / GIB:.1f} GiB by {self.name} (process {self.pid} of {self.user})"


def machine_findings() -> list[Finding]:
    """All of this machine's, as it is now."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shm = Path("/dev/shm")
    has_ib = INFINIBAND.is_dir() and any(INFINIBAND.iterdir())
    usage = shutil.disk_usage(shm) if shm.is_dir() else None
    return [
        Finding(SECTION, "cores", str(cores)),
        _memory(),
        shared_memory(None if usage is None else (usage.free, usage.total)),
        temporary_files(Path(tempfile.gettempdir())),
        *limit_findings(),
        memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_ib),
        *infiniband(INFINIBAND),
    ]


def limit_findings() -> list[Finding]:
    """The limits of this process that a run with many workers comes up to."""
    return [
        limit("open files", resource.getrlimit(resource.RLIMIT_NOFILE)[0], MIN_OPEN_FILES, "ulimit -n 65536"),
        limit("processes", resource.getrlimit(resource.RLIMIT_NPROC)[0], MIN_PROCESSES, "ulimit -u 65536"),
    ]


def limit(name: str, soft: int, enough: int, fix: str) -> Finding:
    """A limit of which a run with many workers wants `enough`."""
    if soft == resource.RLIM_INFINITY or soft >= enough:
        return Finding(SECTION, name, "unlimited" if soft == resource.RLIM_INFINITY else str(soft))
    return Finding(SECTION, name, str(soft), f"a limit below {enough} stops runs with many workers", fix)


def memlock(soft: int, has_ib: bool) -> Finding:
    """Memory that may be locked: an InfiniBand device cannot register buffers beyond it."""
    unlimited = soft == resource.RLIM_INFINITY
    value = "unlimited" if unlimited else f"{soft / 2**20:.0f} MiB"
    if unlimited or not has_ib:
        return Finding(SECTION, "locked memory", value)
    problem = "InfiniBand registers its buffers as locked memory: NCCL fails, or falls back to TCP"
    fix = "ulimit -l unlimited (limits.conf; docker run --ulimit memlock=-1; Slurm: PropagateResourceLimits)"
    return Finding(SECTION, "locked memory", value, problem, fix, required=True)


def shared_memory(found: tuple[int, int] | None) -> Finding:
    """`found`: bytes free and in all of /dev/shm; None where there is none."""
    fix = "docker run --shm-size=16g or --ipc=host (Kubernetes: an emptyDir with medium: Memory at /dev/shm)"
    if found is None:
        problem = "batches go through it; without it they go through files, which is slower"
        return Finding(SECTION, "shared memory", "no /dev/shm", problem, f"mount it: {fix}")
    free, total = found
    value = f"/dev/shm: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < LEAST_SHM:
        problem = f"a run wants {LEAST_SHM >> 20} MiB free: batches and NCCL's buffers go through it"
        return Finding(SECTION, "shared memory", value, problem, f"remove stale files; {fix}", required=True)
    if total < SMALL_SHM:
        return Finding(SECTION, "shared memory", value, "small: large batches are spilled to disk", fix)
    return Finding(SECTION, "shared memory", value)


def temporary_files(folder: Path) -> Finding:
    """The disk that Ray's files are on."""
    usage = shutil.disk_usage(folder)
    value = f"{folder}: {usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.free >= MIN_FREE_SHARE * usage.total:
        return Finding(SECTION, "temporary files", value)
    problem = f"less than {MIN_FREE_SHARE:.0%} free: Ray refuses work on a full disk"
    return Finding(SECTION, "temporary files", value, problem, f"free space in {folder}, or set run.temp_dir")


def memory_finding(available: float, total: float, holders: Sequence[Holder]) -> Finding:
    """Memory, and the other processes that hold much of it."""
    value = f"{available / GIB:.1f} of {total / GIB:.1f} GiB free"
    if total - available < HELD_SHARE * total or not holders:
        return Finding(SECTION, "memory", value)
    problem = f"others hold {(total - available) / GIB:.1f} GiB: {'; '.join(map(str, holders))}"
    return Finding(SECTION, "memory", value, problem, "end those that are left over from an earlier run")


def _memory() -> Finding:
    try:
        return memory_finding(*memory_now())
    except ModuleNotFoundError as error:
        return Finding(SECTION, "memory", "-", str(error), "pip install 'rolemesh[train]'", required=True)


def memory_now(most: int = 3) -> tuple[float, float, list[Holder]]:
    """Bytes available and in all, and the `most` largest of the other processes."""
    import psutil

    memory, found = psutil.virtual_memory(), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid():
                rss = float(process.memory_info().rss)
                found.append(Holder(process.pid, process.name(), process.username(), rss))
    largest = sorted(found, key=lambda holder: -holder.bytes)[:most]
    return float(memory.available), float(memory.total), largest


def infiniband(root: Path) -> Iterator[Finding]:
    """The ports of the devices below `root`, the kernel's folder of them."""
    ports = sorted(root.glob("*/ports/*/state"))
    if not ports:
        yield Finding(SECTION, "InfiniBand", "none: nodes talk over TCP")
        return
    states = {path.parts[-4] + ":" + path.parts[-2]: path for path in ports}
    active = [name for name, path in states.items() if "ACTIVE" in _line(path)]
    for name, path in states.items():
        state = _line(path).partition(":")[2].strip() or "unknown"
        rate, link = _line(path.with_name("rate")), _line(path.with_name("link_layer"))
        value = ", ".join(part for part in (state, rate, link) if part)
        if name in active:
            yield Finding(SECTION, name, value)
            continue
        problem = f"this port is {state}" + ("" if active else ", and no other is active: no RDMA here")
        fix = "check cable and switch, `ibstat`, and the subnet manager (opensm)"
        if active:
            fix += f"; or leave it out: NCCL_IB_HCA={','.join(one.partition(':')[0] for one in active)}"
        yield Finding(SECTION, name, value, problem, fix)


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
