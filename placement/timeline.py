"""What ran when: spans of operations on ranks, written as a trace that Perfetto opens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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
        """Write Chrome trace JSON: a process per pool, a thread per rank, times in µs from the first span."""
        origin_s = min((span.start_s for span in self.spans), default=0.0)
        pools = {
            pool: pid for pid, pool in enumerate(dict.fromkeys(span.pool for span in self.spans), start=1)
        }
        threads = dict.fromkeys((span.pool, span.rank) for span in self.spans)
        events = [_name_event("process_name", pid, 0, pool) for pool, pid in pools.items()]
        events += [_name_event("thread_name", pools[pool], rank, f"rank {rank}") for pool, rank in threads]
        events += [
            {
                "ph": "X",
                "name": span.name,
                "cat": span.role,
                "pid": pools[span.pool],
                "tid": span.rank,
                "ts": (span.start_s - origin_s) * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": dict(span.args),
            }
            for span in self.spans
        ]
        trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"origin_s": origin_s}}
        Path(path).write_text(json.dumps(trace), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read what `save` wrote; times agree to about a microsecond. Raises TimelineError."""
        try:
            trace = json.loads(Path(path).read_text(encoding="utf-8"))
            origin_s = trace["otherData"]["origin_s"]
            pools = {
                event["pid"]: event["args"]["name"]
                for event in trace["traceEvents"]
                if event["name"] == "process_name"
            }
            return cls(
                [
                    Span(
                        name=event["name"],
                        role=event["cat"],
                        pool=pools[event["pid"]],
                        rank=event["tid"],
                        start_s=origin_s + event["ts"] / 1e6,
                        end_s=origin_s + (event["ts"] + event["dur"]) / 1e6,
                        args=event["args"],
                    )
                    for event in trace["traceEvents"]
                    if event["ph"] == "X"
                ]
            )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise TimelineError(f"{path} is no timeline of ours: {error!r}") from error

    def _busy(self, name: str) -> list[tuple[float, float]]:
        return _union((span.start_s, span.end_s) for span in self.spans if span.name == name)


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
