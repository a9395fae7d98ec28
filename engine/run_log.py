"""What a run leaves on disk while it goes: metrics, samples, timeline, exported models."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolemesh.engine.loggers import Loggers, RunInfo
from rolemesh.placement.timeline import TimelineFile

TRAINED_FILE = "trained.jsonl"


class RunLog:
    """The files of one run's folder, which exists; metrics and samples go to the loggers too.

    Without `loggers` the metrics are written as `metrics.jsonl`.
    """

    def __init__(self, path: str | Path, loggers: Loggers | None = None) -> None:
        self.path = Path(path)
        self.loggers = loggers or Loggers(["jsonl"], RunInfo(self.path))
        (self.path / "samples").mkdir(exist_ok=True)
        self.timeline = TimelineFile(self.path / "timeline.json")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give one step's metrics to the loggers."""
        self.loggers.metrics(step, metrics)

    def trained(self, step: int, prompts: Sequence[int], n_samples: int) -> None:
        """Note what a step was trained on: the numbers of its prompts in the data, in order of their first
        sample. A full disk loses the line.
        """
        with contextlib.suppress(OSError), (self.path / TRAINED_FILE).open("a") as file:
            file.write(json.dumps({"step": step, "prompts": list(prompts), "samples": n_samples}) + "\n")

    def save_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write validation samples of one step, a line of JSON each."""
        rows = list(rows)
        lines = [json.dumps(row, ensure_ascii=False, default=str) for row in rows]
        (self.path / "samples" / f"step_{step}.jsonl").write_text("\n".join(lines) + "\n")
        self.loggers.samples(step, rows)

    def export_dir(self, step: int, role: str) -> str:
        """Where the model of `role` after `step` is exported in Hugging Face form."""
        return str(self.path / "export" / f"step_{step}" / role)
