"""Curves of the collectives between the ranks of this machine, at several message sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from rolemesh.parallel.calibration.points import Point, seconds_of

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send")


def message_sizes(device: torch.device, quick: bool) -> tuple[int, ...]:
    """Bytes; multiples of a float32 for any number of ranks up to 64."""
    kib = 2**10
    if device.type == "cuda":
        return tuple(kib * size for size in (4, 64, 2**10, 2**14, 2**17, *(() if quick else (2**18,))))
    return tuple(
        kib * size for size in ((4, 64, 2**10, 2**13) if quick else (4, 16, 64, 256, 2**10, 2**13, 2**15))
    )


def measure(device: torch.device, quick: bool) -> Iterator[Point]:
    """Every rank of the default group must call; the seconds are this rank's."""
    world = dist.get_world_size()
    for size in message_sizes(device, quick):
        whole = torch.ones(size // 4 // world * world, device=device)
        part = torch.ones(len(whole) // world, device=device)
        runs = 40 if size <= 2**16 else 10
        for kind in KINDS:
            dist.barrier()
            seconds = seconds_of(_operation(kind, whole, part), device, 0.0, runs)
            yield Point(kind, "float32", (4 * len(whole),), seconds / (2 if kind == "send" else 1))


def _operation(kind: str, whole: Tensor, part: Tensor) -> Callable[[], object]:
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    return lambda: _there_and_back(whole)


def _there_and_back(message: Tensor) -> None:
    """Between ranks 0 and 1; the others wait for nobody."""
    rank = dist.get_rank()
    if rank == 0:
        dist.send(message, 1)
        dist.recv(message, 1)
    elif rank == 1:
        dist.recv(message, 0)
        dist.send(message, 0)
