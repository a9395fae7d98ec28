"""The step as a graph of role operations, whose dependencies follow from columns and state."""

from __future__ import annotations

import graphlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["generate", "infer", "train", "transfer"]
Takes = Literal["batch", "rows", "groups"]
Per = Literal["sample", "prompt"]


class GraphError(ValueError):
    """A step whose operations do not make a graph; the message names the operations and columns."""


@dataclass(frozen=True)
class Operation:
    """One call on the workers of one role.

    `reads` and `writes` are columns of the batch; `state_reads` and `state_writes` are state that
    outlives the step, such as `actor.weights`. `method` is the worker group's method.

    `takes` is what it needs at a time. Where that is not the whole `batch`, its result for a row depends on
    that row alone (`rows`) or on the rows of the same prompt (`groups`): it may start on what its writer has
    finished, while that one still works on the others.

    `per` "prompt" works on one row of each prompt: every sample of a prompt gets the same result.
    """

    name: str
    role: str
    kind: Kind
    method: str
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    state_reads: frozenset[str] = frozenset()
    state_writes: frozenset[str] = frozenset()
    takes: Takes = "batch"
    per: Per = "sample"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise GraphError(f"operation {self.name!r}: kind {self.kind!r} is none of {get_args(Kind)}")
        if self.takes not in get_args(Takes):
            raise GraphError(f"operation {self.name!r}: takes {self.takes!r} is none of {get_args(Takes)}")
        if self.per not in get_args(Per):
            raise GraphError(f"operation {self.name!r}: per {self.per!r} is none of {get_args(Per)}")
        if self.takes != "batch" and (self.kind != "infer" or self.state_writes):
            raise GraphError(
                f"operation {self.name!r} takes {self.takes}: only one of kind infer that writes no state can"
            )
        for name in ("reads", "writes", "state_reads", "state_writes"):
            object.__setattr__(self, name, frozenset(getattr(self, name)))

    @property
    def roles(self) -> frozenset[str]:
        """Roles whose workers take part: a transfer also needs those that own the state it moves."""
        if self.kind != "transfer":
            return frozenset({self.role})
        return frozenset(
            {self.role} | {state.split(".")[0] for state in self.state_reads | self.state_writes}
        )


