"""Results that come in parts of rows: a worker makes them, the next operation takes what is there.

A part is finished rows of a result whose other rows are still worked on. Everything here works on handles.
"""

from __future__ import annotations

import math
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rolemesh.engine.batch_ref import BatchRef
from rolemesh.engine.columns import ProtoError
from rolemesh.engine.protocol import DataProto

_QUANTILE = re.compile(r"(^|_)p\d+(_|$)")


@dataclass(frozen=True)
class Part:
    """What a worker's generator yields: `rows` are the places of `data`'s rows in the batch it was given."""

    rows: Sequence[int]
    data: DataProto

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.data):
            raise ProtoError(f"a part for {len(self.rows)} rows holds {len(self.data)}")


@dataclass(frozen=True)
class PartRef:
    """A part by handle; `rows` count in the whole batch of the call, or in the share of one rank."""

    rows: tuple[int, ...]
    ref: BatchRef


Listener = Callable[[PartRef], None]


class PartFeed:
    """The parts of one call as they are made: every listener is told each, those there already first.

    Listeners are called on the thread that made the part: they must be quick.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: list[PartRef] = []
        self._listeners: list[Listener] = []

    def put(self, part: PartRef) -> None:
        """Tell of a new part."""
        with self._lock:
            self._parts.append(part)
            for listener in self._listeners:
                listener(part)

    def listen(self, listener: Listener) -> None:
        """Be told of every part."""
        with self._lock:
            self._listeners.append(listener)
            for part in self._parts:
                listener(part)


def join_parts(parts: Sequence[PartRef], n_rows: int) -> BatchRef:
    """One batch of `n_rows` rows in row order, of the columns that every part has.

    Raises ProtoError when not each row is there just once.
    """
    rows = np.array([row for part in parts for row in part.rows], dtype=np.int64)
    order = np.argsort(rows, kind="stable")
    if not np.array_equal(rows[order], np.arange(n_rows)):
        missing = sorted(set(range(n_rows)) - set(rows.tolist()))
        raise ProtoError(
            f"parts of a batch of {n_rows} rows hold {len(rows)} rows; missing: {missing[:8] or 'none'}"
        )
    shared = set.intersection(*(set(part.ref.columns) for part in parts))  # a function's extras may differ
    joined = BatchRef.concat([part.ref.select(n for n in part.ref.columns if n in shared) for part in parts])
    return joined if (order == np.arange(n_rows)).all() else joined.take(order)


class RowStream:
    """Rows on their way through one operation that takes them as they come.

    `groups` [rows] says which rows must be given together; None: each row may go alone.
    """

    def __init__(self, n_rows: int, groups: Sequence[Hashable] | None = None) -> None:
        self.n_rows = n_rows
        self._group_of = range(n_rows) if groups is None else groups
        self._lacking: dict[Hashable, int] = defaultdict(int)
        for group in self._group_of:
            self._lacking[group] += 1
        self._held: list[PartRef] = []
        self._returned: list[PartRef] = []
        self._metrics: list[tuple[Mapping[str, float], int]] = []
        self.n_given = 0

    def add(self, part: PartRef) -> None:
        """Rows that have come."""
        self._held.append(part)
        for row in part.rows:
            self._lacking[self._group_of[row]] -= 1

    def take(self) -> PartRef | None:
        """All rows that may go now and have not gone, in row order; None when there are none."""
        chosen: list[PartRef] = []
        kept: list[PartRef] = []
        for part in self._held:
            whole = [self._lacking[self._group_of[row]] == 0 for row in part.rows]
            for want, into in ((True, chosen), (False, kept)):
                places = [place for place, is_whole in enumerate(whole) if is_whole is want]
                if len(places) == len(part.rows):
                    into.append(part)
                elif places:
                    into.append(PartRef(tuple(part.rows[i] for i in places), part.ref.take(places)))
        self._held = kept
        rows = [row for part in chosen for row in part.rows]
        if not rows:
            return None
        self.n_given += len(rows)
        order = np.argsort(rows)
        return PartRef(tuple(rows[i] for i in order), BatchRef.concat([p.ref for p in chosen]).take(order))

    def returned(self, part: PartRef, metrics: Mapping[str, float]) -> None:
        """The operation's result for rows that it was given."""
        self._returned.append(part)
        self._metrics.append((metrics, len(part.rows)))

    def result(self) -> tuple[BatchRef, dict[str, float]]:
        """The whole result in row order, and its metrics. Raises ProtoError while rows are missing."""
        return join_parts(self._returned, self.n_rows), combine_metrics(self._metrics)


def combine_metrics(parts: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """The metrics of a batch from those of its parts, (metrics, rows) each.

    The last word of a name says how: `mean` and `share` are weighted by the rows of parts that have them,
    `max` and `min` are the extreme, quantiles (`p99`, `latency_p99_s`) the largest, an upper bound; others
    are counts and add up. NaN counts as absent unless nobody has more.
    """
    values: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for metrics, n_rows in parts:
        for name, value in metrics.items():
            values[name].append((float(value), n_rows))
    return {name: _combined(name.rpartition("/")[2], found) for name, found in values.items()}


def _combined(kind: str, values: Sequence[tuple[float, int]]) -> float:
    known = [(value, n_rows) for value, n_rows in values if not math.isnan(value)]
    numbers = [value for value, _ in known]
    if not known:
        return math.nan
    if kind in ("mean", "share"):
        weight = sum(n_rows for _, n_rows in known)
        return math.fsum(value * n_rows for value, n_rows in known) / weight
    if kind == "max" or _QUANTILE.search(kind):
        return max(numbers)
    return min(numbers) if kind == "min" else math.fsum(numbers)
