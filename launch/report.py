"""`rolemesh report`: what a run's operations took, beside what its plan predicted."""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolemesh.engine.recovery import read_recoveries
from rolemesh.placement.graph import GraphError, StepGraph
from rolemesh.placement.hardware import hardware
from rolemesh.placement.layout import LayoutError
from rolemesh.placement.memory.items import GIB
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.pools import PlacementError
from rolemesh.placement.profile_file import fed, profile_text, read_profile_data
from rolemesh.placement.schedule import ahead_of, waits_for
from rolemesh.placement.simulator import SimulatedPool, Simulation, SimulationError, simulate_period
from rolemesh.placement.steps import step_graph, step_names
from rolemesh.placement.timeline import Span, Timeline, TimelineError

MEMORY_FILE = "memory.json"
WARM_STEPS = 3  # with so many steps, the first one is left out: it also allocates and compiles


class ReportError(ValueError):
    """A folder that holds no run to report on."""


@dataclass(frozen=True)
class Spread:
    """Median and extremes over `n` steps."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class OperationReport:
    """One operation: seconds from its first rank's start to its last rank's end."""

    name: str
    kind: str
    pools: tuple[str, ...]
    predicted_s: float | None
    measured_s: Spread | None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1: 0.1 is predicted 10% too long."""
        return _error(self.predicted_s, self.measured_s)


@dataclass(frozen=True)
class PoolReport:
    """A pool's use of a step: `busy` is the part in which one of its ranks computes, the rest is idle."""

    name: str
    roles: tuple[str, ...]
    ranks: int
    busy: Spread
    idle_s: Spread
    predicted_busy: float | None = None
    predicted_idle_s: float | None = None


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a pool's fullest rank; what is not known is None. `what` says what was measured."""

    pool: str
    predicted: float | None
    limit: float | None
    measured: float | None
    what: str = ""


@dataclass(frozen=True)
class RunReport:
    """Everything that is known of a run. `measured` and `predicted` are the spans of one step, from 0.

    `notes` say what could not be compared and why. `waits` are, by operation, those it waits for.
    """

    folder: Path
    run: str
    plan: PlacementPlan | None
    steps: int
    step_s: Spread
    predicted_step_s: float | None
    operations: tuple[OperationReport, ...]
    pools: tuple[PoolReport, ...]
    memory: tuple[MemoryReport, ...]
    measured: tuple[Span, ...]
    predicted: tuple[Span, ...] = ()
    notes: tuple[str, ...] = ()
    device_of_pool: Mapping[str, str] = field(default_factory=dict)
    recoveries: tuple[str, ...] = ()
    waits: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def step_error(self) -> float | None:
        """As an operation's."""
        return _error(self.predicted_step_s, self.step_s)

    def seconds_by_kind(self, device: str) -> tuple[dict[str, float], dict[str, float]]:
        """Predicted and measured seconds of the operations that ran on this device type, by kind."""
        predicted: dict[str, float] = {}
        measured: dict[str, float] = {}
        for op in self.operations:
            here = bool(op.pools) and all(self.device_of_pool.get(pool) == device for pool in op.pools)
            if here and op.predicted_s is not None and op.measured_s is not None:
                predicted[op.kind] = predicted.get(op.kind, 0.0) + op.predicted_s
                measured[op.kind] = measured.get(op.kind, 0.0) + op.measured_s.median
        return predicted, measured

    def text(self) -> str:
        """For a terminal."""
        strategy = f"{self.plan.strategy}, " if self.plan else ""
        lines = [
            f"{self.folder}: {strategy}{self.steps} steps; medians of {self.step_s.n}, lowest to highest",
            "",
        ]
        rows = [("operation", "kind", "pool", "predicted", "measured", "lowest", "highest", "error")]
        for op in self.operations:
            seen = (_s(op.predicted_s), *_spread(op.measured_s), _percent(op.error))
            rows.append((op.name, op.kind, "+".join(op.pools), *seen))
        rows.append(
            ("step", "", "", _s(self.predicted_step_s), *_spread(self.step_s), _percent(self.step_error))
        )
        lines += _aligned(rows, left=3)
        lines += ["", *_aligned([POOL_HEADER, *(pool_row(pool) for pool in self.pools)], left=2)]
        if self.memory:
            lines += ["", *_aligned([MEMORY_HEADER, *(memory_row(entry) for entry in self.memory)], left=1)]
        said = [f"recovery: {recovery}" for recovery in self.recoveries]
        said += [f"note: {note}" for note in self.notes]
        return "\n".join(lines + [""] * bool(self.recoveries) + said)


POOL_HEADER = ("pool", "roles", "ranks", "busy", "predicted", "idle", "predicted")
MEMORY_HEADER = ("memory of a pool's fullest rank", "predicted", "limit", "measured", "what was measured")


def pool_row(pool: PoolReport) -> tuple[str, ...]:
    """A pool's cells under POOL_HEADER."""
    return (
        pool.name,
        ", ".join(pool.roles),
        str(pool.ranks),
        f"{pool.busy.median:.0%}",
        "-" if pool.predicted_busy is None else f"{pool.predicted_busy:.0%}",
        _s(pool.idle_s.median),
        _s(pool.predicted_idle_s),
    )


