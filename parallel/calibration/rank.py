"""One rank of a calibration: `python -m ...rank FOLDER RANK WORLD DEVICE QUICK LIMIT_S`.

It writes FOLDER/RANK.json, a list of points; FOLDER/RANK.now says what it measures.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rolemesh.parallel.calibration import collectives, kernels
from rolemesh.parallel.calibration.points import Point


def main(folder: Path, rank: int, world: int, kind: str, quick: bool, limit_s: float) -> None:
    """Measure and write; any failure ends the process with its traceback on stderr."""
    device = _take_device(kind, rank)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=limit_s),
        device_id=device if kind == "cuda" else None,
    )
    try:
        points = []
        for point in _measure(device, world, quick):
            points.append(point.row())
            (folder / f"{rank}.now").write_text(point.kind)
        (folder / f"{rank}.json").write_text(json.dumps(points))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _take_device(kind: str, rank: int) -> torch.device:
    """This rank's GPU, or a core of its own with one thread, as a worker slot has."""
    if kind == "cuda":
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    return torch.device("cpu")


def _measure(device: torch.device, world: int, quick: bool) -> Iterator[Point]:
    """All ranks run each curve at the same time: devices share memory and power in a run too."""
    for point in kernels.measure(device, quick):
        yield point
        dist.barrier()
    from rolemesh.parallel.calibration import layers  # megatron-core takes seconds to load

    yield from layers.measure(device, 0.1 if quick else 1.0)
    if world > 1:
        yield from collectives.measure(device, quick)


if __name__ == "__main__":
    folder, rank, world, kind, quick, limit_s = sys.argv[1:]
    main(Path(folder), int(rank), int(world), kind, quick == "1", float(limit_s))
