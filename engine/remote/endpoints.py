"""The endpoints of one service: which one a request goes to, and which ones are left alone for a while."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

log = logging.getLogger(__name__)

FAILURES_TO_OPEN = 5
HEALTH_EVERY_S = 5.0
READY_EVERY_S = 0.25


class Unavailable(Exception):
    """No endpoint takes requests; the message says why each does not. `url` is one of them."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(why)
        self.url = url


@dataclass(eq=False)
class Endpoint:
    """One URL and its circuit breaker.

    Closed, it takes requests. `FAILURES_TO_OPEN` failures in a row, or a failed health check, open it: it
    gets none until `open_until_s`. Then, half-open, it gets one, the probe: an answer closes it, a failure
    opens it again for twice the time.
    """

    url: str
    option: str  # where the recipe names it
    in_flight: int = 0
    failures: int = 0  # in a row
    open_until_s: float | None = None  # None: closed; a time.monotonic()
    open_s: float = 0.0
    probing: bool = False
    cause: str = ""
    health: bool | None = None  # whether it offers /healthz; None: not known
    _urls: dict[str | None, str] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """`closed`, `open` or `half-open`."""
        if self.open_until_s is None:
            return "closed"
        return "half-open" if self.probing or time.monotonic() >= self.open_until_s else "open"

    @property
    def free(self) -> bool:
        """Whether it takes a request now."""
        return self.open_until_s is None or (not self.probing and time.monotonic() >= self.open_until_s)

    def url_of(self, path: str | None) -> str:
        """The URL to post to: `/path` replaces the endpoint's path, `path` goes after it."""
        if path not in self._urls:
            url = httpx2.URL(self.url)
            if path is not None and not path.startswith("/"):
                path_there = f"{url.path.rstrip('/')}/{path}"
            else:
                path_there = url.path if path is None else path
            self._urls[path] = str(url.copy_with(path=path_there))
        return self._urls[path]

    @property
    def address(self) -> str:
        """host:port."""
        url = httpx2.URL(self.url)
        return f"{url.host}:{url.port or {'http': 80, 'https': 443}[url.scheme]}"


class Endpoints:
    """All endpoints of a service. Everything runs in one event loop.

    Args:
        urls: where requests go.
        what: the recipe's section, for messages.
        open_s: how long a breaker stays open at first; at most `open_most_s`.

    Raises:
        ValueError: no URL, or one that is not http(s)://host[:port][/path].
    """

    def __init__(self, urls: Sequence[str], *, what: str, open_s: float, open_most_s: float) -> None:
        if isinstance(urls, str) or not urls:
            raise ValueError(f"{what}.endpoints is {urls!r}; give a list of at least one URL")
        self.open_s, self.open_most_s = open_s, open_most_s
        self.all = [_endpoint(url, f"{what}.endpoints[{number}]") for number, url in enumerate(urls)]
        self._failed_probes = 0
        self._changed = asyncio.Event()

    def take(self, avoid: Endpoint | None = None) -> Endpoint | None:
        """The free endpoint with the fewest requests in flight, now one more; None when there is none.

        `avoid`: where a request failed; it is taken only when no other is free.
        """
        free = [endpoint for endpoint in self.all if endpoint.free]
        if not free:
            return None
        chosen = min(free, key=lambda e: (e is avoid, e.in_flight, random.random()))
        chosen.in_flight += 1
        chosen.probing = chosen.open_until_s is not None
        return chosen

    def release(self, endpoint: Endpoint, *, answered: bool, fault: str | None) -> None:
        """A request's end: it was answered, or there was a fault, or neither: it was cancelled."""
        endpoint.in_flight -= 1
        probe, endpoint.probing = endpoint.probing, False
        if answered:
            endpoint.failures = 0
            if probe:  # the answer to a request from before the breaker opened says nothing of now
                log.warning("%s answers again", endpoint.url)
                endpoint.open_until_s, endpoint.open_s = None, 0.0
        elif fault is not None:
            endpoint.failures, endpoint.cause = endpoint.failures + 1, fault
            if probe:
                self._failed_probes += 1
                self.open(endpoint, fault)
            elif endpoint.failures >= FAILURES_TO_OPEN and endpoint.open_until_s is None:
                self.open(endpoint, fault)
        self._wake()

    def open(self, endpoint: Endpoint, cause: str) -> None:
        """Open its breaker, for twice as long as the time before."""
        if endpoint.open_until_s is None:
            log.warning("%s gets no requests for a while: %s", endpoint.url, cause)
        endpoint.open_s = min(endpoint.open_s * 2 or self.open_s, self.open_most_s)
        endpoint.open_until_s = time.monotonic() + endpoint.open_s
        endpoint.cause, endpoint.probing = cause, False
        self._wake()

    async def admitted(self) -> None:
        """Wait until an endpoint is free.

        Raises:
            Unavailable: as many probes failed meanwhile as there are endpoints. That ends every wait: a
                breaker is open for `open_most_s` at most, and a probe has its own limit.
        """
        failed_before = self._failed_probes
        while not any(endpoint.free for endpoint in self.all):
            if self._failed_probes - failed_before >= len(self.all):
                raise Unavailable(self.all[0].url, self.report())
            until_s = [e.open_until_s for e in self.all if not e.probing and e.open_until_s is not None]
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(until_s) - time.monotonic()) if until_s else None):
                    await changed.wait()

    def report(self) -> str:
        """What is wrong with each endpoint."""
        return "; ".join(f"{e.url} ({e.state}): {e.cause or 'no fault'}" for e in self.all)

    async def watch(self, http: httpx2.AsyncClient, limit_s: float) -> None:
        """Check health for ever, of the endpoints that offer it and that have requests or an open breaker.

        A check that is refused, or answered with 5xx, opens the breaker at once; one that succeeds lets an
        open breaker's probe go at once. A slow one means nothing: the server may be busy.
        """
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            due = [e for e in self.all if e.in_flight or e.open_until_s is not None]
            await asyncio.gather(*(self._check(http, endpoint, limit_s) for endpoint in due))

    async def _check(self, http: httpx2.AsyncClient, endpoint: Endpoint, limit_s: float) -> None:
        if endpoint.health is False:
            return
        try:
            status = (await _get(http, endpoint.url_of("/healthz"), limit_s)).status_code
        except (httpx2.TimeoutException, TimeoutError) as error:
            if not isinstance(error, httpx2.ConnectTimeout):
                return
            fault: str | None = f"no connection within {limit_s:g} s"
        except httpx2.HTTPError as error:
            fault = f"{type(error).__name__}: {error}"
        else:
            if endpoint.health is None:
                endpoint.health = status == 200
            fault = f"/healthz gives status {status}" if status >= 500 and endpoint.health else None
            if endpoint.health and fault is None and endpoint.open_until_s is not None:
                endpoint.open_until_s = min(endpoint.open_until_s, time.monotonic())
                self._wake()
        if fault is not None and endpoint.health and endpoint.open_until_s is None:
            self.open(endpoint, fault)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def wait_until_ready(
    endpoints: Endpoints, http: httpx2.AsyncClient, limit_s: float
) -> dict[str, dict[str, Any]]:
    """What each ready endpoint says of itself, by URL, once one is ready; see `Client.wait_ready`.

    Ready is what answers `GET /readyz` with anything but 503: not every server offers it.

    Raises:
        Unavailable: none is within the limit.
    """
    deadline_s = time.monotonic() + 0.9 * limit_s
    faults = await asyncio.gather(*(_ready(http, endpoint, deadline_s) for endpoint in endpoints.all))
    lacking = {e.url: f"{e.option} = {e.url}: {f}" for e, f in zip(endpoints.all, faults, strict=True) if f}
    if len(lacking) == len(endpoints.all):
        raise Unavailable(endpoints.all[0].url, "; ".join(lacking.values()))
    infos = {}
    for endpoint in endpoints.all:
        if endpoint.url in lacking:
            log.warning("%s; the other endpoints take its requests", lacking[endpoint.url])
            endpoints.open(endpoint, lacking[endpoint.url])
        else:
            infos[endpoint.url] = await _info(http, endpoint, limit_s)
    return infos


