"""A judge's engines as Ray actors, and the client that asks them in the place of a service's."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ray

from rolemesh.engine.ray.engines import EngineDied, EngineProcess, settle
from rolemesh.engine.remote.http import Limits, RemoteError
from rolemesh.engine.rollout.vllm import VLLMSpec
from rolemesh.engine.rollout.vllm_chat import Answer, ChatEngine, ChatRefused

T = TypeVar("T")


class JudgeHost:
    """Body of the actor: many requests wait in it while one thread runs the engine."""

    def __init__(self, spec: VLLMSpec, devices: Sequence[str], threads: int, log: str | None) -> None:
        settle(devices, threads, log)
        self._spec = spec

    async def start(self) -> int:
        """Make the engine; the process id."""
        self._engine = await asyncio.to_thread(ChatEngine, self._spec)
        return os.getpid()

    async def answer(self, body: Mapping[str, Any]) -> Answer:
        return await asyncio.wrap_future(self._engine.ask(body))

    async def sleep(self) -> None:
        await asyncio.wrap_future(self._engine.sleep())


class JudgeProcess(EngineProcess):
    """The handle on a judge's engine."""

    @staticmethod
    def _actor_class() -> Any:
        return ray.remote(concurrency_groups={"compute": 1000, "control": 1})(JudgeHost)  # type: ignore[call-overload]

    async def answer(self, body: Mapping[str, Any]) -> Answer:
        """The text, and why it ended. Raises ChatRefused, or EngineDied."""
        ref = self._actor.answer.options(concurrency_group="compute").remote(body)
        with self._failures():
            answer: Answer = await ref
            return answer


class EngineClient:
    """Asks engines as a `Client` asks the endpoints of a service: as many requests at once as the limits say,
    each with the engine that has the fewest, tried again where its engine died. One thread uses it.

    Args:
        start: a new engine in the i-th place, started.
        n: places.
        limits: `in_flight`, `total_s` and `retries` count; a place gets `retries` new engines in a `run`.
    """

    def __init__(self, start: Callable[[int], JudgeProcess], n: int, limits: Limits) -> None:
        self.limits, self._start = limits, start
        with ThreadPoolExecutor(n) as places:
            self._engines = list(places.map(start, range(n)))
        self._in_flight = Counter(dict.fromkeys(range(n), 0))
        self._restarts: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(limits.in_flight)
        self._replacing = [asyncio.Lock() for _ in range(n)]

    @property
    def pids(self) -> list[int | None]:
        """The engines' processes."""
        return [engine.pid for engine in self._engines]

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, from synchronous code."""
        self._restarts.clear()
        return self._loop.run_until_complete(coroutine)

    async def post(self, content: bytes, content_type: str, read: Callable[[bytes, str], T]) -> T:
        """What `read` makes of the answer, in the form of a chat completion. To be awaited inside `run`.

        Raises RemoteError: the engine refuses the request, or there was no answer in all tries.
        """
        body = json.loads(content)
        self._counts["requests"] += 1
        async with self._slots:
            for tries in range(1, 2 + self.limits.retries):
                place = min(self._in_flight, key=lambda i: self._in_flight[i])
                engine, why = self._engines[place], ""
                self._in_flight[place] += 1
                try:
                    text, end = await asyncio.wait_for(engine.answer(body), self.limits.total_s)
                    choice = {"message": {"content": text}, "finish_reason": end}
                    return read(json.dumps({"choices": [choice]}).encode(), content_type)
                except ChatRefused as error:
                    raise RemoteError(engine.name, tries, str(error), of_content=True) from None
                except TimeoutError:
                    why = f"no answer within total_s {self.limits.total_s:g}"
                except EngineDied as error:
                    why = str(error)
                    await self._replace(place, engine, error)
                finally:
                    self._in_flight[place] -= 1
                self._counts["retries"] += 1
        raise RemoteError(engine.name, tries, why)

    def take_metrics(self, prefix: str) -> dict[str, float]:
        """What happened since the last call: `requests`, `retries`, `engine_restarts`."""
        counts, self._counts = self._counts, Counter()
        names = ("requests", "retries", "engine_restarts")
        return {f"{prefix}/{name}": float(counts[name]) for name in names}

    def sleep(self) -> None:
        """Let the engines give their devices' memory back until the next request."""
        for place, engine in enumerate(self._engines):
            try:
                engine.sleep()
            except EngineDied as error:
                self._loop.run_until_complete(self._replace(place, engine, error))

    def close(self) -> None:
        """End the engines."""
        for engine in self._engines:
            engine.kill()
        self._loop.close()

    async def _replace(self, place: int, dead: JudgeProcess, error: EngineDied) -> None:
        """A new engine for one that failed, once for all who saw it fail. Raises RemoteError where this has
        been done too often.
        """
        async with self._replacing[place]:
            while self._engines[place] is dead:
                dead.kill()
                if self._restarts[place] == self.limits.retries:
                    raise RemoteError(
                        dead.name, 1 + self.limits.retries, f"{error}; limits.retries allows no more engines"
                    )
                self._restarts[place] += 1
                self._counts["engine_restarts"] += 1
                try:
                    self._engines[place] = await asyncio.to_thread(self._start, place)
                except EngineDied as again:
                    error = again
