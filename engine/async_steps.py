"""Steps side by side: samples are generated ahead of training, by weights that are at most `staleness`
updates older than those that learn from them.

The rollout gets new weights after every `staleness` steps, and between two such transfers it generates as
many steps' samples: those from the second step after the transfer on. So those of a step lack 1 to
`staleness` updates, and how many does not depend on what takes how long: a run repeats bit for bit. What
decides when an operation may start, besides its own step's graph:

- generation for step k: when no weights after step k - 2 or before are still to come;
- a transfer of the weights after step k: when nobody generates for step k + 1 or before any more;
- all else of step k: when step k - 1 is over.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Hashable, Mapping, Sequence

from rolemesh.engine.batch_ref import BatchRef
from rolemesh.engine.controller import Arguments, Controller, Events, Run, StepResult, next_event
from rolemesh.placement.graph import Operation, StepGraph
from rolemesh.placement.schedule import ahead_of
from rolemesh.placement.timeline import Span


class StepsInFlight:
    """The steps that are open: one is trained, those after it are generated.

    Args:
        graph: the whole step.
        staleness: how many updates older the weights may be that make a step's samples; 0: none.
        order: the plan's, see `Controller`: by pool the operations of a period, in which generation is for
            the step after the one that the others work on.
    """

    def __init__(
        self, graph: StepGraph, staleness: int, order: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.staleness, self._lag = staleness, min(1, staleness)
        self.ahead = ahead_of(graph)
        makers = [op for op in graph.operations if op.kind == "generate"]
        self.generates = frozenset(op.name for op in makers)
        self._columns = frozenset().union(*(op.writes for op in makers))
        read = {state for op in makers for state in op.state_reads}
        self.transfers = frozenset(op.name for op in graph.operations if op.state_writes & read)
        names = [operation.name for operation in graph.operations]
        self._before: dict[str, set[str]] = {name: set() for name in names}  # in the same period
        self._period_before: dict[str, set[str]] = {name: set() for name in names}
        for listed in (order or {}).values():
            for i, name in enumerate(listed):
                self._before[name] |= set(listed[:i])
                self._period_before[name] |= set(listed)
        self.runs: dict[int, Run] = {}
        self.current = 0
        self._events: Events = queue.SimpleQueue()
        self._n_told: dict[int, int] = {}  # spans of each run

    def transfers_after(self, step: int) -> bool:
        """Whether the rollout gets the weights after `step`."""
        return step % max(1, self.staleness) == 0

    def last_with(self, step: int) -> int:
        """The last step that is generated while `step` is trained."""
        interval = max(1, self.staleness)
        return (step - 1) // interval * interval + interval + self._lag if self.staleness else step

    def open(
        self,
        step: int,
        controller: Controller,
        batch: BatchRef,
        arguments: Mapping[str, Arguments],
        groups: Sequence[Hashable] | None,
    ) -> Run:
        """Let the generation of `step` begin as soon as it may; steps are opened in order."""
        may = functools.partial(self._may, step)
        run = controller.begin(batch, arguments, step=step, groups=groups, events=self._events, may=may)
        self.runs[step], self._n_told[step] = run, 0
        return run

    def train(self, step: int) -> StepResult:
        """Do the rest of `step`, which is open, while others are generated.

        Raises what a failed operation of any open step raised, and StuckError.
        """
        self.current, run = step, self.runs[step]
        self._play(lambda: run.over)
        return run.result

    def settle(self) -> None:
        """Wait until every open step has its samples, so that the rollout is free."""
        self._play(lambda: all(map(self._generated, self.runs.values())))

    def generated(self) -> dict[int, BatchRef]:
        """The samples of the steps after the trained one, as far as they are there."""
        made: dict[int, BatchRef] = {}
        for step, run in self.runs.items():
            if step > self.current and self._generated(run):
                batch = run.result.batch
                made[step] = batch.select(self._columns & {*batch.columns})
        return made

    def new_spans(self) -> list[Span]:
        """What has been recorded since the last call, of all steps; those that are over are forgotten."""
        spans: list[Span] = []
        for step, run in list(self.runs.items()):
            recorded = run.result.spans
            spans += recorded[self._n_told[step] :]
            self._n_told[step] = len(recorded)
            if run.over:
                del self.runs[step], self._n_told[step]
        return spans

    def _play(self, reached: Callable[[], bool]) -> None:
        while not reached():
            for step in sorted(self.runs):
                run = self.runs[step]
                if step == self.current:
                    run.advance()
                else:
                    run.start_ready()
            open_ = [run for run in self.runs.values() if not run.over]
            while not next_event(open_, self._events):
                pass

    def _may(self, step: int, operation: Operation) -> bool:
        """Whether an operation may start whose own step lets it."""
        if operation.name in self.ahead:
            free = not any(self._transferring(run) for at, run in self.runs.items() if at < step - self._lag)
        elif operation.name in self.transfers:
            free = all(self._generated(run) for at, run in self.runs.items() if at <= step + self._lag)
        else:
            free = step == self.current
        return free and self._turn(step, operation)

    def _turn(self, step: int, operation: Operation) -> bool:
        """Whether what comes before it on its pools is handed over, whichever step it is for."""
        period = step if operation.name in self.ahead else step + self._lag
        earlier = [(name, period) for name in self._before[operation.name]]
        earlier += [(name, period - 1) for name in self._period_before[operation.name]]
        return all(self._handed_over(name, at) for name, at in earlier)

    def _handed_over(self, name: str, period: int) -> bool:
        run = self.runs.get(period if name in self.ahead else period - self._lag)
        return run is None or name not in run.names - run.handed_over()

    def _generated(self, run: Run) -> bool:
        """Whether a step has all its samples."""
        return run.done >= self.generates & run.names

    def _transferring(self, run: Run) -> bool:
        """Whether a step's weights are still to come."""
        return not run.done >= self.transfers & run.names