async def _ready(http: httpx2.AsyncClient, endpoint: Endpoint, deadline_s: float) -> str | None:
    """None once the endpoint is ready, or what is wrong with it at the deadline."""
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            response = await _get(http, endpoint.url_of("/readyz"), left_s)
        except (httpx2.TimeoutException, TimeoutError) as error:
            fault = f"{endpoint.address} takes connections, but does not answer within {left_s:.1f} s"
            if isinstance(error, httpx2.ConnectTimeout):
                fault = f"no connection to {endpoint.address} within {left_s:.1f} s; is the host right?"
        except httpx2.HTTPError as error:
            fault = f"{endpoint.address} {in_words(error)}"
        else:
            if response.status_code != 503:
                if response.status_code == 200:
                    with contextlib.suppress(httpx2.HTTPError, TimeoutError):
                        health = await _get(http, endpoint.url_of("/healthz"), 1.0)
                        endpoint.health = health.status_code == 200
                return None
            fault = f"{endpoint.address} is not ready yet: /readyz gives 503, {response.text[:200]!r}"
        if time.monotonic() + READY_EVERY_S >= deadline_s:
            return fault
        await asyncio.sleep(READY_EVERY_S)


async def _info(http: httpx2.AsyncClient, endpoint: Endpoint, limit_s: float) -> dict[str, Any]:
    try:
        response = await _get(http, endpoint.url_of("/v1/info"), limit_s)
        info = response.json() if response.status_code == 200 else {}
    except (httpx2.HTTPError, TimeoutError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


async def _get(http: httpx2.AsyncClient, url: str, limit_s: float) -> httpx2.Response:
    async with asyncio.timeout(limit_s):
        return await http.get(url, timeout=limit_s)


def in_words(error: httpx2.HTTPError) -> str:
    """What a connection error means, to follow the address."""
    text = str(error) or type(error).__name__
    if isinstance(error, httpx2.ConnectError):
        if "not known" in text or "getaddrinfo" in text or "name resolution" in text:
            return f"is a host name that is not known ({text})"
        if "attempts failed" in text or "refused" in text.lower():
            return "refused the connection: nothing listens there; is the service started, the port right?"
    if isinstance(error, httpx2.NetworkError | httpx2.RemoteProtocolError):
        return f"broke the connection off ({type(error).__name__}: {text})"
    return f"fails: {type(error).__name__}: {text}"


def _endpoint(url: str, option: str) -> Endpoint:
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError) as error:
        raise ValueError(f"{option} is {url!r}, not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{option} is {url!r}; write http://host:port/path")
    if parsed.userinfo:
        raise ValueError(f"{option} holds a password, which would be logged; use token_env or token_file")
    return Endpoint(str(url), option)
