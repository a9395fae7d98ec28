"""A scoring service that goes wrong on purpose, as a process of its own.

It speaks all three forms of requests and gives each sample the score `right_score(query)`, so that a test can
tell which sample an answer belongs to. `--script 503,reset,ok` makes faults in that order (`ok` afterwards),
`--share 0.05` at random; `--delay` is the time that each answer takes. `GET /seen` tells what happened, and
`GET /reset?script=...&share=...` begins anew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import urllib.request
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, urlencode

from rolemesh.engine.remote.forms import Sample, Score, answer, read_request

FAULTS = (
    "503",
    "429",
    "reset",
    "reset-in-body",
    "slow-headers",
    "silence",
    "truncated",
    "short",
    "long",
    "doubled",
    "shuffled",
    "nan",
    "null",
    "infinite",
    "text",
    "html",
    "dummy",
)
"""`shuffled` is right in the forms that carry ids; the others are faults in all of them."""
OTHERS = ("ok", "400", "401", "500", "dict", "poison", "redirect", "retry-after")


def right_score(query: str) -> float:
    """The score of a sample: a number that its text alone decides."""
    return zlib.crc32(query.encode()) % 100_000 / 1000


class Service:
    """The faults to come, and what was seen."""

    def __init__(self, script: str, share: float, kinds: str, seed: int, delay: float) -> None:
        self.script = [name for name in script.split(",") if name]
        self.share, self.kinds, self.delay_s = share, kinds.split(","), delay
        unknown = {*self.script, *self.kinds} - {*FAULTS, *OTHERS}
        if unknown:
            raise ValueError(f"no faults {sorted(unknown)}; there are {[*FAULTS, *OTHERS]}")
        self.random = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.samples: Counter[str] = Counter()  # by query: how often it was scored in an answer without fault
        self.bodies: list[Any] = []
        self.authorization: str | None = None
        self.requests = self.in_flight = self.most_in_flight = 0
        self.healthy = True

    def next_fault(self) -> str:
        if self.script:
            return self.script.pop(0) if len(self.script) > 1 or self.script[0] == "ok" else self.script[0]
        if self.random.random() < self.share:
            return self.random.choice(self.kinds)
        return "ok"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """All requests of one connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, path, _ = head.split("\r\n")[0].split(" ")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:] if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            reply(writer, *self._get(path))
            await writer.drain()
            return True
        self.authorization = headers.get("authorization")
        self.requests += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._post(json.loads(body), writer)
        finally:
            self.in_flight -= 1

    def _get(self, path: str) -> tuple[int, Any]:
        if path == "/seen":
            names = ("faults", "samples", "requests", "most_in_flight", "authorization", "bodies")
            return 200, {name: getattr(self, name) for name in names}
        if path.startswith("/reset?"):
            given = dict(parse_qsl(path.partition("?")[2]))
            self.__init__(  # type: ignore[misc]
                given.get("script", ""),
                float(given.get("share", 0)),
                given.get("kinds", ",".join(FAULTS)),
                int(given.get("seed", 0)),
                float(given.get("delay", 0)),
            )
            return 200, {}
        if path in ("/sick", "/well"):
            self.healthy = path == "/well"
            return 200, {}
        if path in ("/healthz", "/readyz"):
            return (200, {}) if self.healthy else (503, {"detail": "loading"})
        return 404, {"detail": "not found"}

    async def _post(self, body: Any, writer: asyncio.StreamWriter) -> bool:
        protocol, samples = read_request(body)
        if len(self.bodies) < 4:
            self.bodies.append(body)
        fault = self.next_fault()
        self.faults[fault] += 1
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        scores = [Score(sample.id, right_score(sample.query)) for sample in samples]
        right = answer(protocol, samples, scores)
        with_ids = protocol == "rolemesh" or (protocol == "openrlhf" and "ids" in body)
        if fault in ("ok", "dict") or (fault == "shuffled" and with_ids):
            self.samples.update(sample.query for sample in samples)
        return await self._go_wrong(fault, protocol, samples, right, writer)

    async def _go_wrong(
        self, fault: str, protocol: str, samples: list[Sample], right: Any, writer: asyncio.StreamWriter
    ) -> bool:
        """Give the answer with the fault; whether the connection goes on."""
        match fault:
            case "ok":
                reply(writer, 200, right)
            case "503" | "500" | "400" | "401" | "429":
                reply(writer, int(fault), {"detail": f"fault {fault}"})
            case "retry-after":
                reply(writer, 429, {"detail": "full"}, {"retry-after": "1"})
            case "redirect":
                reply(writer, 307, {}, {"location": "/elsewhere"})
            case "html":
                page = b"<html><body><h1>502 Bad Gateway</h1></body></html>"
                reply(writer, 200, page, {"content-type": "text/html"})
            case "truncated":
                text = json.dumps(right).encode()
                reply(writer, 200, text[: len(text) // 2])
            case "reset" | "reset-in-body":
                if fault == "reset-in-body":
                    text = json.dumps(right).encode()
                    writer.write(head(200, len(text), {}) + text[:-1])
                    await writer.drain()
                writer.transport.abort()
                return False
            case "silence":
                await asyncio.sleep(3600)
            case "slow-headers":
                for letter in head(200, 2, {}) * 100:
                    writer.write(bytes([letter]))
                    await writer.drain()
                    await asyncio.sleep(0.1)
                return False
            case "poison":
                bad = [i for i, sample in enumerate(samples) if "poison" in sample.query]
                reply(writer, 200, spoiled(protocol, right, "nan", bad) if bad else right)
            case _:
                reply(writer, 200, spoiled(protocol, right, fault, [len(samples) // 2]))
        await writer.drain()
        return True


def spoiled(protocol: str, right: Any, fault: str, rows: list[int]) -> Any:
    """The right answer made wrong; the faults of one score are at `rows`."""
    values = {"nan": float("nan"), "null": None, "infinite": float("inf"), "text": "0.8x"}
    if protocol == "slime":
        return {"score": right, "acc": 0} if fault == "dict" else values.get(fault, [right, right])
    key = "rewards" if protocol == "openrlhf" else "scores"
    scores = list(right[key])
    ids = list(right.get("ids", scores))
    if fault in values or fault == "dict":
        for row in rows if fault != "dict" else range(len(scores)):
            value = scores[row] if protocol == "openrlhf" else scores[row]["score"]
            value = {"score": value, "acc": 0} if fault == "dict" else values[fault]
            scores[row] = value if protocol == "openrlhf" else {**scores[row], "score": value}
    order = {
        "short": list(range(len(scores) - 1)),
        "long": [*range(len(scores)), 0],
        "doubled": [0, *range(len(scores) - 1)] if len(scores) > 1 else [0, 0],
        "shuffled": list(reversed(range(len(scores)))),
        "dummy": [0],
    }.get(fault, list(range(len(scores))))
    if fault == "dummy":
        return {key: [0.5]} if protocol == "openrlhf" else {"version": 1, "scores": scores[:1] * 2}
    wrong = {**right, key: [scores[i] for i in order]}
    if "ids" in right:
        wrong["ids"] = [ids[i] for i in order]
    if "scores" in right and key == "rewards":
        wrong["scores"] = wrong["rewards"]
    return wrong


def head(status: int, length: int, headers: dict[str, str]) -> bytes:
    lines = {"content-type": "application/json", "content-length": str(length)} | headers
    return "\r\n".join([f"HTTP/1.1 {status} X", *(f"{k}: {v}" for k, v in lines.items()), "", ""]).encode()


def reply(
    writer: asyncio.StreamWriter, status: int, body: Any, headers: dict[str, str] | None = None
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    writer.write(head(status, len(content), headers or {}) + content)


@dataclass(frozen=True)
class Running:
    """A started server."""

    port: int
    process: subprocess.Popen

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/get_reward"

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as response:
            return json.load(response)

    @property
    def seen(self) -> dict[str, Any]:
        """Counts of faults, of samples (by query), of requests, the most in flight, the first bodies."""
        return self.get("/seen")

    def reset(self, script: str = "", **options: float | str) -> Self:
        """Forget all, and begin anew with other faults."""
        self.get(f"/reset?{urlencode({'script': script, **options})}")
        return self


@contextlib.contextmanager
def faulty_server(*arguments: str) -> Iterator[Running]:
    """A server in another process, for the time of a test."""
    command = [sys.executable, str(Path(__file__)), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the faulty server did not start; see its error above"
        yield Running(int(line), process)
    finally:
        process.kill()
        process.wait()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--script", default="", help="faults in order, with commas; the last one stays")
    parser.add_argument("--share", type=float, default=0.0, help="of requests with a fault")
    parser.add_argument("--kinds", default=",".join(FAULTS), help="the faults that `--share` chooses from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that an answer takes")
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    service = Service(given.script, given.share, given.kinds, given.seed, given.delay)
    server = await asyncio.start_server(service.handle, "127.0.0.1", given.port, limit=1 << 26)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
