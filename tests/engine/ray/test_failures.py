"""Calls that fail: who, where, how fast, and what is left."""

import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
import torch.distributed as dist

from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.errors import CallTimeout, PoolBroken, WorkerDied, WorkerError
from rolemesh.engine.ray.pools import ResourcePool
from rolemesh.engine.ray.process_pool import ProcessPool
from rolemesh.engine.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup
from rolemesh.engine.worker import Worker

pytestmark = [pytest.mark.full, pytest.mark.alone]


class Fragile(Worker):
    def __init__(self, failing_rank: int | None = None) -> None:
        if self.rank == failing_rank:
            raise FileNotFoundError("no model at /nowhere")

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def reduce_unless(self, failing_rank: int) -> float:
        if self.rank == failing_rank:
            raise ValueError("x")
        return self._reduce()

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def reduce_late(self, late_rank: int) -> float:
        if self.rank == late_rank:
            time.sleep(3600)
        return self._reduce()

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def reduce_forever(self) -> None:
        while True:
            self._reduce()

    @register(Dispatch.ONE_TO_ALL)
    def exit(self, status: int) -> None:
        print("the last words", file=sys.stderr, flush=True)
        os._exit(status)

    @register(Dispatch.ONE_TO_ALL)
    def no(self) -> None:
        raise KeyError("everywhere")

    def _reduce(self) -> float:
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return ones.item()


@pytest.fixture
def pool(cluster, request):
    pool = ResourcePool([request.param], name_prefix="fragile")
    yield pool
    pool.shutdown()


def fragile(pool: ResourcePool, *args, **options) -> RayWorkerGroup:
    return RayWorkerGroup(pool, RayClassWithInitArgs(Fragile, *args), role="actor", **options)


def gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        time.sleep(0.2)
    return False


@pytest.mark.parametrize("pool", [3], indirect=True)
def test_the_first_exception_ends_the_call_while_others_hang_in_a_collective(pool):
    group = fragile(pool)
    assert group.reduce_unless(-1).get(60) == [3.0] * 3
    pids, start = group.pids, time.monotonic()
    queued = [group.reduce_unless(1), group.reduce_unless(-1)]
    with pytest.raises(
        WorkerError, match=r"actor rank 1 on node .* failed in reduce_unless(?s:.)*ValueError: x"
    ) as caught:
        queued[0].get(60)
    assert time.monotonic() - start < 10
    assert isinstance(caught.value.__cause__, ValueError)
    assert gone(pids, 5)
    for broken in (queued[1].get, group.no):
        with pytest.raises(PoolBroken, match=r"actor rank 1 .* failed in reduce_unless"):
            broken()


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_deadline_names_the_late_rank_and_where_it_is(pool):
    group, start = fragile(pool), time.monotonic()
    with pytest.raises(CallTimeout) as caught:
        group.reduce_late(1, timeout_s=3, blocking=True)
    assert time.monotonic() - start < 20
    message = str(caught.value)
    assert "late ranks [0, 1], done ranks []" in message
    assert re.search(r"actor rank 1 on node .*, last seen in actor.reduce_late:\n", message)
    assert "time.sleep(3600)" in message
    assert "dist.all_reduce(ones)" in message


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_killed_worker_is_reported_within_seconds(pool):
    group = fragile(pool)
    with pytest.raises(WorkerError, match="KeyError: 'everywhere'"):
        group.no()
    future = group.reduce_late(0)
    start, pids = time.monotonic(), group.pids
    threading.Timer(0.5, os.kill, [pids[1], signal.SIGKILL]).start()
    with pytest.raises(WorkerDied, match=r"actor rank 1 on node .* died in reduce_late") as caught:
        future.get(60)
    assert time.monotonic() - start < 10
    assert "memory available" in str(caught.value)
    assert gone(pids, 5), "the other ranks cannot go on without it"


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_constructor_that_raises_names_its_rank_and_a_death_shows_the_end_of_its_log(pool):
    with pytest.raises(
        WorkerError, match=r"(?s)actor rank 1 .* __init__.*FileNotFoundError: no model at /nowhere"
    ):
        fragile(pool, 1)
    other = RayWorkerGroup(pool, RayClassWithInitArgs(Fragile), role="other")
    with pytest.raises(WorkerDied, match=r"(?s)rank \d .* died in exit.*last lines of .*the last words"):
        other.exit(137)


@pytest.mark.parametrize("pool", [3], indirect=True)
def test_a_death_is_the_cause_whatever_the_others_raised_before_it_was_known(pool):
    """The others' collective fails at once, with an error of their own."""
    group = fragile(pool)
    assert group.lost() is None
    future = group.reduce_forever()
    threading.Timer(0.5, os.kill, [group.pids[2], signal.SIGKILL]).start()
    with pytest.raises(WorkerDied, match=r"actor rank 2 on node .* died in reduce_forever"):
        future.get(60)
    assert isinstance(group.lost(), WorkerDied)


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_an_operation_that_raised_is_no_loss_of_workers(pool):
    group = fragile(pool)
    with pytest.raises(WorkerError, match="ValueError: x"):
        group.reduce_unless(1).get(60)
    assert group.lost() is None
    idle = ResourcePool([1], name_prefix="idle")
    try:
        other = RayWorkerGroup(idle, RayClassWithInitArgs(Fragile), role="other")
        os.kill(other.pids[0], signal.SIGKILL)
        assert gone(other.pids, 5)
        assert re.search(
            r"idle rank 0 on node .* died in no operation, after other.__init__: ", str(other.lost())
        )
    finally:
        idle.shutdown()


def test_a_process_that_answers_nothing_is_taken_for_dead(cluster, tmp_path):
    pool = ResourcePool([2], name_prefix="frozen", silent_s=3, logs=str(tmp_path))
    try:
        group = fragile(pool)
        future, start = group.reduce_late(0), time.monotonic()
        pids = group.pids
        threading.Timer(3.0, os.kill, [pids[1], signal.SIGSTOP]).start()
        with pytest.raises(WorkerDied, match=r"actor rank 1 .*answered nothing for \d s: stopped") as caught:
            future.get(120)
        assert time.monotonic() - start < 40
        said = str(caught.value)
        assert re.search(r"last heartbeat \d+ s before: actor.reduce_late for \d s, .* GiB resident", said)
        assert re.search(r"last lines of .*frozen_rank_1.log \(on that node\):\n.*process \d+ on node", said)
        assert gone(pids, 30)
    finally:
        pool.shutdown()


def test_a_pool_shut_down_while_it_starts_ends_the_start_at_once(cluster):
    pool = ProcessPool("beside")
    with ThreadPoolExecutor(1) as starting:
        started = starting.submit(pool.hosts)
        time.sleep(0.3)
        assert not started.done()
        start = time.monotonic()
        pool.shutdown()
        with pytest.raises(WorkerDied, match="pool beside rank 0"):
            started.result(timeout=30)
    assert time.monotonic() - start < 5
