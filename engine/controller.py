"""Runs one step graph over worker groups: an operation starts when its columns and state exist.

The controller holds handles, never tensors. What overlaps is decided by the graph and the pools: each ready
operation is handed to its worker group at once, and the pool's queue runs one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rolemesh.engine.batch_ref import BatchRef
from rolemesh.engine.future import DataProtoFuture, as_completed
from rolemesh.placement.graph import Operation, StepGraph
from rolemesh.placement.timeline import Span, Timeline

Arguments = Callable[[BatchRef], Mapping[str, Any]]


class Progress(Protocol):
    """Who is told which operations run."""

    def start(self, phase: str) -> None: ...

    def end(self, phase: str) -> None: ...


class NoProgress:
    """Tells no one."""

    def start(self, phase: str) -> None:
        pass

    def end(self, phase: str) -> None:
        pass


@dataclass
class StepResult:
    """What one run of a graph left: the batch by handle, metrics by name, seconds of each operation."""

    batch: BatchRef
    metrics: dict[str, float] = field(default_factory=dict)
    timing_s: dict[str, float] = field(default_factory=dict)


class Controller:
    """`groups[role]` is the worker group of each role that `graph` names."""

    def __init__(
        self,
        graph: StepGraph,
        groups: Mapping[str, Any],
        *,
        timeline: Timeline | None = None,
        overlap: bool = True,
        timeout_s: float = 1800.0,
        progress: Progress | None = None,
    ) -> None:
        missing = sorted({operation.role for operation in graph.operations} - set(groups))
        if missing:
            raise ValueError(f"step graph {graph.name!r} needs roles {missing}; there are {sorted(groups)}")
        self.graph, self.groups, self.overlap, self.timeout_s = graph, groups, overlap, timeout_s
        self.timeline = timeline if timeline is not None else Timeline()
        self.progress = progress if progress is not None else NoProgress()

    def run(
        self, batch: BatchRef, arguments: Mapping[str, Arguments] | None = None, *, step: int = 0
    ) -> StepResult:
        """Run every operation of the graph once, on `batch` (the graph's inputs).

        `arguments[operation](batch so far)` gives the further keyword arguments of that operation's call.
        The first failed operation raises; what still runs then is left to the caller, who shuts the pools
        down.
        """
        result = StepResult(batch)
        done: set[str] = set()
        running: dict[DataProtoFuture, Operation] = {}
        while len(done) < len(self.graph.operations):
            for operation in self.graph.ready(done, {op.name for op in running.values()}):
                if running and not self.overlap:
                    break
                extra = (arguments or {}).get(operation.name)
                self.progress.start(operation.name)
                running[self._start(operation, result.batch, extra(result.batch) if extra else {})] = (
                    operation
                )
            future = next(iter(as_completed(list(running), timeout=self.timeout_s)))
            operation = running.pop(future)
            self._finish(operation, future, result, step)
            done.add(operation.name)
            self.progress.end(operation.name)
        return result

    def _start(self, operation: Operation, batch: BatchRef, extra: Mapping[str, Any]) -> DataProtoFuture:
        group = self.groups[operation.role]
        if operation.kind == "transfer":
            (source,) = {state.split(".")[0] for state in operation.state_reads}
            weights = self.groups[source].export_weights(blocking=False)
            return getattr(group, operation.method)(weights, blocking=False)
        columns = [name for name in batch.columns if name in operation.reads]
        return getattr(group, operation.method)(batch.select(columns), blocking=False, **extra)

    def _finish(self, operation: Operation, future: DataProtoFuture, result: StepResult, step: int) -> None:
        if operation.writes:
            written = future.ref(timeout=self.timeout_s)
            result.metrics |= {k: float(np.mean(v)) for k, v in written.meta_info.get("metrics", {}).items()}
            columns = {**result.batch.columns, **written.select(operation.writes).columns}
            result.batch = BatchRef(columns, written.n_rows, tokens=written.tokens or result.batch.tokens)
        elif operation.kind == "train":
            result.metrics |= future.get(timeout=self.timeout_s)[0]  # every replica reports the whole batch
        spans = future.spans
        pool = self.groups[operation.role].resource_pool.name
        for span in spans:
            self.timeline.add(
                Span(
                    operation.name,
                    operation.role,
                    pool,
                    span.rank,
                    span.start_s,
                    span.end_s,
                    {"step": step, "bytes_fetched": span.nbytes_fetched},
                )
            )
        if spans:
            result.timing_s[operation.name] = max(s.end_s for s in spans) - min(s.start_s for s in spans)
