"""The time a search may take."""

from __future__ import annotations

import time


class OutOfTime(Exception):
    """The limit passed in the middle of something that leaves no result."""


class Clock:
    """Runs from when it is made; `limit_s` may be infinite."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._start_s = time.perf_counter()

    @property
    def passed_s(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._start_s

    @property
    def over(self) -> bool:
        """Whether the limit has passed."""
        return self.passed_s >= self.limit_s

    def check(self) -> None:
        """Raise OutOfTime when it has."""
        if self.over:
            raise OutOfTime

    def part(self, fraction: float) -> Clock:
        """A clock for so much of what is left."""
        return Clock(max(0.0, self.limit_s - self.passed_s) * fraction)
