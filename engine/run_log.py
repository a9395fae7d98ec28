"""What a run leaves on disk while it goes: metrics, samples, timeline, exported models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolemesh.engine.loggers import Loggers, RunInfo
from rolemesh.placement.appending import append_whole
from rolemesh.placement.timeline import Span, TimelineFile

TRAINED_FILE = "trained.jsonl"


class RunLog:
    """The files of one run's folder, which exists; metrics and samples go to the loggers too.

    Without `loggers` the metrics are written as `metrics.jsonl`. What is written while the run goes on is
    only looked at: a full disk loses it and is told once (`tell`).
    """

    def __init__(
        self, path: str | Path, loggers: Loggers | None = None, tell: Callable[[str], None] = print
    ) -> None:
        self.path, self._tell, self._told = Path(path), tell, False
        self.loggers = loggers or Loggers(["jsonl"], RunInfo(self.path))
        (self.path / "samples").mkdir(exist_ok=True)
        self.timeline = TimelineFile(self.path / "timeline.json")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give one step's metrics to the loggers."""
        self.loggers.metrics(step, metrics)

    def trained(self, step: int, prompts: Sequence[int], n_samples: int) -> None:
        """Note what a step was trained on: the numbers of its prompts in the data, in order of their first
        sample.
        """
        line = json.dumps({"step": step, "prompts": list(prompts), "samples": n_samples}) + "\n"
        self.aside(TRAINED_FILE, lambda file: append_whole(file, line))

    def spans(self, spans: Sequence[Span]) -> None:
        """Add what ranks did to the timeline."""
        self.aside(self.timeline.path.name, lambda _: self.timeline.append(spans))

    def save_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write validation samples of one step, a line of JSON each."""
        rows = list(rows)
        lines = [json.dumps(row, ensure_ascii=False, default=str) for row in rows]
        self.aside(f"samples/step_{step}.jsonl", lambda file: file.write_text("\n".join(lines) + "\n"))
        self.loggers.samples(step, rows)

    def aside(self, name: str, write: Callable[[Path], object]) -> None:
        """Call `write(file)` for a file of the folder that nothing depends on."""
        try:
            write(self.path / name)
        except OSError as error:
            if not self._told:
                self._told = True
                self._tell(
                    f"warning: {self.path / name} could not be written ({error.strerror or error}). The run "
                    "goes on, its folder misses what finds no room; told once"
                )

    def export_dir(self, step: int, role: str) -> str:
        """Where the model of `role` after `step` is exported in Hugging Face form."""
        return str(self.path / "export" / f"step_{step}" / role)
