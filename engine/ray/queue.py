"""The submission queue of a pool: one operation at a time, the same order on every rank."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rolemesh.engine.errors import PoolBroken
from rolemesh.engine.future import DataProtoFuture, Outcome

_ERROR_S = 30.0  # to find out what a late or dead rank was doing


@dataclass(frozen=True)
class Call:
    """One call of a role: `run` carries it out once all `inputs` are done."""

    role: str
    name: str
    inputs: Sequence[DataProtoFuture]
    run: Callable[[], Outcome]
    limit_s: float
    result: concurrent.futures.Future[Outcome] = field(default_factory=concurrent.futures.Future)

    @property
    def longest_s(self) -> float:
        """The most that the call can take once its turn has come, its inputs and errors included."""
        return self.limit_s + _ERROR_S + max((future.timeout_s for future in self.inputs), default=0.0)


class PoolQueue:
    """Runs calls on a thread of its own: the first one whose inputs exist, in program order within a role."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._waiting: list[Call] = []
        self._changed = threading.Condition()
        self._closed = False
        self._running: Call | None = None
        self._thread = threading.Thread(target=self._work, name=f"queue of pool {pool}", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> float:
        """Queue a call; the seconds within which it must end, given the limits of what it waits for.

        Raises PoolBroken after `close`.
        """
        with self._changed:
            if self._closed:
                raise PoolBroken(f"pool {self._pool!r} is shut down; {call.name} cannot run")
            self._waiting.append(call)
            before = [self._running] if self._running else []
            within_s = sum(queued.longest_s for queued in [*before, *self._waiting])
            self._changed.notify()
        for future in call.inputs:
            future.add_done_callback(self._input_done)
        return within_s

    def close(self) -> None:
        """Take no more calls; those that have not started fail with PoolBroken."""
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, []
            self._changed.notify()
        for call in waiting:
            call.result.set_exception(PoolBroken(f"pool {self._pool!r} was shut down before {call.name} ran"))

    @property
    def idle(self) -> bool:
        """Whether no call runs or waits."""
        with self._changed:
            return not self._waiting and self._running is None

    def _input_done(self, _: DataProtoFuture) -> None:
        with self._changed:
            self._changed.notify()

    def _work(self) -> None:
        while (call := self._next()) is not None:
            try:
                call.result.set_result(call.run())
            except BaseException as error:
                call.result.set_exception(error)
            self._running = None
            del call  # its blocks are released as soon as the caller lets go

    def _next(self) -> Call | None:
        """Wait for a call that may start; None when the queue is closed."""
        with self._changed:
            while not self._closed:
                if (call := self._ready()) is not None:
                    self._waiting.remove(call)
                    self._running = call
                    return call
                self._changed.wait()
        return None

    def _ready(self) -> Call | None:
        held: set[str] = set()  # roles with an earlier call that still waits
        for call in self._waiting:
            if call.role not in held and all(future.done() for future in call.inputs):
                return call
            held.add(call.role)
        return None
