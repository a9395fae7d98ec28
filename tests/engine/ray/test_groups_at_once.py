"""Many groups of ranks that start at once, each with a store at a port of its own."""

import multiprocessing
import os
import time
import traceback
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from rolemesh.engine.ray.host import Host, HostPlace

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]
GROUPS, LIMIT_S = 20, 60.0


def rank_main(group: int, rank: int, others: Connection, result: Connection, go) -> None:
    """What a worker process of a pool does to join its world, then a sum over it."""
    try:
        place = HostPlace(
            pool=f"pool-{group}",
            rank=rank,
            world_size=2,
            local_rank=rank,
            node="here",
            device="cpu",
            threads=1,
            collective_timeout_s=LIMIT_S,
            fetch_timeout_s=LIMIT_S,
        )
        host = Host(place)
        go.wait(LIMIT_S)
        if rank == 0:
            others.send(address := host.open_store())
        else:
            address = others.recv()
        host.connect(*address)
        total = torch.tensor([float(group * 2 + rank)])
        dist.all_reduce(total)
        result.send(total.item())
        result.recv()  # stays, with its ports, until all have met
    except BaseException:
        result.send(traceback.format_exc())
    os._exit(0)


def start_all() -> list[float | str]:
    """Start all groups at once; what each rank found: the sum over its group, or a traceback."""
    context = multiprocessing.get_context("fork")
    go = context.Event()
    ranks, results = [], []
    for group in range(GROUPS):
        ends = context.Pipe()
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(group, rank, ends[rank], theirs, go))
            process.start()
            ranks.append(process)
            results.append(ours)
    try:
        go.set()
        deadline = time.monotonic() + LIMIT_S
        return [
            ours.recv() if ours.poll(max(0.0, deadline - time.monotonic())) else "no answer"
            for ours in results
        ]
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_every_one_of_20_groups_of_two_ranks_that_start_at_once_meets(times: int):
    for _ in range(times):
        found = start_all()
        assert [text for text in found if isinstance(text, str)] == []
        assert found == [4.0 * (rank // 2) + 1 for rank in range(2 * GROUPS)]