@dataclass(frozen=True)
class StepGraph:
    """Operations in program order, and the columns that the data set brings (`inputs`).

    A column has one writer. An operation may rewrite an input that it reads (generation turns the
    prompts' `input_ids` into whole sequences); everyone else then reads what it wrote. State is
    ordered as the program lists it: write after read, read after write, write after write.

    `refill` names the operations that may run several times in a step, each time on further prompts, until
    enough of the rows are worth training on. The others wait for the last time.

    Raises GraphError for a repeated name, a column with no writer or two, for a cycle, and for a refill
    that waits for others.
    """

    name: str
    operations: tuple[Operation, ...]
    inputs: frozenset[str] = frozenset()
    refill: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "operations", tuple(self.operations))
        object.__setattr__(self, "inputs", frozenset(self.inputs))
        object.__setattr__(self, "refill", tuple(self[name].name for name in self.refill))
        names = [operation.name for operation in self.operations]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise GraphError(f"step {self.name!r} has several operations named {', '.join(repeated)}")
        self.order()

    def __getitem__(self, name: str) -> Operation:
        for operation in self.operations:
            if operation.name == name:
                return operation
        known = ", ".join(operation.name for operation in self.operations)
        raise GraphError(f"step {self.name!r} has no operation {name!r} (it has: {known})")

    def roles(self) -> tuple[str, ...]:
        """Roles of the operations, in the order in which they first appear."""
        return tuple(dict.fromkeys(operation.role for operation in self.operations))

    def dependencies(self) -> dict[str, frozenset[str]]:
        """For each operation the names of those it waits for directly."""
        waits: dict[str, set[str]] = {operation.name: set() for operation in self.operations}
        self._add_columns(waits)
        self._add_state(waits)
        for name in self.refill:
            if others := waits[name] - {*self.refill}:
                raise GraphError(
                    f"step {self.name!r} refills with {name}, which waits for {', '.join(sorted(others))}: "
                    "only what waits for nothing else can run again"
                )
        for name in set(waits) - {*self.refill}:
            waits[name] |= set(self.refill)
        return {name: frozenset(others - {name}) for name, others in waits.items()}

    def followers(self, name: str, done: Collection[str]) -> tuple[Operation, ...]:
        """Operations that take rows or groups of `name` as it makes them: besides it they wait for none."""
        waits = self.dependencies()
        return tuple(
            operation
            for operation in self.operations
            if operation.takes != "batch"
            and operation.name not in done
            and self[name].writes & operation.reads
            and waits[operation.name] - set(done) == {name}
        )

    def order(self) -> tuple[Operation, ...]:
        """All operations, each after what it waits for; program order where the graph leaves a choice."""
        waits = self.dependencies()
        try:
            graphlib.TopologicalSorter(waits).prepare()
        except graphlib.CycleError as error:
            raise GraphError(f"step {self.name!r} has a cycle: {' -> '.join(error.args[1])}") from None
        ordered: list[Operation] = []
        while len(ordered) < len(self.operations):
            ordered.append(self.ready({operation.name for operation in ordered})[0])
        return tuple(ordered)

    def ready(self, done: Collection[str], running: Collection[str] = ()) -> tuple[Operation, ...]:
        """Operations whose columns and state exist and that have not started, in program order."""
        waits = self.dependencies()
        return tuple(
            operation
            for operation in self.operations
            if operation.name not in done
            and operation.name not in running
            and all(name in done for name in waits[operation.name])
        )

    def select(self, names: Iterable[str]) -> StepGraph:
        """The graph of the named operations alone; columns that the others would write become inputs."""
        wanted = {self[name].name for name in names}
        kept = tuple(operation for operation in self.operations if operation.name in wanted)
        written = {column for operation in kept for column in operation.writes}
        read = {column for operation in kept for column in operation.reads}
        refill = tuple(name for name in self.refill if name in wanted)
        return StepGraph(self.name, kept, frozenset((read - written) | (self.inputs & read)), refill)

    def _writers(self) -> Mapping[str, Operation]:
        writers: dict[str, Operation] = {}
        for operation in self.operations:
            for column in sorted(operation.writes):
                if column in writers:
                    raise GraphError(
                        f"column {column!r} has two writers: {writers[column].name} and {operation.name}"
                    )
                if column in self.inputs - operation.reads:
                    raise GraphError(
                        f"column {column!r} has two writers: the data set and {operation.name}, "
                        "which does not read it"
                    )
                writers[column] = operation
        return writers

    def _add_columns(self, waits: dict[str, set[str]]) -> None:
        writers = self._writers()
        for operation in self.operations:
            for column in sorted(operation.reads):
                if column in writers:
                    waits[operation.name].add(writers[column].name)
                if column not in self.inputs and writers.get(column, operation) is operation:
                    raise GraphError(
                        f"{operation.name} reads column {column!r}, which nobody writes before it "
                        f"(from the data set: {', '.join(sorted(self.inputs)) or 'nothing'})"
                    )

    def _add_state(self, waits: dict[str, set[str]]) -> None:
        last_writer: dict[str, str] = {}
        readers: defaultdict[str, set[str]] = defaultdict(set)  # since the last write
        for operation in self.operations:
            for state in operation.state_reads | operation.state_writes:
                waits[operation.name] |= {last_writer[state]} if state in last_writer else set()
            for state in operation.state_writes:
                waits[operation.name] |= readers.pop(state, set())
                last_writer[state] = operation.name
            for state in operation.state_reads - operation.state_writes:
                readers[state].add(operation.name)
