"""Runs a server until it is told to stop, and lets what it has accepted end."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import uvicorn

from rolemesh.launch import tokens
from rolemesh.launch.services.app import make_app
from rolemesh.launch.services.backend import Backend, Kind, ServeError
from rolemesh.launch.services.service import ServerLimits, Service


def read_token(env: str, file: Path | None) -> str | None:
    """The bearer token from an environment variable or a file; None when neither is named.

    A file that others may read is told of. Raises ServeError when both are, or what is named holds no token.
    """
    try:
        token = tokens.read_token(env, file, "--token-env", "--token-file")
    except tokens.TokenError as error:
        raise ServeError(str(error)) from error
    if file is not None and (told := tokens.read_by_others(file)):
        print(f"warning: --token-file: {told}", file=sys.stderr, flush=True)
    return token


def serve(
    kind: Kind,
    name: str,
    load: Callable[[], Backend],
    *,
    host: str,
    port: int,
    limits: ServerLimits,
    token: str | None,
) -> int:
    """Serve until SIGTERM or SIGINT; the exit code is 0 when every accepted request was answered.

    Prints a line with the URL once it listens, and one once it is ready; port 0 takes a free port.

    Raises ServeError when the address is taken, or what loading raises.
    """
    with _listen(host, port) as listener:
        return asyncio.run(_serve(kind, name, load, listener, limits, token))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ServeError(f"cannot listen on --host {host} --port {port}: {error}") from error
    return listener


async def _serve(
    kind: Kind,
    name: str,
    load: Callable[[], Backend],
    listener: socket.socket,
    limits: ServerLimits,
    token: str | None,
) -> int:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    service = Service(kind, load, limits)
    server = _Server(service, make_app(service, token))
    print(f"listening on {url}, loading {name}", flush=True)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(service.start())
    try:
        await asyncio.wait([serving, starting], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            print(f"ready: {kind} {name} at {url}", flush=True)
        await serving
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
    if not starting.done():
        _leave(f"stopped while loading {name}")
    if server.unfinished:
        _leave(
            f"{server.unfinished} requests had no answer: open after {limits.drain_s:g} s, or stopped twice"
        )
    if not await service.close():
        _leave("a batch that nobody waits for any more did not end")
    return 0


def _leave(why: str) -> NoReturn:
    """End this process although a thread in it is busy, which cannot be stopped."""
    print(why, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


class _Server(uvicorn.Server):
    """Drains at the first signal, stops at the second."""

    def __init__(self, service: Service, app: object) -> None:
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,  # answers on their way out; requests were waited for before
        )
        super().__init__(config)
        self.service, self.unfinished = service, 0
        self._draining: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.service.state != "ready":
            self.unfinished = self.service.in_flight
            self.should_exit = True
        else:
            self.service.state = "draining"
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        async def drain() -> None:
            self.unfinished = await self.service.drain()
            self.should_exit = True

        self._draining = self._loop.create_task(drain())
