"""Conversations: responses that a user's class answers turn by turn, with tools or an environment.

The engine writes turns, agents answer them in threads; who carries requests to an engine runs the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.rollout.requests import Request, Rows, Sample
from rolemesh.engine.user_file import UserClass, UserFileError

AT_ONCE = 256  # steps of agents that run at a time, on each rank that drives an engine
_POLL_S = 0.5
_READER_S = 30.0  # for an engine that is told to end


class Engine(Protocol):
    """What writes turns while others are answered: `VLLMEngine` says what the methods do."""

    def generate(self, requests: Sequence[Request], stays: bool) -> Iterator[list[Sample]]: ...

    def add(self, requests: Sequence[Request]) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


class AgentError(RuntimeError):
    """An agent that failed, took too long, or answered with something that no model can read."""


@dataclass(frozen=True)
class AgentSpec:
    """The user's class, `file.py:Class`, and what bounds a conversation.

    `turns` is the most that the model has (None: as many as fit), `timeout_s` the limit of one step of the
    agent, `tokenizer` the folder of the actor's.
    """

    path: str
    tokenizer: str
    turns: int | None = None
    timeout_s: float = 60.0

    def load(self) -> Callable[[Mapping[str, Any], Any], Any]:
        """The class. Raises UserFileError, also where it has no method `step`."""
        cls = UserClass(self.path, "rollout.agent").load()
        if not callable(getattr(cls, "step", None)):
            raise UserFileError(f"rollout.agent: {self.path} has no method step(token_ids, text)")
        found: Callable[[Mapping[str, Any], Any], Any] = cls
        return found


@dataclass(frozen=True)
class Tokenizers:
    """The actor's tokenizer twice, as two threads are not to use one at the same time: ours, and the one that
    agents get.
    """

    own: Any
    agents: Any

    @classmethod
    def load(cls, folder: str) -> Self:
        """Both, from the actor's folder."""
        from transformers import AutoTokenizer  # a rollout without agents does without it

        own, agents = (AutoTokenizer.from_pretrained(folder, trust_remote_code=False) for _ in range(2))
        return cls(own, agents)


@dataclass
class _Step:
    """One step of an agent: what it answered to a turn, or how it failed."""

    row: int
    token_ids: list[int]
    text: str
    start_s: float | None = None  # of the work itself: others may have to end before
    seconds: float = 0.0
    answer: Any = None
    error: str | None = None


Event = list[Sample] | _Step | BaseException


