"""The state of a server: what it serves, whether it takes requests, and what it counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rolemesh.engine.remote.forms import VERSION
from rolemesh.launch.services.backend import Backend, Job, Kind, ServeError
from rolemesh.launch.services.batcher import Batcher

State = Literal["loading", "ready", "draining"]
CLOSE_S = 5.0
"""A batch whose requests were all given up may run so long when the server ends."""
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class RefusedError(Exception):
    """A request that is answered with a status other than 200."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}


@dataclass(frozen=True)
class ServerLimits:
    """What a server takes. Raises ServeError where no request could be served.

    `samples` of one request; `waiting` samples of all requests; `body_bytes` of one request; `wait_s` that a
    sample waits for others to join its batch; `answer_s` from a request to its answer; `drain_s` that open
    requests have to end once the server is told to.
    """

    samples: int = 1024
    waiting: int = 4096
    body_bytes: int = 32 << 20
    wait_s: float = 0.005
    answer_s: float = 300.0
    drain_s: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= self.waiting:
            raise ServeError(f"a request may have {self.samples} samples, but only {self.waiting} may wait")
        if min(self.body_bytes, self.answer_s, self.drain_s) <= 0 or self.wait_s < 0:
            raise ServeError(f"limits must be above 0: {self}")


class Service:
    """Loads a backend, and runs requests on it while it is ready.

    Args:
        load: gives the backend; called in a thread by `start`.
    """

    def __init__(self, kind: Kind, load: Callable[[], Backend], limits: ServerLimits) -> None:
        self.kind, self.limits = kind, limits
        self.state: State = "loading"
        self.info: dict[str, Any] = {}
        self.in_flight = 0
        self.metrics = _Metrics(lambda: self._batcher.n_waiting if self._batcher else 0)
        self._load = load
        self._backend: Backend | None = None
        self._batcher: Batcher | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Load the backend and become ready. Raises what loading raises."""
        backend = self._backend = await asyncio.to_thread(self._load)
        self.info = {
            "kind": self.kind,
            "protocol_version": VERSION,
            "limits": {"samples": self.limits.samples, "body_bytes": self.limits.body_bytes},
            **await asyncio.to_thread(backend.info),
        }
        self._batcher = Batcher(
            backend.run,
            lanes=backend.lanes,
            batch_tokens=backend.batch_tokens,
            wait_s=self.limits.wait_s,
            most_waiting=self.limits.waiting,
            observe=self.metrics.batch,
        )
        if self.state == "loading":
            self.state = "ready"

    @contextmanager
    def accepted(self) -> Iterator[None]:
        """One request, from acceptance to answer. Raises RefusedError (503) unless ready."""
        if self.state != "ready":
            raise RefusedError(
                503, f"the server is {self.state}", {"Retry-After": "1", "Connection": "close"}
            )
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    def jobs(self, request: Any) -> list[Job]:
        """A request's samples as jobs. Raises UnfitError."""
        assert self._backend is not None, "only a ready server accepts requests"
        return self._backend.jobs(request)

    async def run(self, jobs: Sequence[Job]) -> list[Any]:
        """The jobs' results, in order.

        Raises QueueFullError, RefusedError (503) after `answer_s`, or what a job raised.
        """
        assert self._batcher is not None, "only a ready server accepts requests"
        try:
            async with asyncio.timeout(self.limits.answer_s):
                return await self._batcher.submit(jobs)
        except TimeoutError:
            message = f"no answer within {self.limits.answer_s:g} s; {self._batcher.n_waiting} samples wait"
            raise RefusedError(503, message, {"Retry-After": "1"}) from None

    async def drain(self) -> int:
        """Take no more requests; wait for those accepted, at most `drain_s`. Returns how many did not end."""
        self.state = "draining"
        try:
            async with asyncio.timeout(self.limits.drain_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return self.in_flight

    async def close(self) -> bool:
        """Free the backend; whether nothing runs on it any more."""
        if self._batcher is not None and not await self._batcher.close(CLOSE_S):
            return False
        if self._backend is not None:
            self._backend.close()
        return True


class _Metrics:
    """Prometheus metrics of one server."""

    def __init__(self, n_waiting: Callable[[], int]) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "rolemesh_requests", "Requests answered", ["path", "status"], registry=registry
        )
        self._request_s = Histogram(
            "rolemesh_request_seconds",
            "From a request's arrival to its answer",
            ["path"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._samples = Counter("rolemesh_samples", "Samples worked on", registry=registry)
        self._tokens = Counter("rolemesh_tokens", "Their tokens", registry=registry)
        self._padded = Counter("rolemesh_padded_tokens", "Their tokens, padding included", registry=registry)
        self._batch_s = Histogram("rolemesh_batch_seconds", "One batch", buckets=_SECONDS, registry=registry)
        self._batch_samples = Histogram(
            "rolemesh_batch_samples",
            "Samples of one batch",
            buckets=[2**n for n in range(12)],
            registry=registry,
        )
        waiting = Gauge("rolemesh_waiting_samples", "Samples that wait for a batch", registry=registry)
        waiting.set_function(n_waiting)

    def batch(self, jobs: Sequence[Job], seconds: float) -> None:
        """Count a batch."""
        self._samples.inc(len(jobs))
        self._tokens.inc(sum(job.tokens for job in jobs))
        self._padded.inc(len(jobs) * max(job.tokens for job in jobs))
        self._batch_s.observe(seconds)
        self._batch_samples.observe(len(jobs))

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(path, str(status)).inc()
        self._request_s.labels(path).observe(seconds)
