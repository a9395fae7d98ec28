"""Runs one step graph over worker groups: an operation starts when its columns and state exist.

The controller holds handles, never tensors. What overlaps is decided by the graph and the pools: each ready
operation is handed to its worker group at once, and the pool's queue runs one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rolemesh.engine.batch_ref import BatchRef
from rolemesh.engine.future import DataProtoFuture, as_completed
from rolemesh.placement.graph import Operation, StepGraph
from rolemesh.placement.timeline import Span

Arguments = Callable[[BatchRef], Mapping[str, Any]]


class Progress(Protocol):
    """Who is told which operations run, and how many of the graph's are done."""

    def start(self, phase: str) -> None: ...

    def end(self, phase: str) -> None: ...

    def advance(self, done: int, total: int) -> None: ...


class NoProgress:
    """Tells no one."""

    def start(self, phase: str) -> None:
        pass

    def end(self, phase: str) -> None:
        pass

    def advance(self, done: int, total: int) -> None:
        pass


@dataclass
class StepResult:
    """What one run of a graph left: the batch by handle, metrics, each operation's seconds, all spans."""

    batch: BatchRef
    metrics: dict[str, float] = field(default_factory=dict)
    timing_s: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)


class Controller:
    """`groups[role]` is the worker group of each role that `graph` names.

    `order` gives, for any pool, its operations in the order in which they are handed to it; without it they
    are handed over as they become ready.
    """

    def __init__(
        self,
        graph: StepGraph,
        groups: Mapping[str, Any],
        *,
        overlap: bool = True,
        progress: Progress | None = None,
        order: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        missing = sorted({operation.role for operation in graph.operations} - set(groups))
        if missing:
            raise ValueError(f"step graph {graph.name!r} needs roles {missing}; there are {sorted(groups)}")
        self.graph, self.groups, self.overlap = graph, groups, overlap
        self.progress = progress if progress is not None else NoProgress()
        there = {operation.name for operation in graph.operations}
        self._before: dict[str, set[str]] = {name: set() for name in there}
        for listed in (order or {}).values():
            kept = [name for name in listed if name in there]
            for i, name in enumerate(kept):
                self._before[name] |= set(kept[:i])

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
        sources: dict[str, DataProtoFuture] = {}
        while len(done) < len(self.graph.operations):
            self.progress.advance(len(done), len(self.graph.operations))
            while operation := self._next(done, {op.name for op in running.values()}):
                if running and not self.overlap:
                    break
                extra = (arguments or {}).get(operation.name)
                self.progress.start(operation.name)
                keywords = extra(result.batch) if extra else {}
                running[self._start(operation, result.batch, keywords, sources)] = operation
            # A call's own limit comes first, with the ranks that are late: this one only backs it up.
            limit_s = max(future.timeout_s for future in running)
            future = next(iter(as_completed(list(running), timeout=limit_s)))
            operation = running.pop(future)
            self._finish(operation, future, result, step)
            if operation.name in sources:
                source = sources.pop(operation.name)
                list(as_completed([source], timeout=source.timeout_s))  # who sends may end after who receives
                self._record(operation, *self._source(operation), source, result, step)
            done.add(operation.name)
            self.progress.end(operation.name)
        return result

    def _next(self, done: set[str], running: set[str]) -> Operation | None:
        """The first operation that is ready and whose turn has come on its pools."""
        ready = self.graph.ready(done, running)
        return next((op for op in ready if self._before[op.name] <= done | running), None)

    def _start(
        self,
        operation: Operation,
        batch: BatchRef,
        keywords: Mapping[str, Any],
        sources: dict[str, DataProtoFuture],
    ) -> DataProtoFuture:
        method = getattr(self.groups[operation.role], operation.method)
        if operation.kind == "transfer":
            _, group = self._source(operation)
            sources[operation.name] = group.export_weights(blocking=False)
            return method(sources[operation.name], blocking=False, **keywords)
        columns = [name for name in batch.columns if name in operation.reads]
        return method(batch.select(columns), blocking=False, **keywords)

    def _source(self, operation: Operation) -> tuple[str, Any]:
        """The role whose state a transfer moves, and its worker group."""
        (role,) = {state.split(".")[0] for state in operation.state_reads}
        return role, self.groups[role]

    def _finish(self, operation: Operation, future: DataProtoFuture, result: StepResult, step: int) -> None:
        if operation.writes:
            written = future.ref()
            result.metrics |= {k: float(np.mean(v)) for k, v in written.meta_info.get("metrics", {}).items()}
            columns = {**result.batch.columns, **written.select(operation.writes).columns}
            result.batch = BatchRef(columns, written.n_rows, tokens=written.tokens or result.batch.tokens)
        elif operation.kind == "train":
            result.metrics |= future.get()[0]  # every replica reports the whole batch
        else:
            future.get()
        self._record(operation, operation.role, self.groups[operation.role], future, result, step)

    def _record(
        self,
        operation: Operation,
        role: str,
        group: Any,
        future: DataProtoFuture,
        result: StepResult,
        step: int,
    ) -> None:
        """Note what each rank of `group` did for the operation, and the time from its first start to its
        end.
        """
        pool = group.resource_pool.name
        for span in future.spans:
            args = {"step": step, "bytes_fetched": span.nbytes_fetched, "kernels": list(span.kernels)}
            result.spans.append(Span(operation.name, role, pool, span.rank, span.start_s, span.end_s, args))
        mine = [span for span in result.spans if span.name == operation.name]
        result.timing_s[operation.name] = max(s.end_s for s in mine) - min(s.start_s for s in mine)
