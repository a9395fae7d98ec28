"""The HTTP side of a server: paths, who may ask, sizes, and which status an error has."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from rolemesh.engine.remote.forms import FormError, Score, answer, read_request
from rolemesh.engine.remote.log_probs import is_binary, log_probs_answer, read_log_probs_request
from rolemesh.launch.services.backend import Job, UnfitError
from rolemesh.launch.services.batcher import QueueFullError
from rolemesh.launch.services.service import RefusedError, Service

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
BODY_S = 60.0
"""A request's body must have come by then."""


def make_app(service: Service, token: str | None) -> FastAPI:
    """The application. `token`: the bearer token that all paths but `/healthz` and `/readyz` ask for."""
    app = FastAPI(title="rolemesh", docs_url=None, redoc_url=None, openapi_url=None)

    async def healthz(request: Request) -> Response:
        return _json({"status": "ok"})

    async def readyz(request: Request) -> Response:
        return _json({"status": service.state}, 200 if service.state == "ready" else 503)

    async def info(request: Request) -> Response:
        if service.state == "loading":
            raise RefusedError(503, "the server is loading", {"Retry-After": "1"})
        return _json(service.info)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def score(request: Request) -> Response:
        with service.accepted():
            content = await _body(request, service.limits.body_bytes)
            (protocol, samples), jobs = await asyncio.to_thread(_prepare, service, _read_scores, content)
            results = await service.run(jobs)
        scores = [Score(one.id, *result) for one, result in zip(samples, results, strict=True)]
        return _json(answer(protocol, samples, scores))

    async def log_probs(request: Request) -> Response:
        with service.accepted():
            content = await _body(request, service.limits.body_bytes)
            kind = request.headers.get("content-type", "")
            read = lambda content: read_log_probs_request(content, kind)  # noqa: E731
            (samples, _), jobs = await asyncio.to_thread(_prepare, service, read, content)
            results = await service.run(jobs)
        try:
            body, media_type = log_probs_answer(samples, results, binary=is_binary(kind))
        except FormError as error:  # the model's values, not the request
            raise ArithmeticError(str(error)) from error
        return Response(body, media_type=media_type)

    def add(method: str, path: str, handler: Handler, *, open_to_all: bool = False) -> None:
        app.add_api_route(
            path, _handled(service, path, handler, None if open_to_all else token), methods=[method]
        )

    add("GET", "/healthz", healthz, open_to_all=True)
    add("GET", "/readyz", readyz, open_to_all=True)
    add("GET", "/v1/info", info)
    add("GET", "/metrics", metrics)
    if service.kind == "reference":
        add("POST", "/v1/log_probs", log_probs)
    else:
        add("POST", "/v1/score", score)
        add("POST", "/get_reward", score)

    async def nothing_here(request: Request, error: Any) -> Response:
        paths = sorted(route.path for route in app.routes)  # type: ignore[attr-defined]
        return _error(404, f"this server has no {request.url.path}; it has {', '.join(paths)}")

    app.add_exception_handler(404, nothing_here)
    return app


def _read_scores(content: bytes) -> tuple[Any, Any]:
    try:
        body = json.loads(content)
    except ValueError as error:
        raise FormError(f"the body is not JSON: {error}") from error
    return read_request(body)


def _prepare(service: Service, read: Callable[[bytes], Any], content: bytes) -> tuple[Any, list[Job]]:
    """What a body holds, and its samples as jobs; in a thread, as long texts take a while."""
    request = read(content)
    samples = request[1] if service.kind != "reference" else request[0]
    if len(samples) > service.limits.samples:
        most = service.limits.samples
        raise RefusedError(413, f"the request has {len(samples)} samples; at most {most} are taken")
    return request, service.jobs(request if service.kind == "reference" else samples)


def _handled(service: Service, path: str, handler: Handler, token: str | None) -> Handler:
    """The handler behind the token, with errors as answers, counted."""

    async def handle(request: Request) -> Response:
        start_s = time.monotonic()
        try:
            _authorise(request, token)
            response = await handler(request)
        except Exception as error:
            response = _answer_to(error, path)
        service.metrics.request(path, response.status_code, time.monotonic() - start_s)
        return response

    return handle


def _authorise(request: Request, token: str | None) -> None:
    given = request.headers.get("authorization", "")
    if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        message = "a bearer token is needed" if not given else "the bearer token is not this server's"
        raise RefusedError(401, message, {"WWW-Authenticate": "Bearer", "Connection": "close"})


def _answer_to(error: Exception, path: str) -> Response:
    match error:
        case RefusedError():
            return _error(error.status, str(error), error.headers)
        case FormError() | UnfitError():
            return _error(422, str(error))
        case QueueFullError():
            return _error(429, f"the queue is full: {error}", {"Retry-After": "1"})
    log.error("%s failed", path, exc_info=error)
    return _error(500, f"{type(error).__name__}: {error}")


async def _body(request: Request, most_bytes: int) -> bytes:
    """The request's body. Raises RefusedError (413, 408)."""
    too_large = RefusedError(413, f"the body is above {most_bytes} bytes", {"Connection": "close"})
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most_bytes:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > most_bytes:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise RefusedError(
            408, f"the body did not come within {BODY_S:g} s", {"Connection": "close"}
        ) from None
    return b"".join(parts)


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    content = json.dumps(body, allow_nan=False, default=str).encode()
    return Response(content, status, headers, "application/json")


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return _json({"error": message}, status, headers)