@dataclass
class Conversations:
    """The conversations of some rows: whose turn it is in each, and how they end. A context manager.

    A conversation is over when its agent says so (None), when the model has had its turns, or when the
    response is full: an answer that does not fit is cut there.

    `rows` are those rows, `fields[row]` what the data set says of each: what the class gets as `row`. It is
    made with the first step, in the thread that runs it. `events` takes the engine's samples, and what went
    wrong with it; one thread calls the methods.
    """

    spec: AgentSpec
    rows: Rows
    fields: Sequence[Mapping[str, Any]]
    tokenizers: Tokenizers
    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.turns = [0] * len(self.fields)
        self.tool_s = [0.0] * len(self.fields)
        self._cls = self.spec.load()
        self._agents: dict[int, Any] = {}
        self._steps: dict[int, _Step] = {}
        self._threads = ThreadPoolExecutor(AT_ONCE, "agent")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.Lock()
        self._looked_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    @property
    def stepping(self) -> bool:
        """Whether agents are at work."""
        return bool(self._steps)

    @property
    def open(self) -> bool:
        """Whether a conversation goes on."""
        return self.stepping or not all(self.rows.finished)

    def next(self) -> tuple[list[Request], list[int]]:
        """Wait until something happens: the turns that the engine is to write now, and the rows that are
        over. Raises AgentError, and what went wrong with the engine.
        """
        event = self._event()
        if isinstance(event, BaseException):
            raise event
        return self._answered(event) if isinstance(event, _Step) else ([], self.wrote(event))

    def wrote(self, samples: Sequence[Sample]) -> list[int]:
        """The model's turns: agents begin to answer them. The rows that are over."""
        over = []
        for sample in samples:
            row = sample.row
            self.rows.add(sample)
            self.turns[row] += 1
            if self.rows.room(row) == 0 or self.turns[row] == self.spec.turns:
                over.append(row)
                continue
            token_ids = sample.tokens.tolist()
            text = self.tokenizers.own.decode(token_ids, skip_special_tokens=True)
            self._steps[row] = step = _Step(row, token_ids, text)
            self._threads.submit(self._run, step)
        return over

    def columns(self, rows: Sequence[int]) -> DataProto:
        """Those of `Rows.columns`, and per row the model's turns, `num_turns` int64, and the seconds that its
        agent took, `tool_s` fp32.
        """
        data = self.rows.columns(rows)
        data.batch["num_turns"] = torch.tensor([self.turns[row] for row in rows], dtype=torch.int64)
        data.batch["tool_s"] = torch.tensor([self.tool_s[row] for row in rows], dtype=torch.float32)
        return data

    def forget_engine(self) -> None:
        """Drop what an engine said that is given up: what it had not handed over is written again."""
        kept = []
        with contextlib.suppress(queue.Empty):
            while True:
                kept.append(self.events.get_nowait())
        for event in kept:
            if isinstance(event, _Step):
                self.events.put(event)

    def _event(self) -> Event:
        wait_s = min(_POLL_S, self.spec.timeout_s)
        while True:
            if time.monotonic() - self._looked_s >= wait_s:
                self._check_late()
            with contextlib.suppress(queue.Empty):
                return self.events.get(timeout=wait_s)

    def _check_late(self) -> None:
        self._looked_s = now_s = time.monotonic()
        for step in self._steps.values():
            if step.start_s is not None and now_s - step.start_s > self.spec.timeout_s:
                raise AgentError(
                    f"{self._name(step.row)} has not answered within {self.spec.timeout_s:g} s "
                    f"(rollout.agent_timeout_s); the turn: {step.text!r}"
                )

    def _run(self, step: _Step) -> None:
        """In a thread: let the agent answer."""
        step.start_s = time.monotonic()
        try:
            if step.row not in self._agents:
                self._agents[step.row] = self._cls(self.fields[step.row], self.tokenizers.agents)
            answer = self._agents[step.row].step(step.token_ids, step.text)
            if inspect.isawaitable(answer):
                waiting = asyncio.run_coroutine_threadsafe(_awaited(answer), self._running_loop())
                answer = waiting.result(self.spec.timeout_s + _POLL_S)
            step.answer = answer
        except BaseException:
            step.error = traceback.format_exc()
        step.seconds = time.monotonic() - step.start_s
        self.events.put(step)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """One loop for all `async` agents: what they share, such as connections, belongs to it."""
        with self._loop_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()
            return self._loop

    def _answered(self, step: _Step) -> tuple[list[Request], list[int]]:
        del self._steps[step.row]
        row = step.row
        self.tool_s[row] += step.seconds
        if step.error is not None:
            raise AgentError(f"{self._name(row)} failed:\n{step.error}")
        if step.answer is None or not self.rows.observe(row, self._token_ids(row, step.answer)):
            self._agents.pop(row, None)
            return [], [row]
        return [self.rows.request(row)], []

    def _token_ids(self, row: int, answer: Any) -> list[int]:
        """An answer as token ids: text is encoded as it stands, without further special tokens."""
        if isinstance(answer, str):
            answer = self.tokenizers.own.encode(answer, add_special_tokens=False)
        try:
            token_ids = [int(token) for token in answer]
        except (TypeError, ValueError):
            raise AgentError(
                f"{self._name(row)} answered with a {type(answer).__name__}; it must be text, token ids, or "
                "None at the end"
            ) from None
        n_known = len(self.tokenizers.own)
        if wrong := [token for token in token_ids if not 0 <= token < n_known]:
            raise AgentError(
                f"{self._name(row)} answered with token {wrong[0]}; the tokenizer has ids 0 to {n_known - 1}"
            )
        if not token_ids:
            raise AgentError(f"{self._name(row)} answered with nothing; None ends a conversation")
        return token_ids

    def _name(self, row: int) -> str:
        index = (self.fields[row].get("extra_info") or {}).get("index")
        which = "" if index is None else f" (extra_info.index {index})"
        return f"rollout.agent {self.spec.path}: row {row}{which}, turn {self.turns[row]}: its step"


async def _awaited(answer: Any) -> Any:
    return await answer


def fields_of(data: DataProto) -> list[dict[str, Any]]:
    """What the data set says of each row of a batch: its object columns."""
    columns = data.non_tensor_batch
    return [{name: column[row] for name, column in columns.items()} for row in range(len(data))]


def in_turns(talks: Conversations, write: Callable[[Sequence[Request]], list[Sample]]) -> Iterator[list[int]]:
    """Rows as their conversations end, with an engine that writes one batch after another: what agents have
    answered to one is written in the next.
    """
    requests = talks.rows.requests()
    while talks.open:
        over = talks.wrote(write(requests))
        requests = []
        while talks.stepping:
            more, ended = talks.next()
            requests += more
            over += ended
        requests.sort(key=lambda request: request.row)
        if over:
            yield over


def side_by_side(talks: Conversations, engine: Engine) -> Iterator[list[int]]:
    """Rows as their conversations end, with an engine that takes requests while it writes: no turn waits for
    another conversation's agent. Raises what the engine raises; `talks` can go on with another one then.
    """
    with _reading(talks, engine):
        while talks.open:
            more, over = talks.next()
            if more:
                engine.add(more)
            if over:
                yield over


@contextlib.contextmanager
def _reading(talks: Conversations, engine: Engine) -> Iterator[None]:
    """The engine writes what waits for it; a thread hands its samples to `talks`."""
    requests = talks.rows.requests()

    def read() -> None:
        try:
            for samples in engine.generate(requests, stays=True):
                talks.events.put(samples)
            talks.events.put(RuntimeError("the engine has ended while conversations go on"))
        except BaseException as error:
            talks.events.put(error)

    reader = threading.Thread(target=read, name="turns of conversations", daemon=True)
    reader.start()
    try:
        yield
        engine.close()
    except BaseException:
        with contextlib.suppress(Exception):  # the engine may be what failed
            engine.close()
            engine.abort()
        raise
    finally:
        reader.join(_READER_S)
        talks.forget_engine()
