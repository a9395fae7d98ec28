"""Metrics as lines of JSON in the run folder."""

import json
import math
from collections.abc import Mapping

from rolemesh.engine.loggers.base import Logger
from rolemesh.placement.appending import append_whole


class JsonLines(Logger):
    """`metrics.jsonl`: a line per step; a value that is not finite is written as null."""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step, **{k: v if math.isfinite(v) else None for k, v in sorted(metrics.items())}}
        append_whole(self.run.folder / "metrics.jsonl", json.dumps(row) + "\n")
