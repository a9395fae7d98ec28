"""A user's scoring function, in processes that can be killed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolemesh.engine.remote.forms import Sample
from rolemesh.engine.rewards.pool import ScorerPool
from rolemesh.launch.services.backend import Job, Kind, ServeError, UnfitError


class ScorerFile:
    """`path.py:function`, which is called as a recipe's `reward: {kind: function}` calls it.

    It gets the response's text, and of the label `ground_truth`, `data_source` and `extra_info` where it is a
    dict with `ground_truth`; any other label is itself the `ground_truth`.

    Args:
        limit_s: longest time of one call; the process of a call that takes longer is killed and replaced.
        default_score: of a sample whose call did not end in time or ended its process; None: it fails.
    """

    kind: Kind = "function"
    batch_tokens = 1  # every sample is a batch of its own: none waits for another's call

    def __init__(self, model: str, *, workers: int, limit_s: float, default_score: float | None) -> None:
        file, _, name = model.rpartition(":")
        self.model, self.file, self.lanes = model, Path(file), workers
        self.limit_s, self.default_score = limit_s, default_score
        if not self.file.is_file():
            raise ServeError(f"there is no file {file}")
        self.pools: list[ScorerPool] = []
        try:
            for _ in range(workers):
                self.pools.append(ScorerPool(self.file.resolve(), name, workers=1, limit_s=limit_s))
        except BaseException:
            self.close()
            raise

    def info(self) -> dict[str, Any]:
        revision = hashlib.sha256(self.file.read_bytes()).hexdigest()[:16]
        return {"model": self.model, "revision": revision, "vocab_size": None, "max_length": None}

    def jobs(self, request: Sequence[Sample]) -> list[Job]:
        return [Job(sample.id, 1, _arguments(sample)) for sample in request]

    def run(self, jobs: Sequence[Job], lane: int) -> list[Any]:
        """(score, extra) of each job, or the exception that fails it."""
        outcomes = self.pools[lane].map([job.work for job in jobs])
        return [self._result(job.id, outcome) for job, outcome in zip(jobs, outcomes, strict=True)]

    def close(self) -> None:
        for pool in self.pools:
            pool.close()

    def _result(self, sample_id: str, outcome: Any) -> Any:
        match outcome.kind:
            case "scored":
                score, extra = outcome.value
                if math.isfinite(score):
                    return score, extra
                return UnfitError(f"sample {sample_id}: {self.model} returned {score}")
            case "error":
                return UnfitError(f"sample {sample_id}: {self.model} failed:\n{outcome.value}")
            case kind:
                if self.default_score is not None:
                    return self.default_score, {"scorer_failed": 1}
                why = f"took more than {self.limit_s:g} s" if kind == "timeout" else "ended its process"
                return RuntimeError(f"sample {sample_id}: {self.model} {why}")


def _arguments(sample: Sample) -> dict[str, Any]:
    label = sample.label if isinstance(sample.label, dict) and "ground_truth" in sample.label else None
    truth = {"ground_truth": sample.label} if label is None else label
    return {
        "data_source": truth.get("data_source"),
        "solution_str": sample.response,
        "ground_truth": truth["ground_truth"],
        "extra_info": {**(truth.get("extra_info") or {}), "prompt_str": sample.prompt},
        "prompt_str": sample.prompt,
    }
