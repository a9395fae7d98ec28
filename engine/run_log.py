"""What a run leaves on disk while it goes: metrics, samples, timeline, exported models."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rolemesh.placement.timeline import TimelineFile


class RunLog:
    """The files of one run's folder, which exists."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        (self.path / "samples").mkdir(exist_ok=True)
        self.timeline = TimelineFile(self.path / "timeline.json")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step's metrics as a line of JSON; a value that is not finite is written as null."""
        row = {"step": step, **{k: v if math.isfinite(v) else None for k, v in sorted(metrics.items())}}
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def save_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write validation samples of one step, a line of JSON each."""
        lines = [json.dumps(row, ensure_ascii=False, default=str) for row in rows]
        (self.path / "samples" / f"step_{step}.jsonl").write_text("\n".join(lines) + "\n")

    def export_dir(self, step: int, role: str) -> str:
        """Where the model of `role` after `step` is exported in Hugging Face form."""
        return str(self.path / "export" / f"step_{step}" / role)
