"""How a run is going, from its folder: curves over steps, and lengths of the responses that it kept."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolemesh.engine.recovery import read_recoveries

METRICS = "metrics.jsonl"
# Panels: name, and the metrics drawn in it.
PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("critic/score/mean", "critic/rewards/mean", "val/reward/mean")),
    ("KL to the reference", ("actor/reward_kl_penalty", "actor/kl_loss")),
    ("KL of the update", ("actor/ppo_kl",)),
    ("entropy", ("actor/entropy",)),
    ("rollout-trainer gap", ("training/rollout_probs_diff/mean", "rollout_corr/kl")),
    ("staleness (steps)", ("training/staleness/mean", "training/staleness/max")),
    ("reward failures (samples)", ("reward/failed", "reward/timeouts", "reward/died")),
    ("response tokens", ("response_length/mean", "response_length/max")),
    ("seconds of a step", ("timing_s/step",)),
)


@dataclass(frozen=True)
class Panel:
    """Curves of one kind: metric to (step, value)."""

    name: str
    curves: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class RunHealth:
    """Panels that the run has numbers for, the names of those it has none for, steps with a recovery, and
    tokens of the responses kept last: those of a validation after step `lengths_step`.
    """

    panels: tuple[Panel, ...]
    missing: tuple[str, ...]
    recoveries: tuple[int, ...]
    lengths: tuple[int, ...]
    lengths_step: int


def read_health(folder: Path) -> RunHealth:
    """What the folder has of it; lines that a crash cut off are left out."""
    rows = {int(row["step"]): row for row in _lines(folder / METRICS) if "step" in row}
    panels, missing = [], []
    for name, keys in PANELS:
        curves = {key: _curve(rows, key) for key in keys}
        curves = {key: points for key, points in curves.items() if points}
        if curves:
            panels.append(Panel(name, curves))
        else:
            missing.append(name)
    lost = tuple(recovery.step for recovery in read_recoveries(folder))
    return RunHealth(tuple(panels), tuple(missing), lost, *_lengths(folder))


def _curve(rows: Mapping[int, Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    points = [(float(step), row[key]) for step, row in sorted(rows.items()) if key in row]
    return [(step, float(y)) for step, y in points if isinstance(y, int | float) and math.isfinite(y)]


def _lengths(folder: Path) -> tuple[tuple[int, ...], int]:
    """Of the last file of samples that has any."""
    files = sorted(
        (int(file.stem.removeprefix("step_")), file)
        for file in (folder / "samples").glob("step_*.jsonl")
        if file.stem.removeprefix("step_").isdigit()
    )
    for step, file in reversed(files):
        if found := tuple(int(row["response_tokens"]) for row in _lines(file) if "response_tokens" in row):
            return found, step
    return (), 0


def _lines(file: Path) -> list[dict[str, Any]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [row for row in rows if isinstance(row, dict)]
