"""Runs one step graph over worker groups: an operation starts when its columns and state exist.

The controller holds handles, never tensors. What overlaps is decided by the graph and the pools: each ready
operation is handed to its worker group at once, and the pool's queue runs one at a time. An operation that
takes rows or groups starts on the finished ones while the others are still made.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rolemesh.engine.at_step import at_step
from rolemesh.engine.batch_ref import BatchRef
from rolemesh.engine.errors import CallTimeout
from rolemesh.engine.future import DataProtoFuture, as_completed
from rolemesh.engine.parts import PartRef, RowStream
from rolemesh.placement.graph import Operation, StepGraph
from rolemesh.placement.timeline import Span, Timeline

Arguments = Callable[[BatchRef], Mapping[str, Any]]
Events = queue.SimpleQueue[tuple["Run", "DataProtoFuture | tuple[str, PartRef]"]]


class Progress(Protocol):
    """Who is told which operations run, how many of the graph's are done, and what is worth a line."""

    def write(self, line: str) -> None: ...

    def start(self, phase: str) -> None: ...

    def end(self, phase: str) -> None: ...

    def advance(self, done: int, total: int) -> None: ...


class NoProgress:
    """Tells no one."""

    def write(self, line: str) -> None:
        pass

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
        self,
        batch: BatchRef,
        arguments: Mapping[str, Arguments] | None = None,
        *,
        step: int = 0,
        groups: Sequence[Hashable] | None = None,
    ) -> StepResult:
        """Run every operation of the graph once, on `batch` (the graph's inputs).

        `arguments[operation](batch so far)` gives the further keyword arguments of that operation's call.
        `groups` [rows] says which rows are samples of one prompt, for operations that take whole groups.
        The first failed operation raises; what still runs then is left to the caller, who shuts the pools
        down.
        """
        run = self.begin(batch, arguments, step=step, groups=groups)
        while not run.over:
            run.advance()
            while not next_event([run], run.events):
                pass
        return run.result

    def begin(
        self,
        batch: BatchRef,
        arguments: Mapping[str, Arguments] | None = None,
        *,
        step: int = 0,
        groups: Sequence[Hashable] | None = None,
        events: Events | None = None,
        may: Callable[[Operation], bool] | None = None,
    ) -> Run:
        """A run of the graph as in `run`, whose operations the caller lets start.

        Several runs that share `events` go on side by side; `may` tells whether an operation may start now
        (None: what comes before it on its pools is handed over).
        """
        return Run(self, batch, arguments or {}, step, groups, events, may)

    def turn(self, operation: Operation, handed_over: set[str]) -> bool:
        """Whether what comes before `operation` on its pools is handed over."""
        return self._before[operation.name] <= handed_over


class StuckError(RuntimeError):
    """Nothing runs and nothing may start; the message names what waits, and for what."""


def next_event(runs: Sequence[Run], events: Events) -> bool:
    """Wait for finished rows or the end of a call; whether an operation has ended with it.

    A call's own limit comes first, with the ranks that are late: the one here only backs it up. Raises
    StuckError where nothing runs.
    """
    running = [future for run in runs for future in run.running]
    if not running:
        raise StuckError("nothing runs; " + "; ".join(run.waiting() for run in runs if not run.over))
    limit_s = max(future.timeout_s for future in running)
    try:
        run, event = events.get(timeout=limit_s)
    except queue.Empty:
        names = ", ".join(future.name for future in running)
        raise CallTimeout(f"not done within {limit_s:g} s: {names}") from None
    return run.handle(event)


