"""What a benchmark found: a result for each cell, as a table and as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rolemesh.placement.memory.items import GIB
from rolemesh.placement.plan import PlacementPlan

SCHEMA = 1  # of results.json: a field that changes its meaning changes this
State = Literal["ok", "does not fit", "no plan found", "failed"]


@dataclass(frozen=True)
class Bar:
    """An operation on a pool; seconds from the start of the step."""

    pool: str
    operation: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Measured:
    """Seconds of the steps of a real run: the median, lowest and highest of `n` warm ones.

    `peak` is the memory that the fullest rank of each pool held, in bytes.
    """

    step_s: float
    low_s: float
    high_s: float
    n: int
    peak: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CellResult:
    """One strategy on one case.

    Attributes:
        devices: of the cluster; rates per device count them all, idle ones too.
        reason: why there is no plan, or (of a plan) what is worth knowing of it.
        step_s: seconds of a step; measured where `measured` is there, else predicted.
        samples, tokens: of a step.
        bars: of one step, predicted or (a real run) measured.
        utilisation: part of the step in which each pool computes.
        planning_s: seconds that the cell took, with the run of one that is really run.
        plan_file: where the plan is, relative to the results.
    """

    model: str
    cluster: str
    workload: str
    strategy: str
    devices: int
    state: State
    reason: str = ""
    step_s: float | None = None
    samples: int = 0
    tokens: float = 0.0
    bars: tuple[Bar, ...] = ()
    utilisation: Mapping[str, float] = field(default_factory=dict)
    plan: PlacementPlan | None = None
    plan_file: str = ""
    predicted_s: float | None = None
    measured: Measured | None = None
    planning_s: float = 0.0

    @property
    def case(self) -> tuple[str, str, str]:
        """Model, cluster and workload."""
        return self.model, self.cluster, self.workload

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second."""
        return self.samples / self.step_s if self.step_s else None

    @property
    def tokens_per_s_per_device(self) -> float | None:
        """Tokens of prompts and responses per second and device."""
        return self.tokens / self.step_s / self.devices if self.step_s else None

    @property
    def peak_gib(self) -> float | None:
        """GiB of the fullest device."""
        peaks = self.plan.prediction.peak if self.plan else {}
        return max(peaks.values()) / GIB if peaks else None

    @property
    def gap(self) -> float | None:
        """How much better a plan of this strategy could be at most."""
        return self.plan.proof.gap if self.plan and self.plan.proof else None

    def row(self) -> dict[str, Any]:
        """For JSON."""
        told = self.plan.prediction if self.plan else None
        keys = ("model", "cluster", "workload", "strategy", "devices", "state", "reason")
        numbers = ("step_s", "predicted_s", "samples", "tokens", "samples_per_s", "tokens_per_s_per_device")
        row: dict[str, Any] = {name: getattr(self, name) for name in (*keys, *numbers, "peak_gib", "gap")}
        row["utilisation"] = dict(self.utilisation)
        row["operations_s"] = dict(told.operations_s) if told else {}
        row["memory_gib"] = {
            role: {item: amount / GIB for item, amount in items.items()}
            for role, items in (told.memory if told else {}).items()
        }
        row["pools"] = {
            pool.name: {"roles": list(pool.roles), "devices": pool.world}
            for pool in (self.plan.pools if self.plan else ())
        }
        row["order"] = {pool: list(names) for pool, names in (self.plan.order if self.plan else {}).items()}
        row["bars"] = [vars(bar) for bar in self.bars]
        row["measured"] = vars(self.measured) if self.measured else None
        row["planning_s"] = round(self.planning_s, 3)
        row["plan"] = self.plan_file
        return row


@dataclass(frozen=True)
class BenchResult:
    """All cells of a benchmark, in the order of its spec."""

    title: str
    run: bool
    strategies: tuple[str, ...]
    cells: tuple[CellResult, ...]

    @property
    def cases(self) -> dict[tuple[str, str, str], list[CellResult]]:
        """The cells by case, in order."""
        cases: dict[tuple[str, str, str], list[CellResult]] = {}
        for cell in self.cells:
            cases.setdefault(cell.case, []).append(cell)
        return cases

    def json(self) -> dict[str, Any]:
        """The content of results.json."""
        return {
            "schema": SCHEMA,
            "title": self.title,
            "kind": "measured" if self.run else "simulated",
            "strategies": list(self.strategies),
            "cells": [cell.row() for cell in self.cells],
        }

    def text(self) -> str:
        """The table for a terminal."""
        header = ("model", "cluster", "workload", "strategy", "step", "samples/s", "tokens/s/device", "busy",
                  "memory", "")  # fmt: skip
        rows = [header, *(_line(cell) for cell in self.cells)]
        if len({cell.workload for cell in self.cells}) == 1:
            rows = [row[:2] + row[3:] for row in rows]
        best = fastest(self.cells)
        marked = [
            [*row[:-1], "*" if i and self.cells[i - 1] in best else " ", row[-1]]
            for i, row in enumerate(rows)
        ]
        return "\n".join([*_aligned(marked), "", "* the fastest of its case; memory: of the fullest device"])


def fastest(cells: Sequence[CellResult]) -> list[CellResult]:
    """The cells with the shortest step of each case; several where they agree to four digits."""
    least: dict[tuple[str, str, str], float] = {}
    for cell in cells:
        if cell.step_s is not None:
            least[cell.case] = min(cell.step_s, least.get(cell.case, cell.step_s))
    return [
        cell for cell in cells if cell.step_s is not None and cell.step_s <= least[cell.case] * (1 + 1e-4)
    ]


def slug(*names: str) -> str:
    """Names as one that a file can have."""
    return "-".join(re.sub(r"[^\w.]+", "_", name).strip("_") for name in names)


def number(value: float | None, unit: str = "") -> str:
    """Three digits, without exponents; a dash for None."""
    if value is None:
        return "-"
    digits = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{digits} {unit}".strip()


def _line(cell: CellResult) -> tuple[str, ...]:
    busy = " ".join(f"{pool} {share:.0%}" for pool, share in cell.utilisation.items())
    where = (cell.model, cell.cluster, cell.workload, cell.strategy)
    if cell.step_s is None:
        said = cell.reason.partition("\n")[0].removeprefix("nothing fits: ")
        return (*where, "-", "-", "-", "-", "-", f"{cell.state}: {_short(said)}")
    said = cell.reason
    if cell.measured is not None:
        spread = f"{number(cell.measured.low_s)} to {number(cell.measured.high_s, 's')}"
        said = f"{spread}; predicted {number(cell.predicted_s, 's')}"
    figures = (number(cell.step_s, "s"), number(cell.samples_per_s), number(cell.tokens_per_s_per_device))
    return (*where, *figures, busy, number(cell.peak_gib, "GiB"), said)


def _short(text: str, longest: int = 110) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns under each other; the last one as it is."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
