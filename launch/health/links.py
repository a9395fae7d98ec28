"""Links between devices: which reach each other's memory, and how near an all-reduce comes to the data sheet.

`python -m rolemesh.launch.health.links FOLDER RANK WORLD KIND` is the probe, one process for each device.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rolemesh.launch.health.devices import smi
from rolemesh.launch.health.finding import Finding
from rolemesh.launch.health.probes import ProbeError, answer, probe
from rolemesh.placement.hardware import HardwareError, hardware

SECTION = "links"
LIMIT_S = {"cpu": 60.0, "cuda": 60.0}  # seconds on an idle machine
SLOW = {"cpu": 0.1, "cuda": 0.4}  # of the profile's rate; short messages and other work take their part
_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
_ROUNDS, _WARM = 7, 2


def link_findings() -> list[Finding]:
    """Between this machine's GPUs, over NCCL; without any, between two processes over gloo."""
    gpus = 0
    if find_spec("torch") is None:
        return []
    if smi("gpu", "index"):
        import torch

        gpus = torch.cuda.device_count()
    kind, world = ("cuda", gpus) if gpus else ("cpu", 2)
    if world < 2:
        return [Finding(SECTION, "all-reduce", "one device: nothing to reduce over")]
    try:
        reading = probe("rolemesh.launch.health.links", kind, world=world, limit_s=LIMIT_S[kind])
    except ProbeError as error:
        return [failed(kind, world, str(error))]
    return [*peers(reading["peers"]), all_reduce(reading)]


def failed(kind: str, world: int, error: str) -> Finding:
    """An all-reduce that did not come to an end."""
    fix = {
        "cpu": "see whether the machine is overloaded; set GLOO_SOCKET_IFNAME to an interface that is up (lo "
        "on one machine); look at firewalls",
        "cuda": "NCCL_DEBUG=INFO tells where it stops; NCCL_P2P_DISABLE=1 tells whether peer-to-peer is the "
        "cause (IOMMU and ACS off in the BIOS, or iommu=pt), NCCL_SOCKET_IFNAME the interface",
    }[kind]
    return Finding(
        SECTION, "all-reduce", f"fails over {world} ranks ({_library(kind)})", error, fix, required=True
    )


def all_reduce(reading: Mapping[str, Any]) -> Finding:
    """The rate of an all-reduce beside the device's profile: `kind`, `world`, `bytes`, `seconds`, `device`,
    and whether the sum was `right`.
    """
    kind, world = reading["kind"], reading["world"]
    rate = 2 * (world - 1) / world * reading["bytes"] / reading["seconds"]
    what = f"{reading['bytes'] / 2**20:.0f} MiB over {world} ranks ({_library(kind)})"
    value = f"{what}: {rate / 1e9:.3g} GB/s each way"
    if not reading["right"]:
        problem = "the sum is wrong: data is damaged on the way"
        fix = "run `dcgmi diag -r 3`; NCCL_P2P_DISABLE=1 tells whether peer-to-peer is the cause"
        return Finding(SECTION, "all-reduce", value, problem, fix, required=True)
    try:
        profile = hardware(reading["device"])
    except HardwareError:
        return Finding(SECTION, "all-reduce", f"{value}; no profile of {reading['device']} to compare with")
    share = rate / profile.link_bytes_per_s
    value += f", {share:.0%} of the {profile.link_bytes_per_s / 1e9:.3g} of profile {profile.name}"
    if share >= SLOW[kind]:
        return Finding(SECTION, "all-reduce", value)
    problem = (
        f"less than {SLOW[kind]:.0%} of the profile: plans that share a model over devices are too hopeful"
    )
    fix = "see that nothing else runs; `nvidia-smi topo -m` shows the links (NVLink down? two sockets?); "
    fix += "`rolemesh calibrate --out FILE` measures a profile of its own for `plan --profile`"
    return Finding(SECTION, "all-reduce", value, problem, fix)


def peers(reach: Sequence[Sequence[bool]]) -> Iterator[Finding]:
    """`reach[i][j]`: GPU i reads GPU j's memory; empty on a CPU."""
    if not reach:
        return
    pairs = [(i, j) for i, row in enumerate(reach) for j, there in enumerate(row) if i < j and not there]
    n_pairs = len(reach) * (len(reach) - 1) // 2
    value = f"{n_pairs - len(pairs)} of {n_pairs} pairs of GPUs reach each other"
    if not pairs:
        yield Finding(SECTION, "peer-to-peer", value)
        return
    some = ", ".join(f"{i}-{j}" for i, j in pairs[:4])
    problem = f"{len(pairs)} pairs do not ({some}{', ...' * (len(pairs) > 4)}): they copy through host memory"
    fix = "`nvidia-smi topo -p2p r` says why; turn ACS off in the BIOS or IOMMU to passthrough (iommu=pt), "
    fix += "and give a container all GPUs of the node"
    yield Finding(SECTION, "peer-to-peer", value, problem, fix)


def measure(folder: Path, rank: int, world: int, kind: str) -> None:
    """One rank of the probe; rank 0 writes the reading."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        _library(kind),
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=LIMIT_S[kind]),
        device_id=device if kind == "cuda" else None,
    )
    data = torch.full((_BYTES[kind] // 4,), float(rank + 1), device=device)
    dist.all_reduce(data)
    right = bool((data == world * (world + 1) / 2).all())
    seconds = [_seconds(lambda: dist.all_reduce(data), device) for _ in range(_WARM + _ROUNDS)]
    if rank == 0:
        reach = [
            [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(world)]
            for i in range(world if kind == "cuda" else 0)
        ]
        reading = {
            "kind": kind,
            "world": world,
            "bytes": _BYTES[kind],
            "seconds": statistics.median(seconds[_WARM:]),
            "right": right,
            "device": torch.cuda.get_device_name(0) if kind == "cuda" else "cpu",
            "peers": reach,
        }
        answer(folder, reading)
    dist.barrier()
    dist.destroy_process_group()


def _seconds(run: Any, device: Any) -> float:
    import torch

    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _library(kind: str) -> str:
    return "nccl" if kind == "cuda" else "gloo"


if __name__ == "__main__":
    measure(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
