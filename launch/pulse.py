"""The driver's heartbeat: a thread that writes `status.json` into the run folder and answers `stacks.ask`.

It never ends a run and never holds up a step: what fails here is tried again at the next beat. Workers answer
on a thread of their own while they compute.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from rolemesh.engine.loggers.secrets import hide
from rolemesh.launch.progress import Progress
from rolemesh.launch.run_state import (
    RankStack,
    RankState,
    RunState,
    Stacks,
    asked_for_stacks,
    close_question,
    this_machine,
)

BEAT_S = 2.0
_PER_RANK_S = 0.02  # with many ranks they are asked less often
_ANSWER_S = 5.0
_STACK_BYTES, _STACKS_BYTES = 64 << 10, 4 << 20  # of one process, of all
_ERROR_BYTES = 4000
_INTERRUPTED = 130


class Pulse:
    """Around a run whose folder is there: `with Pulse(folder) as pulse: ... pulse.ended(code)`.

    Leaving it with an exception, or with `ended(code)`, writes how the run ended. `progress` and `watching`
    add what is known of it meanwhile.
    """

    def __init__(self, folder: Path, every_s: float = BEAT_S) -> None:
        self.folder = folder
        self.progress: Progress | None = None
        host, machine = this_machine()
        now = time.time()
        self._state = RunState(0, now, every_s, now, host, machine, os.getpid())
        self._pools: dict[str, tuple[Any, tuple[str, ...]]] = {}  # a worker group of each, and its roles
        self._ranks: dict[tuple[str, int], RankState] = {}
        self._code: int | None = None
        self._asking = threading.Lock()
        self._next_look_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._beat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * _ANSWER_S)
        with contextlib.suppress(OSError):
            self._now(_ended(self._state, self._code, error)).write(self.folder)

    def ended(self, code: int) -> int:
        """The run ends with this exit code, which is given back."""
        self._code = code
        return code

    @contextlib.contextmanager
    def watching(self, groups: Mapping[str, Any]) -> Iterator[None]:
        """Within the block these worker groups, by role, are there to be asked."""
        pools: dict[str, tuple[Any, tuple[str, ...]]] = {}
        for role, group in groups.items():
            if hasattr(group, "states"):  # without Ray there is nobody to ask
                name = group.resource_pool.name
                pools[name] = (group, (*pools.get(name, (None, ()))[1], role))
        with self._no_question():
            self._pools, self._ranks = pools, {}
        try:
            yield
        finally:
            with self._no_question():  # none is under way when the workers are ended
                self._pools = {}

    @contextlib.contextmanager
    def _no_question(self) -> Iterator[None]:
        """Within the block nobody is asked; where a question hangs, it is not waited for any longer."""
        mine = self._asking.acquire(timeout=2 * _ANSWER_S)
        try:
            yield
        finally:
            if mine:
                self._asking.release()

    def _run(self) -> None:
        while not self._stop.wait(self._state.every_s):
            self._beat()

    def _beat(self) -> None:
        with contextlib.suppress(Exception):  # workers that die, Ray that ends: the run tells that itself
            self._look()
        with contextlib.suppress(OSError):  # a full disk
            self._state = self._now(self._state)
            self._state.write(self.folder)
        if number := asked_for_stacks(self.folder):
            with contextlib.suppress(OSError):
                self._stacks(number).write(self.folder)
            close_question(self.folder)

    def _now(self, state: RunState) -> RunState:
        """The state with what is known now."""
        ranks = tuple(rank for _, rank in sorted(self._ranks.items()))
        told = {} if self.progress is None else self.progress.told()
        return replace(state, beat=state.beat + 1, at_s=time.time(), ranks=ranks, **told)

    def _look(self) -> None:
        """Ask the workers what they do."""
        if time.monotonic() < self._next_look_s:
            return
        with self._asking:
            for pool, (group, roles) in self._pools.items():
                answers, nodes, now = group.states(), group.nodes, time.time()
                for rank, answer in answers.items():
                    known = self._ranks.get((pool, rank), RankState(pool, rank, nodes[rank], roles))
                    self._ranks[pool, rank] = _heard(known, answer, now)
        self._next_look_s = time.monotonic() + _PER_RANK_S * len(self._ranks)

    def _stacks(self, number: str) -> Stacks:
        """The stacks of the driver and of all ranks, now."""
        host = self._state.host
        found = [RankStack("driver", 0, host, (), ", ".join(self._state.operations), own_stacks())]
        with contextlib.suppress(Exception), self._asking:
            for pool, (group, roles) in self._pools.items():
                nodes = group.nodes
                for rank, text in group.stacks().items():
                    doing = self._ranks.get((pool, rank))
                    operation = doing.operation if doing else ""
                    found.append(RankStack(pool, rank, nodes[rank], roles, operation, text))
        most = min(_STACK_BYTES, _STACKS_BYTES // len(found))
        return Stacks(number, time.time(), tuple(replace(one, text=hide(one.text[:most])) for one in found))


def own_stacks() -> str:
    """The Python stack of each of this process's threads, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n\n".join(
        f"thread {names.get(ident, ident)}\n" + "".join(traceback.format_stack(frame)).rstrip()
        for ident, frame in frames
        if ident != threading.get_ident()
    )


def _heard(known: RankState, answer: Any, now_s: float) -> RankState:
    """A rank's state with its answer: a `HostState`, or why there is none."""
    if isinstance(answer, str):
        return replace(known, silent=answer)
    return replace(
        known,
        operation=answer.operation or "",
        step=answer.step,
        seconds=round(answer.seconds, 1),
        resident_bytes=answer.resident_bytes,
        available_bytes=answer.available_bytes,
        heard_s=now_s,
        silent="",
    )


def _ended(state: RunState, code: int | None, error: BaseException | None) -> RunState:
    """The last word: finished with exit code 0, stopped when someone asked for it, else failed."""
    if error is None:
        return replace(state, state="finished" if code == 0 else "stopped", exit_code=code)
    if isinstance(error, KeyboardInterrupt):
        return replace(state, state="stopped", exit_code=_INTERRUPTED, error="interrupted")
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        return replace(state, state="stopped" if code > 128 else "failed", exit_code=code)
    from rolemesh.launch.cli import describe_error, exit_code_of

    said = hide(describe_error(error)[: 2 * _ERROR_BYTES])[:_ERROR_BYTES]
    code = exit_code_of(error) if isinstance(error, Exception) else 1
    return replace(state, state="failed", exit_code=code, error=said)
