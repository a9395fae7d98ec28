"""Metrics as lines of JSON in the run folder."""

import json
import math
from collections.abc import Mapping

from rolemesh.engine.loggers.base import Logger


class JsonLines(Logger):
    """`metrics.jsonl`: a line per step; a value that is not finite is written as null."""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step, **{k: v if math.isfinite(v) else None for k, v in sorted(metrics.items())}}
        with (self.run.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
