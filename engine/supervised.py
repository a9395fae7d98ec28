"""The loop of supervised training: an update per batch of examples, held-out figures, checkpoints, export."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolemesh.engine.at_step import at_step
from rolemesh.engine.batch_ref import BatchRef
from rolemesh.engine.checkpoint.saver import Checkpoints
from rolemesh.engine.controller import NoProgress, Progress
from rolemesh.engine.data.loader import PromptLoader
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.run_log import RunLog
from rolemesh.engine.workers.mini_batches import plan_mini_batches
from rolemesh.placement.timeline import Span

LOWER_IS_BETTER = ("val/loss",)


@dataclass(frozen=True)
class SupervisedSpec:
    """How many steps (updates), and what happens between them. `role` names the model in the run folder."""

    role: str
    steps: int
    validate_every: int = 0
    save_every: int = 0
    best_metric: str | None = None


@dataclass
class SupervisedTrainer:
    """Everything a run needs, put together: `group` is a live worker group whose model is loaded.

    Its workers have `update(batch, sizes)` and `evaluate(batch)`, which report the whole batch on every rank.
    `store` puts a batch into the object store. `stopping` says whether someone asked the run to end early.
    `run_metrics` are reported with each step.
    """

    spec: SupervisedSpec
    group: Any
    loader: PromptLoader
    val: DataProto | None
    store: Callable[[DataProto], BatchRef]
    log: RunLog
    progress: Progress = field(default_factory=NoProgress)
    on_step: Callable[[int, Mapping[str, float]], None] = lambda step, metrics: None
    checkpoints: Checkpoints | None = None
    stopping: Callable[[], bool] = lambda: False
    run_metrics: Mapping[str, float] = field(default_factory=dict)
    done: int = 0

    def fit(self) -> int:
        """Train until `spec.steps` steps are done: validates before and after, exports the model at the end.

        Returns the steps done: fewer when `stopping` said so; the last one is saved then, and nothing
        exported.
        """
        batches = self._batches()
        val = None if self.val is None else self.store(self.val)
        if self.done == 0:
            self._report(0, self._validate(val, 0))
        for step in range(self.done + 1, self.spec.steps + 1):
            metrics = self._step(next(batches), step)
            last = step == self.spec.steps
            if last or (self.spec.validate_every and step % self.spec.validate_every == 0):
                metrics |= self._validate(val, step)
            self.done = step
            stop = self.stopping() and not last
            self._save(metrics, last=last, stop=stop)
            self._report(step, metrics)
            if stop:
                return step
        if not Path(self.export_dir).exists():
            self.group.save_hf(self.export_dir)
        return self.spec.steps

    @property
    def export_dir(self) -> str:
        """Where the trained model goes in Hugging Face form."""
        return self.log.export_dir(self.spec.steps, self.spec.role)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from the trainer's part of a checkpoint; the workers have theirs."""
        self.loader.load_state_dict(state["data"])
        self.done = state["step"]

    def _batches(self) -> Iterator[DataProto]:
        while True:
            yield from self.loader

    def _step(self, batch: DataProto, step: int) -> dict[str, float]:
        """One update on one batch; its metrics."""
        start = time.perf_counter()
        ref = self.store(batch)
        tokens = ref.tokens or ()
        plan = plan_mini_batches(tokens, len(batch), self.group.layout.dp)
        metrics = self._call("update", ref, step, rows=plan.rows, sizes=plan.sizes)
        seconds = time.perf_counter() - start
        return metrics | {
            "timing_s/step": seconds,
            "training/global_step": step,
            "training/epoch": float(self.loader.state_dict()["epoch"]),
            "training/rows": len(batch),
            "perf/total_num_tokens": sum(tokens),
            "perf/throughput": sum(tokens) / seconds,
        }

    def _validate(self, val: BatchRef | None, step: int) -> dict[str, float]:
        return {} if val is None else self._call("evaluate", val, step)

    def _call(self, method: str, batch: BatchRef, step: int, **keywords: Any) -> dict[str, float]:
        """Run a method of the workers on the batch; its figures. The timeline gets what each rank did."""
        self.progress.start(method)
        with at_step(step):
            future = getattr(self.group, method)(batch, blocking=False, **keywords)
        metrics: dict[str, float] = dict(future.get()[0])
        self.progress.end(method)
        pool = self.group.resource_pool.name
        spans = [
            Span(
                method,
                self.spec.role,
                pool,
                span.rank,
                span.start_s,
                span.end_s,
                {"step": step, "bytes_fetched": span.nbytes_fetched, "kernels": list(span.kernels)},
            )
            for span in future.spans
        ]
        self.log.spans(spans)
        seconds = max(span.end_s for span in spans) - min(span.start_s for span in spans)
        return metrics | {f"timing_s/{method}": seconds}

    def _save(self, metrics: dict[str, float], *, last: bool, stop: bool) -> None:
        if self.checkpoints is None:
            return
        score = metrics.get(self.spec.best_metric) if self.spec.best_metric else None
        if score is not None and self.spec.best_metric in LOWER_IS_BETTER:
            score = -score
        seconds = self.checkpoints.end_step(
            self.done,
            {"data": dict(self.loader.state_dict())},
            score,
            every=self.spec.save_every,
            last=last,
            stop=stop,
        )
        if seconds is not None:
            metrics["timing_s/save_checkpoint"] = seconds

    def _report(self, step: int, metrics: Mapping[str, float]) -> None:
        self.log.metrics(step, {**self.run_metrics, **metrics})
        self.on_step(step, metrics)
