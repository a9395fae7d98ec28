"""GPUs: whether torch reaches them, and who else holds their memory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from rolemesh.launch.health.finding import Finding

SECTION = "devices"
HELD_BYTES = 1 << 30  # on a GPU by others; less is a driver's own
_SMI_S = 10.0


def device_findings() -> list[Finding]:
    """What torch sees, and what others hold of it."""
    try:
        import torch
    except ImportError as error:
        return [Finding(SECTION, "torch", "-", str(error), "make setup", required=True)]
    build = f"torch {torch.__version__}, " + (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    )
    if not torch.cuda.is_available():
        problem, fix = "", ""
        if Path("/dev/nvidia0").exists():
            problem = "there is an NVIDIA device that this torch doesn't reach"
            fix = "install a CUDA build of torch (docs/install.md), or a newer driver"
        return [
            Finding(SECTION, "torch", build, problem, fix),
            Finding(SECTION, "accelerators", "none: runs use the CPU"),
        ]
    found = [Finding(SECTION, "torch", f"{build}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")]
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        value = f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}"
        found.append(Finding(SECTION, f"cuda:{i}", value))
    return [*found, *held_memory(smi("gpu", "index,uuid,memory.used,memory.total"), held_by())]


def held_by() -> str:
    """nvidia-smi's table of processes that hold GPU memory."""
    return smi("compute-apps", "gpu_uuid,pid,used_memory,process_name")


def held_memory(gpus: str, processes: str) -> Iterator[Finding]:
    """Memory that others hold, from nvidia-smi's tables: `index, uuid, used MiB, MiB in all` of each GPU, and
    `uuid, pid, used MiB, name` of each process.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in gpus.splitlines()]
    holders = [[cell.strip() for cell in line.split(",", 3)] for line in processes.splitlines()]
    for index, uuid, used, total in (row for row in rows if len(row) == 4):
        if not used.isdigit() or int(used) * 2**20 < HELD_BYTES:
            continue
        mine = [f"process {pid} ({name}, {mib} MiB)" for at, pid, mib, name in holders if at == uuid]
        who = ", ".join(mine) or "processes that this one cannot see, such as another container's"
        yield Finding(
            SECTION,
            f"memory of GPU {index}",
            f"{used} of {total} MiB in use",
            f"a run gets that much less: held by {who}",
            "end them (`nvidia-smi`, `kill PID`), or take other GPUs with CUDA_VISIBLE_DEVICES",
        )


def smi(what: str, columns: str) -> str:
    """A table of `nvidia-smi`, without units; empty where it does not answer in time."""
    command = ["nvidia-smi", f"--query-{what}={columns}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