class Run:
    """One run of a graph: what is done, what runs, and the rows on their way through row-wise operations."""

    def __init__(
        self,
        controller: Controller,
        batch: BatchRef,
        arguments: Mapping[str, Arguments],
        step: int,
        groups: Sequence[Hashable] | None,
        events: Events | None = None,
        may: Callable[[Operation], bool] | None = None,
    ) -> None:
        if groups is not None and len(groups) != batch.n_rows:
            raise ValueError(f"groups of {len(groups)} rows for a batch of {batch.n_rows}")
        self.controller, self.graph, self.workers = controller, controller.graph, controller.groups
        self.arguments, self.step, self.row_groups = arguments, step, groups
        self.result = StepResult(batch)
        named = [operation.reads | operation.writes for operation in self.graph.operations]
        self.known = self.graph.inputs.union(batch.columns, *named)
        self.names = frozenset(operation.name for operation in self.graph.operations)
        self.done: set[str] = set()
        self.running: dict[DataProtoFuture, Operation] = {}
        self.sources: dict[str, DataProtoFuture] = {}
        self.streams: dict[str, RowStream] = {}  # of the row-wise operations that have begun
        self.given: dict[DataProtoFuture, PartRef] = {}  # what each of their calls works on
        self.events: Events = queue.SimpleQueue() if events is None else events
        self._may = may or (lambda operation: controller.turn(operation, self.handed_over()))

    @property
    def over(self) -> bool:
        """Whether every operation is done."""
        return len(self.done) == len(self.graph.operations)

    def waiting(self) -> str:
        """What has not started, and for what it waits."""
        waits = self.graph.dependencies()
        late = (
            f"{name} for {', '.join(sorted(before - self.done)) or 'its turn'}"
            for name, before in waits.items()
            if name not in self.done
        )
        return f"in step {self.step} there wait: {', '.join(late)}"

    def advance(self) -> None:
        """Hand over what may start, and tell how far the run is."""
        self.controller.progress.advance(len(self.done), len(self.graph.operations))
        self.start_ready()

    def start_ready(self) -> None:
        """Hand over every operation whose columns and state exist and whose turn has come on its pools."""
        while operation := self._next():
            if self.running and not self.controller.overlap:
                return
            self.controller.progress.start(operation.name)
            self._watch(self._start(operation), operation)
        for name in self.streams:
            self._pass_on(self.graph[name])

    def handle(self, event: DataProtoFuture | tuple[str, PartRef]) -> bool:
        """Take finished rows or the end of a call; whether an operation has ended with it."""
        if isinstance(event, tuple):
            self._rows_made(*event)
            return False
        operation = self.running.pop(event)
        if operation.name in self.streams:
            return self._rows_returned(operation, event)
        self._finish(operation, event)
        return True

    def _next(self) -> Operation | None:
        busy = {operation.name for operation in self.running.values()} | set(self.streams)
        return next((op for op in self.graph.ready(self.done, busy) if self._may(op)), None)

    def handed_over(self) -> set[str]:
        """Operations that are done, or of which nothing is left to submit."""
        open_ = {name for name, stream in self.streams.items() if stream.n_given < stream.n_rows}
        return self.done | ({operation.name for operation in self.running.values()} - open_)

    def _watch(self, future: DataProtoFuture, operation: Operation) -> None:
        self.running[future] = operation
        future.add_done_callback(lambda ended: self.events.put((self, ended)))

    def _call(self, operation: Operation, argument: Any) -> DataProtoFuture:
        """Submit the operation with its further keyword arguments."""
        extra = self.arguments.get(operation.name)
        keywords = extra(self.result.batch) if extra else {}
        method = getattr(self.workers[operation.role], operation.method)
        with at_step(self.step):
            future: DataProtoFuture = method(argument, blocking=False, **keywords)
        return future

    def _start(self, operation: Operation) -> DataProtoFuture:
        if operation.kind == "transfer":
            _, group = self._source(operation)
            with at_step(self.step):
                self.sources[operation.name] = group.export_weights(blocking=False)
            return self._call(operation, self.sources[operation.name])
        batch = self.result.batch
        columns = [name for name in batch.columns if name in operation.reads]
        future = self._call(operation, batch.select(columns))
        if self.controller.overlap and batch.n_rows and self._followers(operation):
            future.on_part(lambda part: self.events.put((self, (operation.name, part))))
        return future

    def _followers(self, operation: Operation) -> list[Operation]:
        """Who takes rows while `operation` makes them: on its own pool they would only queue behind it."""
        pool = self.workers[operation.role].resource_pool
        return [
            follower
            for follower in self.graph.followers(operation.name, self.done)
            if self.workers[follower.role].resource_pool is not pool
            and (follower.takes == "rows" or self.row_groups is not None)
        ]

    def _rows_made(self, name: str, part: PartRef) -> None:
        """Pass finished rows of operation `name` on."""
        batch = self.result.batch
        for follower in self._followers(self.graph[name]):
            if follower.name not in self.streams:
                groups = self.row_groups if follower.takes == "groups" else None
                self.streams[follower.name] = RowStream(batch.n_rows, groups)
            made = part.ref.select(column for column in part.ref.columns if column in follower.reads)
            others = [c for c in batch.columns if c in follower.reads and c not in made.columns]
            rows = batch.select(others).take(part.rows).union(made)
            self.streams[follower.name].add(PartRef(part.rows, rows))
            self._pass_on(follower)

    def _pass_on(self, operation: Operation) -> None:
        """Give a row-wise operation the rows that have come, one call at a time.

        What comes while it works goes together in its next call.
        """
        stream = self.streams[operation.name]
        if operation in self.running.values() or not self._may(operation):
            return
        if (part := stream.take()) is not None:
            if stream.n_given == len(part.rows):
                self.controller.progress.start(operation.name)
            future = self._call(operation, part.ref)
            self.given[future] = part
            self._watch(future, operation)

    def _rows_returned(self, operation: Operation, future: DataProtoFuture) -> bool:
        """Keep a row-wise operation's result for some rows; whether that was the last of it."""
        stream, part = self.streams[operation.name], self.given.pop(future)
        written = future.ref()
        stream.returned(PartRef(part.rows, self._own(operation, written)), _metrics(written))
        self._record(operation, operation.role, self.workers[operation.role], future)
        if stream.n_given < stream.n_rows:
            self._pass_on(operation)
            return False
        self._take(operation, *stream.result())
        del self.streams[operation.name]
        self._end(operation)
        return True

    def _finish(self, operation: Operation, future: DataProtoFuture) -> None:
        if operation.writes:
            written = future.ref()
            self._take(operation, written, _metrics(written))
        elif operation.kind == "train":
            # Every replica that had rows reports the whole batch.
            self.result.metrics |= next(iter(future.get()), {})
        else:
            future.get()
        self._record(operation, operation.role, self.workers[operation.role], future)
        if operation.name in self.sources:
            source = self.sources.pop(operation.name)
            list(as_completed([source], timeout=source.timeout_s))  # who sends may end after who receives
            self._record(operation, *self._source(operation), source)
        self._end(operation)

    def _take(self, operation: Operation, written: BatchRef, metrics: Mapping[str, float]) -> None:
        """Add what an operation wrote for the whole batch."""
        self.result.metrics |= metrics
        batch = self.result.batch
        columns = {**batch.columns, **self._own(operation, written).columns}
        self.result.batch = BatchRef(columns, written.n_rows, tokens=written.tokens or batch.tokens)

    def _own(self, operation: Operation, written: BatchRef) -> BatchRef:
        """The columns that the graph says, and those it does not know: what a scoring function returned
        besides.
        """
        extras = [name for name in written.columns if name not in self.known]
        return written.select([*sorted(operation.writes), *extras])

    def _end(self, operation: Operation) -> None:
        self.done.add(operation.name)
        self.controller.progress.end(operation.name)

    def _source(self, operation: Operation) -> tuple[str, Any]:
        """The role whose state a transfer moves, and its worker group."""
        (role,) = {state.split(".")[0] for state in operation.state_reads}
        return role, self.workers[role]

    def _record(self, operation: Operation, role: str, group: Any, future: DataProtoFuture) -> None:
        """Note what each rank of `group` did for the operation, and its seconds: from its first start to its
        end, or those at work where it takes rows as they come and waits between its calls.
        """
        pool, result = group.resource_pool.name, self.result
        for span in future.spans:
            args = {"step": self.step, "bytes_fetched": span.nbytes_fetched, "kernels": list(span.kernels)}
            args |= span.notes
            result.spans.append(Span(operation.name, role, pool, span.rank, span.start_s, span.end_s, args))
        mine = Timeline([span for span in result.spans if span.name == operation.name])
        if operation.name in self.streams:
            result.timing_s[operation.name] = mine.busy_s(operation.name)
        else:
            first = min(span.start_s for span in mine.spans)
            result.timing_s[operation.name] = max(span.end_s for span in mine.spans) - first


def _metrics(written: BatchRef) -> dict[str, float]:
    """What a call measured; the mean over its replicas."""
    return {name: float(np.mean(value)) for name, value in written.meta_info.get("metrics", {}).items()}
