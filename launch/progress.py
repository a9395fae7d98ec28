"""Progress that tells a slow run from a hung one: what runs now, how far it is, when the run ends."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

from rolemesh.engine.loggers.secrets import hide

TTY_INTERVAL_S = 0.5
PLAIN_INTERVAL_S = 10.0


class Progress:
    """One status line for a run of `total_steps` steps, redrawn on a terminal, else printed every 10 s.

    Operations may overlap, so several phases can be open at once. Safe to call from any thread. Use as
    a context manager: leaving it stops the printing thread.
    """

    def __init__(
        self,
        total_steps: int,
        stream: TextIO | None = None,
        interval_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._stream = stream or sys.stderr
        self._tty = self._stream.isatty()
        self._interval_s = interval_s or (TTY_INTERVAL_S if self._tty else PLAIN_INTERVAL_S)
        self._clock = clock
        self._began_s = clock()
        self._phases: dict[str, float] = {}  # when each began
        self._operations: tuple[int, int] | None = None  # done and total of the step
        self._steps_before = self._steps_done = 0
        self._steps_began_s: float | None = None  # the ETA leaves out what comes before the first step
        self._last_step_s = 0.0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        with self._lock, contextlib.suppress(OSError):
            self._clear_line()

    def start(self, phase: str) -> None:
        """`phase` (an operation's name) begins."""
        with self._lock:
            self._phases[phase] = self._clock()

    def advance(self, done: int, total: int) -> None:
        """`done` of the step's `total` operations are finished."""
        with self._lock:
            self._operations = (done, total)

    def end(self, phase: str) -> None:
        """`phase` is over."""
        with self._lock:
            self._phases.pop(phase, None)

    def clear(self) -> None:
        """Nothing of what has begun goes on."""
        with self._lock:
            self._phases.clear()
            self._operations = None

    def begin_steps(self, done: int = 0) -> None:
        """The first training step begins now; what came before (loading, validation) isn't in the ETA.

        `done` steps were done by the run that this one goes on from.
        """
        with self._lock:
            self._steps_before = self._steps_done = done
            self._steps_began_s = self._last_step_s = self._clock()

    def stepping(self) -> bool:
        """Whether the first training step has begun."""
        return self._steps_began_s is not None

    def end_step(self, line: str = "") -> None:
        """One more step is done; `line` (its figures) is printed and stays."""
        with self._lock:
            self._steps_done += 1
            self._last_step_s = self._clock()
        if line:
            self.write(line)

    def write(self, line: str) -> None:
        """Print a line that stays, above the status; secrets are hidden."""
        with self._lock, contextlib.suppress(OSError):  # a full disk that the output goes to
            self._clear_line()
            print(hide(line), file=self._stream, flush=True)

    def render(self) -> str:
        """The status now: `step 3/20, 2/9 operations | values 8 s | 1:02 elapsed, 5:10 left`."""
        with self._lock:
            now = self._clock()
            step = min(self._steps_done + 1, self._total_steps)
            phases = (
                ", ".join(f"{name} {now - began_s:.0f} s" for name, began_s in self._phases.items())
                or "between operations"
            )
            left = (
                f"{_duration(self._left_s(now))} left"
                if self._steps_done > self._steps_before
                else f"time left known after step {self._steps_before + 1}"
            )
            done = "" if self._operations is None else ", {}/{} operations".format(*self._operations)
            elapsed = _duration(now - self._began_s)
            return f"step {step}/{self._total_steps}{done} | {phases} | {elapsed} elapsed, {left}"

    def told(self) -> dict[str, Any]:
        """The status now as plain values, by the names of `RunState`."""
        with self._lock:
            now, stepping = self._clock(), self._steps_began_s is not None
            over = self._steps_done >= self._total_steps
            return {
                "step": min(self._steps_done + 1, self._total_steps) if stepping else None,
                "steps": self._total_steps,
                "done": self._steps_done,
                "step_s": round(now - self._last_step_s, 1) if stepping and not over else 0.0,
                "operations": {name: round(now - began_s, 1) for name, began_s in self._phases.items()},
                "done_operations": self._operations,
                "left_s": round(self._left_s(now), 1) if self._steps_done > self._steps_before else None,
            }

    def _left_s(self, now: float) -> float:
        began_s = self._began_s if self._steps_began_s is None else self._steps_began_s
        per_step_s = (self._last_step_s - began_s) / (self._steps_done - self._steps_before)
        steps_left = self._total_steps - self._steps_done
        into_step_s = min(now - self._last_step_s, per_step_s) if steps_left else 0.0
        return steps_left * per_step_s - into_step_s

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            text = self.render()
            with self._lock, contextlib.suppress(OSError):
                if self._tty:
                    self._clear_line()
                    self._stream.write(text)
                    self._stream.flush()
                else:
                    print(text, file=self._stream, flush=True)

    def _clear_line(self) -> None:
        if self._tty:
            self._stream.write("\r\033[K")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
