"""Batches hold jobs of similar length, within the budget; the oldest goes first, a bad job fails alone."""

import asyncio
import threading
import time

import pytest

from rolemesh.launch.services.backend import Job
from rolemesh.launch.services.batcher import Batcher, QueueFullError, outcomes, similar


def jobs(*lengths):
    return [Job(f"{i}", length, length) for i, length in enumerate(lengths)]


def double(batch, lane):
    return [2 * job.work for job in batch]


def with_batcher(work, run=double, **options):
    """The result of coroutine function `work(batcher)`."""

    async def main():
        given = {"lanes": 1, "batch_tokens": 100, "wait_s": 0.0, "most_waiting": 50, **options}
        batcher = Batcher(run, **given)
        try:
            return await work(batcher)
        finally:
            assert await batcher.close(5.0)

    return asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize(
    ("lengths", "at", "budget", "expected"),
    [
        ([5, 5, 5, 5], 0, 100, slice(0, 4)),
        ([5, 5, 5, 5], 2, 15, slice(0, 3)),
        ([10, 20, 30], 2, 60, slice(1, 3)),  # 2 * 30 fit, 3 * 30 do not
        ([10, 200], 0, 1000, slice(0, 1)),  # padded too far
        ([10, 200], 1, 100, slice(1, 2)),  # longer than the budget: alone
        ([8, 100, 101, 102, 300], 1, 10**6, slice(1, 4)),
    ],
)
def test_a_batch_is_the_nearest_lengths_that_fit(lengths, at, budget, expected):
    assert similar(lengths, at, budget) == expected


def test_results_are_in_each_requests_order_whatever_the_batches():
    lengths = [[7, 90, 3], [50, 2], [60, 61, 62, 1]]

    async def work(batcher):
        return await asyncio.gather(*(batcher.submit(jobs(*some)) for some in lengths))

    assert with_batcher(work) == [[2 * length for length in some] for some in lengths]


def test_requests_share_batches_within_the_budget_and_nothing_starves():
    batches = []

    def run(batch, lane):
        batches.append([job.tokens for job in batch])
        time.sleep(0.01)
        return double(batch, lane)

    async def work(batcher):
        await asyncio.gather(*(batcher.submit(jobs(length)) for length in [90] + [20] * 20))

    with_batcher(work, run, wait_s=0.05)
    assert sorted(length for batch in batches for length in batch) == [20] * 20 + [90]
    assert all(len(batch) * max(batch) <= 100 for batch in batches)
    assert len(batches) == 5
    assert batches[0] == [90]  # it came first, although it fits badly


def test_a_lone_job_waits_no_longer_than_it_may():
    async def work(batcher):
        start = time.monotonic()
        await batcher.submit(jobs(1))
        return time.monotonic() - start

    assert 0.2 <= with_batcher(work, wait_s=0.2) < 10


def test_a_whole_batch_does_not_wait():
    assert with_batcher(lambda batcher: batcher.submit(jobs(50, 50)), wait_s=20.0) == [100, 100]


def test_a_full_queue_refuses_whole_requests_and_takes_them_again():
    began, release = threading.Event(), threading.Event()

    def run(batch, lane):
        began.set()
        release.wait(10)
        return double(batch, lane)

    async def work(batcher):
        running = asyncio.create_task(batcher.submit(jobs(100)))
        while not began.is_set():
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(batcher.submit(jobs(1, 2)))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="2 samples wait; 3 may"):
            await batcher.submit(jobs(1, 2))
        waiting.cancel()  # a request that was given up makes room
        await asyncio.sleep(0)
        third = asyncio.create_task(batcher.submit(jobs(3, 4, 5)))
        await asyncio.sleep(0)
        release.set()
        return await running, await third

    assert with_batcher(work, run, most_waiting=3) == ([200], [6, 8, 10])


def test_lanes_work_at_once_and_never_one_twice():
    meeting, busy = threading.Barrier(2, timeout=10), set()

    def run(batch, lane):
        assert lane not in busy
        busy.add(lane)
        meeting.wait()
        busy.discard(lane)
        return double(batch, lane)

    assert with_batcher(lambda b: b.submit(jobs(1, 1, 1, 1)), run, lanes=2, batch_tokens=1) == [2] * 4


def test_a_bad_job_fails_alone():
    def run(batch, lane):
        if any(job.work == 3 for job in batch):
            raise ValueError("no threes")
        return double(batch, lane)

    results = outcomes(run, jobs(1, 2, 3, 4, 5), 0)
    assert results[:2] + results[3:] == [2, 4, 8, 10]
    assert isinstance(results[2], ValueError)

    async def work(batcher):
        requests = [batcher.submit(jobs(*some)) for some in ([1, 2], [3, 4], [5])]
        return await asyncio.gather(*requests, return_exceptions=True)

    good, bad, other = with_batcher(work, run)
    assert (good, other) == ([2, 4], [10])
    assert str(bad) == "no threes"
