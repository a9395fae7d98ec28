"""Loggers that cannot hurt a run: what fails is told once, what is slow has a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from rolemesh.engine.loggers.base import Logger, RunInfo
from rolemesh.engine.loggers.secrets import hide

WAITING = 1000  # calls that a slow logger may lag behind
CLOSE_S = 30.0  # for it to catch up at the end

Call = Callable[[Logger], None]


class Guarded:
    """One logger. `call` never raises, and never waits for a slow one: its calls are made in order in a
    thread, and dropped while `WAITING` others wait. The first trouble is written, the rest is silent.
    """

    def __init__(self, name: str, kind: type[Logger], run: RunInfo) -> None:
        self.name, self.kind, self.run = name, kind, run
        self.logger: Logger | None = None
        self.warned = False
        self._calls: queue.Queue[Call | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        if kind.slow:
            self._thread.start()
        else:
            self._make()

    def call(self, call: Call) -> None:
        """Have the logger do something: now, or when its thread comes to it."""
        if not self.kind.slow:
            self._try(call)
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._warn(f"is {WAITING} calls behind and misses some")

    def close(self, finished: bool) -> None:
        """Let the logger end; a slow one has `CLOSE_S` to catch up."""
        self.call(lambda logger: logger.close(finished))
        if self.kind.slow:
            try:
                self._calls.put(None, timeout=CLOSE_S)
            except queue.Full:
                pass
            else:
                self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                self._warn(f"did not end in {CLOSE_S:g} s; its last steps may be missing")

    def _work(self) -> None:
        self._make()
        while (call := self._calls.get()) is not None:
            self._try(call)

    def _make(self) -> None:
        try:
            self.logger = self.kind(self.run)
        except (Exception, SystemExit) as error:  # some packages exit where they miss a login
            self._warn(f"did not start: {error!r}")

    def _try(self, call: Call) -> None:
        if self.logger is None:
            return
        try:
            call(self.logger)
        except Exception as error:
            self._warn(f"failed: {error!r}")

    def _warn(self, what: str) -> None:
        if not self.warned:
            self.warned = True
            self.run.write(hide(f"warning: logger {self.name} {what}. The run goes on; told once"))
