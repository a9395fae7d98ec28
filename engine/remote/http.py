"""Client: requests to services behind HTTP, capped, bounded in time, and retried where that can help."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Self, TypeVar

import httpx2

from rolemesh.engine.remote.endpoints import Endpoint, Endpoints, Unavailable, in_words, wait_until_ready

T = TypeVar("T")

MOST_BYTES = 1 << 28
"""Of one answer; a longer one is an error."""
SHOWN_CHARACTERS = 600
"""Of a body in a message."""


@dataclass(frozen=True)
class Limits:
    """What a client asks of its servers at once, and how long it waits. Times are in seconds.

    Attributes:
        in_flight: requests sent and not yet answered, over all endpoints.
        connect_s: for a connection.
        read_s: between two pieces of an answer.
        total_s: of one try, counted from its sending: waiting behind `in_flight` is not part of it.
        retries: further tries of a request that failed.
        batch: samples in one request, where the protocol holds several.
        backoff_s: the first wait between tries; each further one doubles it, up to `backoff_most_s`, and up
            to half of it is added by chance.

    Raises:
        ValueError: a limit that no request can meet.
    """

    in_flight: int = 64
    connect_s: float = 5.0
    read_s: float = 60.0
    total_s: float = 120.0
    retries: int = 4
    batch: int = 16
    backoff_s: float = 1.0
    backoff_most_s: float = 30.0

    def __post_init__(self) -> None:
        least = {"in_flight": 1, "batch": 1, "retries": 0, "backoff_s": 0, "backoff_most_s": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"limits.{name} is {getattr(self, name)}; at least {bound}")
        for name in ("connect_s", "read_s", "total_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"limits.{name} is {getattr(self, name)}; more than 0")

    def wait_s(self, tries: int) -> float:
        """How long to wait after `tries` failed tries, with its random part."""
        wait_s = min(self.backoff_s * 2.0 ** min(tries - 1, 60), self.backoff_most_s)
        return wait_s * (1 + random.random() / 2)


class RemoteError(RuntimeError):
    """A request that failed for good.

    Attributes:
        url: where it was sent last.
        tries: how often it was sent.
        cause: why the last try failed.
        of_content: the server answered, and refused or failed on what was in the request.
    """

    def __init__(self, url: str, tries: int, cause: str, *, of_content: bool = False) -> None:
        times = "1 try" if tries == 1 else f"{tries} tries"
        super().__init__(f"{url} failed after {times}: {cause}")
        self.url, self.tries, self.cause, self.of_content = url, tries, cause, of_content


class BadAnswer(Exception):
    """Raised by the caller's reader: the answer is not right. The request is tried again, as after a 5xx."""


class _Failed(Exception):
    """One try. `again`: another may succeed, in `wait_s` at the earliest. `of_content`: see `RemoteError`."""

    def __init__(
        self, url: str, why: str, *, again: bool = True, of_content: bool = False, wait_s: float = 0.0
    ) -> None:
        super().__init__(why)
        self.url, self.again, self.of_content, self.wait_s = url, again, of_content, wait_s


class _Busy(Exception):
    """The server has no room now, and may have named when to come back."""

    def __init__(self, wait_s: float, body: str) -> None:
        super().__init__(body)
        self.wait_s = wait_s


