"""SIGTERM as a request to stop in good order: schedulers send it before they take the machines away."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_TERMINATED = 128 + signal.SIGTERM


def _always() -> bool:
    return True


@contextlib.contextmanager
def stop_on_sigterm(
    tell: Callable[[str], None], stepping: Callable[[], bool] = _always
) -> Iterator[Callable[[], bool]]:
    """Within the block a SIGTERM only makes the function that it gives say True; a second one interrupts.

    While `stepping` says False there is nothing to save: then the first one ends the process.
    Outside of the main thread, which alone receives signals, the function never does.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def note(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        if not stepping():
            raise SystemExit(EXIT_TERMINATED)
        asked.set()

    before = signal.signal(signal.SIGTERM, note)
    teller = threading.Thread(target=_tell_when, args=(asked, tell), daemon=True)  # a handler must not print
    teller.start()
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell_when(asked: threading.Event, tell: Callable[[str], None]) -> None:
    asked.wait()
    tell("SIGTERM: stopping after this step, with a checkpoint; a second one stops at once, without")