def memory_row(entry: MemoryReport) -> tuple[str, ...]:
    """A pool's cells under MEMORY_HEADER."""
    return (entry.pool, _gib(entry.predicted), _gib(entry.limit), _gib(entry.measured), entry.what)


def read_report(folder: str | Path) -> RunReport:
    """Compare the timeline of a run folder with its plan; a run without predictions is only measured.

    Raises ReportError for a folder without a timeline or without a whole step.
    """
    folder = Path(folder)
    try:
        spans = Timeline.load(folder / "timeline.json").spans
    except (OSError, TimelineError) as error:
        raise ReportError(f"{folder} holds no run: {error}") from None
    graph, staleness, unreadable = _step(folder)
    steps = _by_step(spans, ahead_of(graph) if graph and staleness else frozenset())
    if not steps:
        raise ReportError(f"{folder}: the timeline has no step yet")
    notes: list[str] = []
    plan = _plan(folder, notes)
    kept = dict(list(steps.items())[1:]) if len(steps) >= WARM_STEPS else steps
    if len(kept) < len(steps):
        notes.append("the first step is left out: it also allocates and compiles")
    if graph and staleness:
        notes.append("generation is shown with the step before its own, beside which it runs")
    simulated = None
    if plan and plan.prediction.operations_s:
        notes += [f"no predicted step is drawn: {unreadable}"] if unreadable else []
        simulated = _simulate(plan, graph, staleness, notes) if graph else None
    told = plan.prediction if plan else None
    predicted_step = told.step_s if told else None
    if predicted_step is None and simulated:
        predicted_step = simulated.total_s
    names = list(dict.fromkeys(span.name for step in kept.values() for span in step))
    names += [name for name in (told.operations_s if told else {}) if name not in names]
    typical = _typical(kept)
    return RunReport(
        folder,
        run=f"{folder.resolve().name} {min(span.start_s for span in spans):.3f}",
        plan=plan,
        steps=len(steps),
        step_s=Spread.of([_length(step) for step in kept.values()]),
        predicted_step_s=predicted_step,
        operations=tuple(_operation(name, kept, plan) for name in names),
        pools=_pools(kept, plan, simulated),
        memory=_memory(folder, plan),
        measured=tuple(_from_zero(typical)),
        predicted=tuple(simulated.timeline.spans) if simulated else (),
        notes=tuple(notes),
        device_of_pool=_devices(plan),
        recoveries=tuple(map(str, read_recoveries(folder))),
        waits=waits_for(graph, staleness) if graph else {},
    )


def _by_step(spans: Iterable[Span], ahead: Collection[str]) -> dict[int, list[Span]]:
    """Spans of each training step, in order; operations that work `ahead` go with the step before theirs.

    Validation comes before the first step, as step 0, or after a step, under its number: what a rank does a
    second time in a step is left out.
    """
    steps: dict[int, dict[tuple[str, str, str, int], Span]] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        if step := int(span.args.get("step", 0)):
            step -= span.name in ahead and step > 1
            steps.setdefault(step, {}).setdefault((span.name, span.role, span.pool, span.rank), span)
    return {step: list(first.values()) for step, first in sorted(steps.items())}


def _length(step: Sequence[Span]) -> float:
    return max(span.end_s for span in step) - min(span.start_s for span in step)