class Client:
    """Sends requests to the endpoints of one service, from an event loop in a thread of its own.

    A request goes to the endpoint with the fewest requests in flight. It is tried again, elsewhere where that
    is possible, after a connection error, a passed limit, a 5xx or a `BadAnswer`; never after another 4xx.
    While a server answers 429 the request keeps its place and is sent again, for `total_s` at most.

    Args:
        endpoints: URLs.
        token: sent as bearer token.
        what: the recipe's section, for messages.

    Raises:
        ValueError: no endpoint, or something that is not a URL.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        limits: Limits = Limits(),
        *,
        token: str | None = None,
        what: str = "reward",
    ) -> None:
        self.limits, self.what = limits, what
        self.endpoints = Endpoints(
            endpoints, what=what, open_s=limits.backoff_s, open_most_s=limits.backoff_most_s
        )
        self._counters: Counter[str] = Counter()
        self._latencies_s: deque[float] = deque(maxlen=100_000)
        self._taken: Counter[str] = Counter()
        self._slots = asyncio.Semaphore(limits.in_flight)
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        secure = any(endpoint.url.startswith("https") for endpoint in self.endpoints.all)
        self._tls = httpx2.create_ssl_context() if secure else False  # takes a while, and http needs none
        self._lines: list[httpx2.AsyncClient] = []
        self._idle: list[httpx2.AsyncClient] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name=f"{what}-client")
        self._thread.start()
        self._checks = self._line()
        self._watch = asyncio.run_coroutine_threadsafe(
            self.endpoints.watch(self._checks, limits.connect_s), self._loop
        )

    @property
    def counters(self) -> Mapping[str, int]:
        """Since the start: requests, retries, failed (requests), timeouts, connection_errors, status_4xx,
        status_429, status_5xx, bad_answers (tries)."""
        return self._counters

    async def post(
        self,
        content: bytes,
        content_type: str,
        read: Callable[[bytes, str], T],
        *,
        path: str | None = None,
    ) -> T:
        """What `read(body, content type)` makes of the answer. To be awaited inside `run`.

        Args:
            read: raises BadAnswer for an answer that is not right.
            path: in place of the endpoint's (`/v1/score`), or after it (`score`); None: the endpoint's own.

        Raises:
            RemoteError: every try failed, or one in a way that no other can mend.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("await Client.post inside Client.run: its connections belong to another loop")
        self._counters["requests"] += 1
        headers = {"content-type": content_type}
        tries, endpoint = 0, None
        while True:
            try:
                await self.endpoints.admitted()
                async with self._slots:
                    taken = self.endpoints.take(avoid=endpoint)
                    if taken is None:  # the last one was opened while this request waited for its place
                        continue
                    endpoint = taken
                    return await self._try(endpoint, path, content, headers, read)
            except _Failed as failure:
                last = failure
            except Unavailable as error:
                last = _Failed(error.url, str(error))
            tries += 1
            if not last.again or tries > self.limits.retries:
                self._counters["failed"] += 1
                raise RemoteError(last.url, tries, str(last), of_content=last.of_content)
            self._counters["retries"] += 1
            await asyncio.sleep(self._wait_s(tries, min(last.wait_s, self.limits.total_s)))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, from synchronous code; it is cancelled when this thread is interrupted."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def wait_ready(self, limit_s: float = 5.0) -> dict[str, dict[str, Any]]:
        """Wait until the endpoints answer, and give what each says of itself (`/v1/info`; empty without one).

        An endpoint that is not there while others are is logged, and used once it is.

        Raises:
            RemoteError: none is ready within the limit; the message names each, with the recipe's option.
        """
        try:
            return self.run(wait_until_ready(self.endpoints, self._checks, limit_s))
        except Unavailable as error:
            raise RemoteError(error.url, 1, str(error)) from None

    def take_metrics(self, prefix: str) -> dict[str, float]:
        """What happened since the last call: every counter but `failed` as `PREFIX/NAME`, and
        `PREFIX/latency_p50_s` and `PREFIX/latency_p99_s` of the requests that succeeded, each from its last
        sending, where there were any.

        `failed` is left out: it counts requests, and callers report samples under that name.
        """
        now = Counter(self._counters)
        names = (
            "requests",
            "retries",
            "timeouts",
            "connection_errors",
            "status_429",
            "status_5xx",
            "bad_answers",
        )
        metrics: dict[str, float] = {f"{prefix}/{name}": now[name] - self._taken[name] for name in names}
        self._taken = now
        taken = sorted(self._latencies_s.popleft() for _ in range(len(self._latencies_s)))
        if taken:
            for percent in (50, 99):
                metrics[f"{prefix}/latency_p{percent}_s"] = taken[
                    min(len(taken) * percent // 100, len(taken) - 1)
                ]
        return metrics

    def close(self) -> None:
        """Close the connections and end the thread."""
        if self._loop.is_closed():
            return
        self._watch.cancel()
        asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wait_s(self, tries: int, asked_s: float) -> float:
        """The wait after `tries` failed tries, no shorter than the server asks; requests come back spread."""
        return max(self.limits.wait_s(tries), asked_s + random.random() * self.limits.backoff_s)

    async def _try(
        self,
        endpoint: Endpoint,
        path: str | None,
        content: bytes,
        headers: dict[str, str],
        read: Callable[[bytes, str], T],
    ) -> T:
        """One try: sent again for as long as servers say that they are full, within the limit."""
        deadline_s = time.monotonic() + self.limits.total_s
        refusals = 0
        while True:
            try:
                return await self._send(endpoint, path, content, headers, read)
            except _Busy as busy:
                refusals += 1
                wait_s = self._wait_s(refusals, busy.wait_s)
                url = endpoint.url_of(path)
                if time.monotonic() + wait_s > deadline_s:
                    asks = f" and asks to wait {busy.wait_s:g} s more" if busy.wait_s else ""
                    raise _Failed(
                        url,
                        f"the server is full: status 429, {refusals} times{asks}, more than total_s "
                        f"{self.limits.total_s:g} allows; lower in_flight or add endpoints: {busy}",
                        again=False,
                    ) from None
            await asyncio.sleep(wait_s)
            free = self.endpoints.take(avoid=endpoint)
            if free is None:
                raise _Failed(url, f"full (status 429), and then not reachable: {self.endpoints.report()}")
            endpoint = free

    async def _send(
        self,
        endpoint: Endpoint,
        path: str | None,
        content: bytes,
        headers: dict[str, str],
        read: Callable[[bytes, str], T],
    ) -> T:
        """Send once to an endpoint that was taken, and read its answer."""
        url, limits = endpoint.url_of(path), self.limits
        start_s = time.monotonic()
        fault: str | None = None
        answered = False
        try:
            async with asyncio.timeout(limits.total_s):
                response, body = await self._exchange(url, content, headers)
            # 500: it ran, and failed on what was in the request. The other 5xx say that it cannot run.
            answered = response.status_code <= 500
            result = self._read(url, response, body, read)
            self._latencies_s.append(time.monotonic() - start_s)
            return result
        except TimeoutError:
            self._counters["timeouts"] += 1
            fault = f"no whole answer within total_s {limits.total_s:g}"
        except httpx2.TimeoutException as error:
            self._counters["timeouts"] += 1
            connecting = isinstance(error, httpx2.ConnectTimeout)
            limit = f"connect_s {limits.connect_s:g}" if connecting else f"read_s {limits.read_s:g}"
            fault = f"no {'connection' if connecting else 'answer'} within {limit}"
        except httpx2.HTTPError as error:
            self._counters["connection_errors"] += 1
            fault = f"{endpoint.address} {in_words(error)}"
        except _Failed as failure:
            fault = str(failure)
            raise
        finally:
            self.endpoints.release(endpoint, answered=answered, fault=fault)
        raise _Failed(url, fault)

    def _line(self) -> httpx2.AsyncClient:
        """One that holds a connection to each endpoint: it looks at all its connections for every request,
        which costs more than the request does when there are many."""
        line = httpx2.AsyncClient(
            headers=self._headers,
            verify=self._tls,
            timeout=httpx2.Timeout(self.limits.read_s, connect=self.limits.connect_s, pool=None),
            limits=httpx2.Limits(keepalive_expiry=30.0),
        )
        self._lines.append(line)
        return line

    async def _hang_up(self) -> None:
        await asyncio.gather(*(line.aclose() for line in self._lines))

    async def _exchange(
        self, url: str, content: bytes, headers: dict[str, str]
    ) -> tuple[httpx2.Response, bytes]:
        """The response and its body, which may not be too long."""
        line = self._idle.pop() if self._idle else self._line()
        try:
            async with line.stream("POST", url, content=content, headers=headers) as response:
                body = bytearray()
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > MOST_BYTES:
                        raise _Failed(url, f"the answer is longer than {MOST_BYTES >> 20} MiB", again=False)
                return response, bytes(body)
        finally:
            self._idle.append(line)

    def _read(
        self,
        url: str,
        response: httpx2.Response,
        body: bytes,
        read: Callable[[bytes, str], T],
    ) -> T:
        status, kind = response.status_code, response.headers.get("content-type", "")
        if status == 429:
            self._counters["status_429"] += 1
            raise _Busy(retry_after_s(response.headers.get("retry-after")), shown(body))
        if status >= 500:
            self._counters["status_5xx"] += 1
            asked_s = retry_after_s(response.headers.get("retry-after"))
            raise _Failed(url, f"status {status}: {shown(body)}", of_content=status == 500, wait_s=asked_s)
        if status >= 400:
            self._counters["status_4xx"] += 1
            about = status not in (401, 403, 404, 405, 407)
            raise _Failed(url, f"status {status}: {shown(body)}", again=False, of_content=about)
        if status != 200:
            to = response.headers.get("location")
            where = f"; it sends to {to}: name that in {self.what}.endpoints" if to else ""
            raise _Failed(url, f"status {status}{where}: {shown(body)}", again=False)
        try:
            return read(body, kind)
        except BadAnswer as error:
            self._counters["bad_answers"] += 1
            why = f"{error}; the answer ({kind or 'no content type'}): {shown(body)}"
            raise _Failed(url, why, of_content=True) from None


def retry_after_s(value: str | None) -> float:
    """Seconds that a `Retry-After` header asks for, as a number or a date; 0 for none or something else."""
    if not value:
        return 0.0
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0


def shown(body: bytes) -> str:
    """The beginning of a body, on one line."""
    text = " ".join(body[: 4 * SHOWN_CHARACTERS].decode("utf-8", "replace").split())
    return (text[:SHOWN_CHARACTERS] + "...") if len(text) > SHOWN_CHARACTERS else (text or "empty body")
