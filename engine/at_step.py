"""Which training step calls on workers belong to, for their logs and messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_STEP: ContextVar[int | None] = ContextVar("step", default=None)


def current_step() -> int | None:
    """The step that calls made here belong to; None outside of any."""
    return _STEP.get()


@contextlib.contextmanager
def at_step(step: int) -> Iterator[None]:
    """Calls that are made in the block belong to `step`."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)
