"""How many responses a call of one rank still writes, over time: for the timeline."""

from __future__ import annotations

import time

MOST_POINTS = 64


class Running:
    """`points` are [seconds since the start, responses still being written] from [0, all of them] on.

    It grows as responses end, to `MOST_POINTS` or so however many there are; the last end is always in it.
    """

    def __init__(self, n: int) -> None:
        self.points: list[list[float]] = [[0.0, n]]
        self._left, self._every, self._began = n, max(1, n // MOST_POINTS), time.monotonic()

    def ended(self, n: int) -> None:
        """So many responses have ended now."""
        self._left -= n
        if self._left <= 0 or self.points[-1][1] - self._left >= self._every:
            self.points.append([round(time.monotonic() - self._began, 3), self._left])
