"""What one machine has: its memory and GPUs, as its own tools tell. Loads neither torch nor ray."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from rolemesh.placement.cluster import DeviceKind, NodeSpec
from rolemesh.placement.hardware import canonical, profiles

NAME_LABEL = "device-name"  # label of a node whose GPUs no profile describes
_SMI_S = 10.0
_CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class MachineFacts:
    """Memory that processes may use, cores, and each GPU's name and bytes."""

    memory_bytes: float
    cores: int
    gpus: tuple[tuple[str, float], ...] = ()


def look() -> MachineFacts:
    """Ask this machine; GPUs through `nvidia-smi`, for at most ten seconds."""
    memory = float(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):
        memory = min(memory, float(_CGROUP.read_text()))  # "max" where a container has no limit
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return MachineFacts(memory, cores, _gpus())


def described(node: NodeSpec, facts: MachineFacts, kind: DeviceKind) -> tuple[NodeSpec, list[str]]:
    """The node with its memory and device type, and what a person should know.

    A worker slot's memory is the node's: half of each slot's part counts as its device's, half as host
    memory, so that nothing is counted twice.
    """
    if kind == "cpu":
        half = facts.memory_bytes / 2
        return replace(node, host_bytes=half, memory_bytes=half / node.devices if node.devices else None), []
    found = replace(node, host_bytes=facts.memory_bytes)
    if not facts.gpus:
        return found, ([f"{node.name}: nvidia-smi tells of no GPU"] if node.devices else [])
    names = Counter(name for name, _ in facts.gpus)
    name = names.most_common(1)[0][0]
    notes = [f"{node.name} has GPUs of several types: {dict(names)}"] if len(names) > 1 else []
    known = next((t for t in (canonical(name), canonical(node.device_type)) if t in profiles()), "")
    if known:
        return replace(found, device_type=known), notes
    notes.append(
        f"{node.name}: no profile describes {name!r}; give `device:` in the file, or calibrate there"
    )
    labels = {**node.labels, NAME_LABEL: name}
    memory = min(amount for _, amount in facts.gpus)
    return replace(found, device_type="", memory_bytes=memory, labels=labels), notes


def _gpus() -> tuple[tuple[str, float], ...]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = (line.rpartition(",") for line in told.splitlines() if "," in line)
    return tuple((name.strip(), float(mib) * 2**20) for name, _, mib in rows)
