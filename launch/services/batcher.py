"""Jobs of many requests, run in batches of jobs of similar length."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rolemesh.launch.services.backend import Job

Run = Callable[[Sequence[Job], int], list[Any]]
Observe = Callable[[Sequence[Job], float], None]

WIDEST, ALWAYS = 2.0, 16
"""A job is padded to at most `WIDEST` times its tokens and `ALWAYS` more."""


class QueueFullError(Exception):
    """No room for a request's jobs now."""


@dataclass(eq=False)
class _Entry:
    job: Job
    arrived_s: float
    future: asyncio.Future[Any]


class Batcher:
    """Queues jobs, and runs them by `run(jobs, lane)` in threads, at most one batch per lane at a time.

    A batch holds the job that waits longest and those nearest to it in length. It starts once a batch's
    tokens have come or its oldest job has waited `wait_s`. Made and used in one event loop.

    Args:
        batch_tokens: of a batch, padding included; a longer job runs alone.
        most_waiting: jobs that wait, of all requests.
        observe: called with each batch and the seconds it took.
    """

    def __init__(
        self,
        run: Run,
        *,
        lanes: int,
        batch_tokens: int,
        wait_s: float,
        most_waiting: int,
        observe: Observe = lambda jobs, seconds: None,
    ) -> None:
        self.batch_tokens, self.wait_s, self.most_waiting = batch_tokens, wait_s, most_waiting
        self._run, self._observe = run, observe
        self._waiting: list[_Entry] = []
        self._arrived, self._enough = asyncio.Event(), asyncio.Event()
        self._lanes: asyncio.Queue[int] = asyncio.Queue()
        for lane in range(lanes):
            self._lanes.put_nowait(lane)
        self._threads = ThreadPoolExecutor(lanes, "batches")
        self._batches: set[asyncio.Task[None]] = set()
        self._dispatcher = asyncio.create_task(self._dispatch())

    @property
    def n_waiting(self) -> int:
        """Jobs that have not begun."""
        return len(self._waiting)

    async def submit(self, jobs: Sequence[Job]) -> list[Any]:
        """The jobs' results, in order; all of them are queued, or none.

        Raises QueueFullError, or what the first failing job raised; the others are then given up.
        """
        if len(self._waiting) + len(jobs) > self.most_waiting:
            self._forget_given_up()
            if len(self._waiting) + len(jobs) > self.most_waiting:
                raise QueueFullError(f"{len(self._waiting)} samples wait; {self.most_waiting} may")
        now, loop = time.monotonic(), asyncio.get_running_loop()
        entries = [_Entry(job, now, loop.create_future()) for job in jobs]
        self._waiting += entries
        self._arrived.set()
        if sum(entry.job.tokens for entry in self._waiting) >= self.batch_tokens:
            self._enough.set()
        try:
            return list(await asyncio.gather(*(entry.future for entry in entries)))
        finally:
            for entry in entries:
                entry.future.cancel()

    async def close(self, limit_s: float) -> bool:
        """Stop, and give up jobs that wait; whether the batches that run ended within the limit."""
        self._dispatcher.cancel()
        for entry in self._waiting:
            entry.future.cancel()
        running = set(self._batches)
        if running:
            _, running = await asyncio.wait(running, timeout=limit_s)
        self._threads.shutdown(wait=not running)
        return not running

    async def _dispatch(self) -> None:
        while True:
            lane = await self._lanes.get()
            await self._arrived.wait()
            await self._filled()
            batch = self._take()
            task = asyncio.create_task(self._work(batch, lane))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    async def _filled(self) -> None:
        """Wait for a whole batch's tokens, or until the oldest job has waited long enough."""
        left_s = self._waiting[0].arrived_s + self.wait_s - time.monotonic()
        if left_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._enough.wait()

    def _take(self) -> list[_Entry]:
        """Remove the next batch from the queue; it is empty when all that waited was given up."""
        self._forget_given_up()
        batch: list[_Entry] = []
        if self._waiting:
            ordered = sorted(self._waiting, key=lambda entry: entry.job.tokens)
            lengths = [entry.job.tokens for entry in ordered]
            batch = ordered[similar(lengths, ordered.index(self._waiting[0]), self.batch_tokens)]
            taken = set(map(id, batch))
            self._waiting = [entry for entry in self._waiting if id(entry) not in taken]
        if not self._waiting:
            self._arrived.clear()
        if sum(entry.job.tokens for entry in self._waiting) < self.batch_tokens:
            self._enough.clear()
        return batch

    def _forget_given_up(self) -> None:
        self._waiting = [entry for entry in self._waiting if not entry.future.done()]

    async def _work(self, batch: list[_Entry], lane: int) -> None:
        try:
            if batch:
                jobs = [entry.job for entry in batch]
                loop, start_s = asyncio.get_running_loop(), time.monotonic()
                results = await loop.run_in_executor(self._threads, outcomes, self._run, jobs, lane)
                self._observe(jobs, time.monotonic() - start_s)
                for entry, result in zip(batch, results, strict=True):
                    if entry.future.done():
                        continue
                    if isinstance(result, Exception):
                        entry.future.set_exception(result)
                    else:
                        entry.future.set_result(result)
        finally:
            self._lanes.put_nowait(lane)


def similar(lengths: Sequence[int], at: int, budget: int) -> slice:
    """The largest batch around job `at` of jobs sorted by length: nearest lengths first.

    Its padded tokens (jobs times the longest) stay within the budget, and no job is padded too far.
    """
    low = high = at  # inclusive
    while True:
        ways = []
        if low > 0:
            ways.append((lengths[at] - lengths[low - 1], low - 1, high))
        if high + 1 < len(lengths):
            ways.append((lengths[high + 1] - lengths[at], low, high + 1))
        fits = [
            way
            for way in ways
            if (way[2] - way[1] + 1) * lengths[way[2]] <= budget
            and lengths[way[2]] <= WIDEST * lengths[way[1]] + ALWAYS
        ]
        if not fits:
            return slice(low, high + 1)
        _, low, high = min(fits)


def outcomes(run: Run, jobs: Sequence[Job], lane: int) -> list[Any]:
    """Each job's result or exception. A batch that fails is halved, so that a bad job fails alone."""
    try:
        results = run(jobs, lane)
        if len(results) != len(jobs):
            raise RuntimeError(f"{len(results)} results for {len(jobs)} jobs")
        return results
    except Exception as error:
        if len(jobs) == 1:
            return [error]
        half = len(jobs) // 2
        return [*outcomes(run, jobs[:half], lane), *outcomes(run, jobs[half:], lane)]
