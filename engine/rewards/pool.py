"""ScorerPool: calls to a user's function in processes that can be killed, each call with a time limit."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, Self

START_LIMIT_S = 120.0


class RewardError(RuntimeError):
    """A scoring function that cannot be loaded, failed, or returned something else than a score."""


@dataclass(frozen=True)
class Outcome:
    """What became of a call: `value` is (score, extra) when scored, the traceback after an error."""

    kind: Literal["ready", "scored", "error", "timeout", "died"]
    value: Any = None


class _Scorer:
    """One process. It is ready once its function is loaded, and works on at most one call, number `call`."""

    def __init__(self, file: Path, function: str) -> None:
        self.connection, theirs = Pipe()
        command = [
            sys.executable,
            "-m",
            "rolemesh.engine.rewards.scorer",
            str(theirs.fileno()),
            str(file),
            function,
        ]
        # A session of its own: what the function itself starts is killed with it.
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        self.ready = False
        self.call: int | None = None
        self.deadline_s = time.monotonic() + START_LIMIT_S

    def start(self, call: int, arguments: Mapping[str, Any], limit_s: float) -> None:
        """Hand over a call."""
        self.call, self.deadline_s = call, time.monotonic() + limit_s
        with contextlib.suppress(OSError):  # it has just died: `receive` says so
            self.connection.send(dict(arguments))

    def receive(self) -> Outcome:
        """The process's message; for a message that this process cannot read, an error."""
        try:
            return Outcome(*self.connection.recv())
        except (EOFError, OSError):
            return Outcome("died")
        except Exception as error:
            return Outcome("error", f"the returned value cannot be read in another process: {error!r}")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


class ScorerPool:
    """`workers` processes that hold function `function` of `file`.

    Args:
        limit_s: the longest time one call may take, from when a process begins it.

    Raises:
        RewardError: the function cannot be loaded.
    """

    def __init__(self, file: Path, function: str, *, workers: int, limit_s: float) -> None:
        self.file, self.function, self.limit_s = file, function, limit_s
        self._scorers = [_Scorer(file, function) for _ in range(workers)]
        try:
            while not all(scorer.ready for scorer in self._scorers):
                self._turn({})
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The processes there are now."""
        return [scorer.process.pid for scorer in self._scorers]

    def map(self, calls: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """The outcome of each call (keyword arguments), in order; no call takes longer than its limit.

        A process whose call does not end in time, or that dies, is replaced.

        Raises:
            RewardError: a replacement cannot load the function.
        """
        outcomes: dict[int, Outcome] = {}
        pending = deque(enumerate(calls))
        try:
            while len(outcomes) < len(calls):
                self._hand_out(pending)
                self._turn(outcomes)
        finally:
            for scorer in self._scorers:
                if scorer.call is not None:  # after an error: its answer would be taken for another call's
                    self._replace(scorer)
        return [outcomes[number] for number in range(len(calls))]

    def _hand_out(self, pending: deque[tuple[int, Mapping[str, Any]]]) -> None:
        """Give every idle process a call."""
        for scorer in list(self._scorers):
            if not pending or not scorer.ready or scorer.call is not None:
                continue
            if scorer.process.poll() is not None:
                self._replace(scorer)
            else:
                scorer.start(*pending.popleft(), self.limit_s)

    def _turn(self, outcomes: dict[int, Outcome]) -> None:
        """Wait for the first message or passed limit of the processes that load or work, and act on it."""
        active = [scorer for scorer in self._scorers if not scorer.ready or scorer.call is not None]
        now_s = time.monotonic()
        heard = wait([s.connection for s in active], max(0.0, min(s.deadline_s for s in active) - now_s))
        for scorer in active:
            if scorer.connection in heard:
                outcome = scorer.receive()
            elif scorer.deadline_s <= time.monotonic():
                outcome = Outcome("timeout")
            else:
                continue
            if not scorer.ready:
                self._loaded(scorer, outcome)
                continue
            if scorer.call is not None:
                outcomes[scorer.call] = outcome
            scorer.call = None
            if outcome.kind in ("timeout", "died"):
                self._replace(scorer)

    def _replace(self, scorer: _Scorer) -> None:
        scorer.kill()
        self._scorers[self._scorers.index(scorer)] = _Scorer(self.file, self.function)

    def _loaded(self, scorer: _Scorer, outcome: Outcome) -> None:
        if outcome.kind != "ready":
            why = (
                outcome.value
                if outcome.kind == "error"
                else f"{outcome.kind} ({START_LIMIT_S:.0f} s are allowed)"
            )
            raise RewardError(f"cannot load {self.function} of {self.file}: {why}")
        scorer.ready = True

    def close(self) -> None:
        """Kill the processes."""
        for scorer in self._scorers:
            scorer.kill()
        self._scorers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
