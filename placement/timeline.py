"""What ran when: spans of operations on ranks, written as a trace that Perfetto opens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolemesh.placement.appending import append_whole


class TimelineError(ValueError):
    """A span that ends before it starts, or a file that is no timeline."""


@dataclass(frozen=True)
class Span:
    """The compute of operation `name` on one rank; seconds on one clock. `args` is shown with the span."""

    name: str
    role: str
    pool: str
    rank: int
    start_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.end_s >= self.start_s:
            raise TimelineError(
                f"{self.name} on rank {self.rank} ends at {self.end_s} s, before {self.start_s} s"
            )


@dataclass
class Timeline:
    """Spans of a run or of a simulation, in the order in which they were added."""

    spans: list[Span] = field(default_factory=list)

    def add(self, span: Span) -> None:
        """Append one span."""
        self.spans.append(span)

    def busy_s(self, name: str) -> float:
        """Seconds during which at least one rank computes operation `name`."""
        return sum(end - start for start, end in self._busy(name))

    def overlap_s(self, name: str, other: str) -> float:
        """Seconds during which at least one rank computes `name` and at least one computes `other`."""
        return sum(
            max(0.0, min(end, other_end) - max(start, other_start))
            for start, end in self._busy(name)
            for other_start, other_end in self._busy(other)
        )

    def save(self, path: str | Path) -> None:
        """Write all spans to a new file; see `TimelineFile`."""
        TimelineFile(path).append(self.spans)

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read a `TimelineFile`; times agree to about a microsecond. Raises TimelineError."""
        try:
            events = json.loads(Path(path).read_text(encoding="utf-8").removesuffix("]") + "]")
            names = {(e["name"], e["pid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
            origin_s = float(names.get(("process_labels", 0), 0.0))
            return cls(
                [
                    Span(
                        name=event["name"],
                        role=event["cat"],
                        pool=names["process_name", event["pid"]],
                        rank=event["tid"],
                        start_s=origin_s + event["ts"] / 1e6,
                        end_s=origin_s + (event["ts"] + event["dur"]) / 1e6,
                        args=event["args"],
                    )
                    for event in events
                    if event["ph"] == "X"
                ]
            )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise TimelineError(f"{path} is no timeline of ours: {error!r}") from error

    def _busy(self, name: str) -> list[tuple[float, float]]:
        return _union((span.start_s, span.end_s) for span in self.spans if span.name == name)


class TimelineFile:
    """A timeline on disk that grows as a run goes on: Chrome's trace format, a JSON array whose end may lack.

    A process per pool, a thread per rank, times in µs from the first span of the first `append`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.write_text("[", encoding="utf-8")
        self._origin_s: float | None = None
        self._pools: dict[str, int] = {}
        self._threads: set[tuple[str, int]] = set()

    def append(self, spans: Sequence[Span]) -> None:
        """Add spans at the end of the file; what is there already is not read.

        Raises OSError, as of a full disk: these spans are lost then, later ones are not.
        """
        if not spans:
            return
        before = self._origin_s, dict(self._pools), set(self._threads)
        events, separator = [], ","
        if self._origin_s is None:
            self._origin_s, separator = min(span.start_s for span in spans), ""
            events.append(_name_event("process_labels", 0, 0, repr(self._origin_s)))
        for span in spans:
            events += [*self._new_names(span), self._event(span)]
        try:
            append_whole(self.path, separator + ",\n".join(map(json.dumps, events)))
        except OSError:
            self._origin_s, self._pools, self._threads = before
            raise

    def _new_names(self, span: Span) -> Iterator[dict[str, Any]]:
        if span.pool not in self._pools:
            self._pools[span.pool] = len(self._pools) + 1
            yield _name_event("process_name", self._pools[span.pool], 0, span.pool)
        if (span.pool, span.rank) not in self._threads:
            self._threads.add((span.pool, span.rank))
            yield _name_event("thread_name", self._pools[span.pool], span.rank, f"rank {span.rank}")

    def _event(self, span: Span) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": span.name,
            "cat": span.role,
            "pid": self._pools[span.pool],
            "tid": span.rank,
            "ts": (span.start_s - (self._origin_s or 0.0)) * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
            "args": dict(span.args),
        }


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals that cover the same times, ascending."""
    union: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def _name_event(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