def _typical(steps: Mapping[int, list[Span]]) -> list[Span]:
    """The step of median length."""
    ordered = sorted(steps.values(), key=_length)
    return ordered[(len(ordered) - 1) // 2]


def _from_zero(step: Sequence[Span]) -> list[Span]:
    start = min(span.start_s for span in step)
    return [Span(s.name, s.role, s.pool, s.rank, s.start_s - start, s.end_s - start, s.args) for s in step]


def _operation(name: str, steps: Mapping[int, list[Span]], plan: PlacementPlan | None) -> OperationReport:
    mine = [[span for span in step if span.name == name] for step in steps.values()]
    lengths = [_length(spans) for spans in mine if spans]
    return OperationReport(
        name,
        _kinds().get(name, ""),
        tuple(dict.fromkeys(span.pool for spans in mine for span in spans)),
        plan.prediction.operations_s.get(name) if plan else None,
        Spread.of(lengths) if lengths else None,
    )


def _kinds() -> dict[str, str]:
    """The kind of every operation of the registered steps."""
    return {op.name: op.kind for name in step_names() for op in step_graph(name).operations}


def _pools(
    steps: Mapping[int, list[Span]], plan: PlacementPlan | None, simulated: Simulation | None
) -> tuple[PoolReport, ...]:
    roles = {pool.name: pool.roles for pool in plan.pools} if plan else {}
    seen = dict.fromkeys(span.pool for step in steps.values() for span in step)
    reports = []
    lengths = [_length(step) for step in steps.values()]
    for name in [*roles, *(pool for pool in seen if pool not in roles)]:
        busy = [_busy(step, name) for step in steps.values()]
        mine = [span for step in steps.values() for span in step if span.pool == name]
        known = simulated if simulated and name in simulated.busy_s else None
        reports.append(
            PoolReport(
                name,
                roles.get(name) or tuple(sorted({span.role for span in mine})),
                len({span.rank for span in mine}),
                Spread.of([b / length if length else 0.0 for b, length in zip(busy, lengths, strict=True)]),
                Spread.of([length - b for b, length in zip(busy, lengths, strict=True)]),
                known.utilisation[name] if known else None,
                known.idle_s[name] if known else None,
            )
        )
    return tuple(reports)


def _busy(step: Sequence[Span], pool: str) -> float:
    """Seconds in which at least one rank of the pool computes."""
    total, until = 0.0, float("-inf")
    for span in sorted((s for s in step if s.pool == pool), key=lambda s: s.start_s):
        total += max(0.0, span.end_s - max(span.start_s, until))
        until = max(until, span.end_s)
    return total


def _plan(folder: Path, notes: list[str]) -> PlacementPlan | None:
    try:
        plan = PlacementPlan.from_yaml((folder / "plan.yaml").read_text(encoding="utf-8"))
    except OSError:
        notes.append("no plan.yaml: nothing to compare with")
        return None
    except (PlacementError, LayoutError, TypeError) as error:
        notes.append(f"plan.yaml cannot be read: {error}")
        return None
    if not plan.prediction.operations_s:
        notes.append("the plan predicts no seconds: nothing to compare with")
    return plan


def _step(folder: Path) -> tuple[StepGraph | None, int, str]:
    """The step that the run's recipe describes, and its staleness; or why it cannot be read."""
    from rolemesh.launch.config import load_recipe
    from rolemesh.launch.fields import RecipeError
    from rolemesh.launch.request import graph_of

    try:
        recipe = load_recipe(folder / "recipe.yaml")
        return graph_of(recipe), recipe.schedule.staleness, ""
    except (RecipeError, GraphError) as error:
        return None, 0, str(error)


def _simulate(plan: PlacementPlan, graph: StepGraph, staleness: int, notes: list[str]) -> Simulation | None:
    """One step as planned; an operation that the plan says nothing of takes no time."""
    told = plan.prediction.operations_s
    if silent := [op.name for op in graph.operations if op.name not in told]:
        notes.append(f"the plan predicts nothing for {', '.join(silent)}: taken as 0 s")
    seconds = {op.name: told.get(op.name, 0.0) for op in graph.operations}
    pools = [SimulatedPool(pool.name, pool.roles, pool.world) for pool in plan.pools]
    try:
        return simulate_period(graph, seconds, pools, order=plan.order or None, staleness=staleness)
    except SimulationError as error:
        notes.append(f"the plan's order cannot be played: {error}")
        return None


def _memory(folder: Path, plan: PlacementPlan | None) -> tuple[MemoryReport, ...]:
    try:
        measured = json.loads((folder / MEMORY_FILE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        measured = {}
    told = plan.prediction if plan else None
    names = list(dict.fromkeys([*(told.peak if told else {}), *measured]))
    return tuple(
        MemoryReport(
            name,
            told.peak.get(name) if told else None,
            told.limit.get(name) if told else None,
            max(measured[name]["peak_bytes"], default=None) if name in measured else None,
            str(measured[name]["what"]) if name in measured else "",
        )
        for name in names
    )


def _devices(plan: PlacementPlan | None) -> dict[str, str]:
    if plan is None:
        return {}
    return {
        pool.name: "cpu" if pool.device_kind == "cpu" else plan.device_types.get(pool.name, "")
        for pool in plan.pools
    }


def _error(predicted: float | None, measured: Spread | None) -> float | None:
    if predicted is None or measured is None or not measured.median:
        return None
    return predicted / measured.median - 1


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3g} s"


def _spread(spread: Spread | None) -> tuple[str, str, str]:
    return (_s(spread.median), _s(spread.low), _s(spread.high)) if spread else ("-", "-", "-")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:+.0%}"


def _gib(amount: float | None) -> str:
    return "-" if amount is None else f"{amount / GIB:.2f} GiB"


def _aligned(rows: Sequence[Sequence[Any]], left: int) -> list[str]:
    """Columns under each other; the first `left` ones on the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def feed_profile(report: RunReport, path: Path) -> list[str]:
    """Correct the factors of a profile file by a run; lines that say what changed.

    Raises HardwareError for a file that is no profile and for a run it was fed with; ReportError when the run
    has nothing to tell of the profile's devices.
    """
    data = read_profile_data(path)
    device = hardware(data["device"]).name
    predicted, measured = report.seconds_by_kind(device)
    if not predicted:
        raise ReportError(
            f"{report.folder}: no operation on {device} has both a prediction and a measurement"
        )
    changed = fed(data, predicted, measured, report.run)
    path.write_text(profile_text(changed), encoding="utf-8")
    before = {kind: entry["factor"] for kind, entry in data.get("factors", {}).items()}
    return [
        f"{path}: {kind} {before.get(kind, 1.0):.3g} -> {entry['factor']:.3g}"
        for kind, entry in changed["factors"].items()
        if kind in predicted
    ]
