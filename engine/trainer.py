"""The training loop: prompts in, one step graph after another, validation, exports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rolemesh.engine.algorithms import AdaptiveKLController, FixedKLController
from rolemesh.engine.async_steps import StepsInFlight
from rolemesh.engine.batch_ref import BatchRef
from rolemesh.engine.checkpoint.saver import Checkpoints
from rolemesh.engine.controller import Arguments, Controller, NoProgress, Progress, StepResult
from rolemesh.engine.partial import PartialRollout, PartialSpec
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.refill import Refill, RefillError, RefillSpec
from rolemesh.engine.run_log import RunLog
from rolemesh.engine.validation import extra_columns, sample_table, scores_of, validation_metrics
from rolemesh.engine.workers.advantage import AdvantageSpec
from rolemesh.engine.workers.mini_batches import MiniBatchPlan, plan_mini_batches
from rolemesh.placement.graph import StepGraph
from rolemesh.placement.layout import Layout

COMPARED = ("generate", "old_log_prob", "ref_log_prob")
"""What has to run before actor and reference can be compared."""
LOST = frozenset({"dropped", "baseline_dropped"})
"""Columns that tell which rows have no reward."""


class InitialKLError(RuntimeError):
    """The reference is not the checkpoint that the actor starts from; both are named."""


@dataclass(frozen=True)
class TrainerSpec:
    """How many steps, what each holds, and what happens between them (units in the recipe's keys).

    `order` is the plan's, see `Controller`. `refill` is for a graph that refills, `staleness` for one that
    does not: see `StepsInFlight`, and `partial` for one with a staleness of 0: see `PartialRollout`.
    `expect_initial_kl` is how far actor and reference may be apart before the first update. Without `export`
    no model is written at the end.
    """

    steps: int
    samples_per_prompt: int
    mini_batch_samples: int
    advantage: AdvantageSpec
    validate_every: int = 0
    save_every: int = 0
    best_metric: str | None = None
    critic_warmup: int = 0
    overlap: bool = True
    staleness: int = 0
    expect_initial_kl: float | None = None
    refill: RefillSpec | None = None
    partial: PartialSpec | None = None
    order: Mapping[str, Sequence[str]] = field(default_factory=dict)
    export: bool = True


@dataclass(frozen=True)
class Opened:
    """Of a step whose prompts were taken: where in the data the next ones are, and its epoch, if known."""

    place: dict[str, Any] | None
    epoch: Mapping[str, float] = field(default_factory=dict)


class Resumable(Protocol):
    """Something whose place is plain data."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


@dataclass
class Trainer:
    """Everything a run needs, put together: `groups[role]` are live worker groups whose models are loaded.

    `data_metrics` are reported with each step: how many prompts there are and were left out.
    `store` puts a batch into the object store and returns its handle; `fetch` brings a handle's batch to
    the driver. `loader` says where in the data `prompts` stand (None: a run that does not resume). `done`
    steps lie behind. `stopping` says whether someone asked the run to end early.
    """

    spec: TrainerSpec
    graph: StepGraph
    groups: Mapping[str, Any]
    prompts: Iterator[DataProto]
    val_prompts: DataProto | None
    tokenizer: PreTrainedTokenizerBase
    kl: FixedKLController | AdaptiveKLController
    store: Callable[[DataProto], BatchRef]
    fetch: Callable[[BatchRef], DataProto]
    log: RunLog
    progress: Progress = field(default_factory=NoProgress)
    on_step: Callable[[int, Mapping[str, float]], None] = lambda step, metrics: None
    loader: Resumable | None = None
    checkpoints: Checkpoints | None = None
    stopping: Callable[[], bool] = lambda: False
    data_metrics: Mapping[str, float] = field(default_factory=dict)
    done: int = 0
    flight: StepsInFlight | None = None
    partial: PartialRollout | None = None
    _opened: dict[int, Opened] = field(default_factory=dict)
    _restored: dict[Any, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.spec.staleness and self.graph.refill:
            raise ValueError(f"a step that refills ({', '.join(self.graph.refill)}) has a staleness of 0")
        if self.spec.staleness and self.flight is None:
            self.flight = StepsInFlight(self.graph, self.spec.staleness, self.spec.order)
        if self.spec.partial is not None:
            self.partial = PartialRollout(self.spec.partial, self.groups["rollout"], self.store, self.fetch)

    def fit(self) -> int:
        """Train until `spec.steps` steps are done: validates before and after, exports the actor at the end.

        Returns the steps done: fewer when `stopping` said so; the last one is saved then, and nothing
        exported.
        """
        self._run(self.graph.select(["sync_weights"]), BatchRef({}, 0), self.done)
        if self.done == 0:
            self._report(0, self.validate(0))
        for step in range(self.done + 1, self.spec.steps + 1):
            metrics = self.step(step)
            last = step == self.spec.steps
            if last or _due(step, self.spec.validate_every):
                metrics |= self.validate(step)
            self.done = step
            stop = self.stopping() and not last
            self._save(metrics, last=last, stop=stop)
            self._report(step, metrics)
            if stop:
                return step
        self._settle()
        if self.spec.export and not Path(self.log.export_dir(self.spec.steps, "actor")).exists():
            self.export(self.spec.steps)
        return self.spec.steps

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from the trainer's part of a checkpoint; the workers have theirs.

        Samples in it, of steps after its own, are trained on as they are where this run makes such.
        """
        if isinstance(self.kl, AdaptiveKLController):
            self.kl = replace(self.kl, value=state["kl"])
        if self.loader is not None:
            self.loader.load_state_dict(state["data"])
        self.done = state["step"]
        self._restored = dict(state.get("ahead", {}))
        if self.partial is not None:
            self.partial.restore(self._restored)

    def _save(self, metrics: dict[str, float], *, last: bool, stop: bool) -> None:
        """Save the step that was done where one is due; wait for the files where the run ends.

        Raises CheckpointError for a save that failed at the end, or again and again.
        """
        if self.checkpoints is None:
            return
        state = {"kl": self.kl.value, "data": self._opened.pop(self.done, Opened(self._place())).place}
        score = metrics.get(self.spec.best_metric) if self.spec.best_metric else None
        seconds = self.checkpoints.end_step(
            self.done, state, score, every=self.spec.save_every, last=last, stop=stop, ahead=self._ahead
        )
        if seconds is not None:
            metrics["timing_s/save_checkpoint"] = seconds

    def step(self, step: int) -> dict[str, float]:
        """One step of the algorithm on the next prompts; returns its metrics."""
        start = time.perf_counter()
        if self.flight is not None:
            epoch, result = self._flown_run(self.flight, step)
        else:
            epoch, graph = self._epoch(), self._graph(step)
            if graph.refill:
                result = self._refilled_run(graph, step)
            elif self.partial is not None:
                result = self._partial_run(self.partial, graph, step)
            else:
                result = self._checked_run(graph, self.store(self.next_batch(step)), step)
        metrics = result.metrics
        if LOST & set(result.batch.columns):
            kept = self._kept_rows(result.batch)
            n_kept = len(kept)
            metrics |= {
                "training/dropped_rows": result.batch.n_rows - n_kept,
                "training/skipped_steps": float(n_kept == 0),
            }
        else:
            n_kept = result.batch.n_rows
            kept = list(range(n_kept))
        if "index" in result.batch.columns:
            prompts = self.fetch(result.batch.select(["index"])).non_tensor_batch["index"][kept]
            self.log.trained(step, list(dict.fromkeys(prompts.tolist())), n_kept)
        if "actor/reward_kl_penalty" in metrics:
            self.kl = self.kl.update(current_kl=metrics["actor/reward_kl_penalty"], n_steps=n_kept)
        seconds = time.perf_counter() - start
        tokens = sum(result.batch.tokens or ())
        metrics |= {f"timing_s/{name}": value for name, value in result.timing_s.items()}
        return metrics | {
            **epoch,
            "timing_s/step": seconds,
            "training/global_step": step,
            "training/rows": result.batch.n_rows,
            "perf/total_num_tokens": tokens,
            "perf/throughput": tokens / seconds,
        }

    def next_batch(self, step: int, first: int = 0) -> DataProto:
        """The next prompts, each repeated `samples_per_prompt` times under one `uid`; `first` samples of this
        step are there already.

        `row_ids` number the samples of the whole run: with the seed they decide what is drawn.
        """
        prompts, n = next(self.prompts), self.spec.samples_per_prompt
        uids = [str(first // n + i) for i in range(len(prompts))]
        prompts.non_tensor_batch["uid"] = np.array(uids, dtype=object)
        batch = prompts.repeat(n, interleave=True)
        batch.batch["row_ids"] = torch.arange(first, first + len(batch)) + (step << 32)
        return batch

    def validate(self, step: int) -> dict[str, float]:
        """Greedy answers to the held-out prompts, scored by the run's reward; the run folder keeps them."""
        if self.val_prompts is None:
            return {}
        self._settle()
        if self.flight is not None and not self.flight.transfers_after(step):
            self._run(self.graph.select(self.flight.transfers), BatchRef({}, 0), step)
        graph = self.graph.select(["generate", "reward"])
        prompts = self.val_prompts
        prompts.non_tensor_batch["uid"] = np.array([str(i) for i in range(len(prompts))], dtype=object)
        result = self._run(graph, self.store(prompts), step, greedy=True)
        data = self.fetch(result.batch)
        extras = extra_columns(data, prompts)
        self.log.save_samples(step, sample_table(data, self.tokenizer, extras))
        return validation_metrics(data, extras)

    def export(self, step: int) -> None:
        """Write the actor as a Hugging Face folder."""
        self.groups["actor"].save_hf(self.log.export_dir(step, "actor"))

    def _graph(self, step: int) -> StepGraph:
        """The step's graph: at first only the critic may learn; the rollout may keep its weights."""
        if step <= self.spec.critic_warmup:
            left_out = frozenset({"update_actor", "sync_weights"})
        elif self.flight is not None and not self.flight.transfers_after(step):
            left_out = self.flight.transfers
        else:
            return self.graph
        return self.graph.select(op.name for op in self.graph.operations if op.name not in left_out)

    def _flown_run(self, flight: StepsInFlight, step: int) -> tuple[Mapping[str, float], StepResult]:
        """Train a step while the next ones are generated; its prompts' epoch, and its result."""
        for later in range(step, min(flight.last_with(step), self.spec.steps) + 1):
            if later not in flight.runs:
                self._open(flight, later)
        result = flight.train(step)
        self.log.spans(flight.new_spans())
        return self._opened[step].epoch, result

    def _open(self, flight: StepsInFlight, step: int) -> None:
        """Let a step be generated, unless a checkpoint had its samples."""
        epoch, graph, prompts = self._epoch(), self._graph(step), self.next_batch(step)
        self._opened[step] = Opened(self._place(), epoch)
        made = self._restored.pop(step, None)
        if made is not None and self._usable(made, prompts, step - 1 - flight.staleness):
            samples = DataProto.from_dict({**prompts.batch, **made}, prompts.non_tensor_batch)
            batch = self.store(samples)
            graph = graph.select(op.name for op in graph.operations if op.kind != "generate")
        else:
            batch = self.store(prompts)
        before = StepResult(batch)
        if self._compares(graph, step):
            before, graph = self._compared(graph, batch, step)
        run = flight.open(
            step,
            self._controller(graph),
            before.batch,
            self._arguments(graph, step),
            self._groups(graph, before.batch),
        )
        run.result.metrics |= before.metrics
        run.result.timing_s |= before.timing_s

    def _usable(self, made: Mapping[str, torch.Tensor], prompts: DataProto, oldest: int) -> bool:
        """Whether samples are of these prompts, by weights no older than those after step `oldest`."""
        versions = made["weight_versions"][made["response_mask"].bool()]
        return torch.equal(made["prompts"], prompts.batch["input_ids"]) and bool(
            (versions >= self._version(oldest)).all()
        )

    def _settle(self) -> None:
        """Wait until no samples are being generated: the rollout is free."""
        if self.flight is not None:
            self.flight.settle()
            self.log.spans(self.flight.new_spans())

    def _ahead(self) -> Mapping[Any, Mapping[str, Any]]:
        """The samples of the steps that are not trained yet, by step, or those that are begun."""
        if self.partial is not None:
            return self.partial.state()
        if self.flight is None:
            return {}
        self._settle()
        made = {step: self.fetch(ref).batch for step, ref in self.flight.generated().items()}
        return {step: {name: x.clone() for name, x in batch.items()} for step, batch in made.items()}

    def _place(self) -> dict[str, Any] | None:
        """Where in the data the next prompts are."""
        return None if self.loader is None else dict(self.loader.state_dict())

    def _epoch(self) -> dict[str, float]:
        return {} if self.loader is None else {"training/epoch": float(self.loader.state_dict()["epoch"])}

    def _checked_run(self, graph: StepGraph, batch: BatchRef, step: int) -> StepResult:
        """Run a step; the first one stops where actor and reference are further apart than expected, before
        anything is updated.
        """
        if not self._compares(graph, step):
            return self._run(graph, batch, step)
        before, rest = self._compared(graph, batch, step)
        return joined(before, self._run(rest, before.batch, step))

    def _compares(self, graph: StepGraph, step: int) -> bool:
        names = {operation.name for operation in graph.operations}
        return self.spec.expect_initial_kl is not None and step == 1 and "ref_log_prob" in names

    def _compared(self, graph: StepGraph, batch: BatchRef, step: int) -> tuple[StepResult, StepGraph]:
        """Run what compares actor and reference; its result, and what is left of the step."""
        names = {operation.name for operation in graph.operations}
        before = self._run(graph.select(names & set(COMPARED)), batch, step)
        assert self.spec.expect_initial_kl is not None
        self._check_initial_kl(before.batch, self.spec.expect_initial_kl)
        return before, graph.select(names - set(COMPARED))

    def _partial_run(self, partial: PartialRollout, graph: StepGraph, step: int) -> StepResult:
        """Run a step on the samples that are finished first; the last step waits for all that are begun."""
        self.progress.start("generate")
        made = partial.generate(self.next_batch(step), step, wait=step == self.spec.steps)
        self.progress.end("generate")
        self.log.spans(made.spans)
        generated = StepResult(made.batch, made.metrics, {"generate": made.seconds}, made.spans)
        rest = graph.select(op.name for op in graph.operations if op.name != "generate")
        return joined(generated, self._checked_run(rest, made.batch, step))

    def _refilled_run(self, graph: StepGraph, step: int) -> StepResult:
        """Run a step whose first operations go on until enough prompts have samples of unequal scores; where
        they never do, nothing of the rest runs.

        Raises RefillError where such a step stops the run.
        """
        assert self.spec.refill is not None
        refill, made = Refill(self.spec.refill), StepResult(BatchRef({}, 0))
        while not (refill.full or refill.exhausted):
            batch = self.store(self.next_batch(step, refill.n_rows))
            made = joined(made, self._run(graph.select(graph.refill), batch, step))
            data = self.fetch(made.batch.select({"uid", "rm_scores", *LOST} & set(made.batch.columns)))
            lost = data.batch["dropped"].tolist() if "dropped" in data.batch else ()
            refill.add(made.batch, data.non_tensor_batch["uid"].tolist(), scores_of(data), lost)
        made.metrics |= refill.metrics()
        if not refill.full:
            if self.spec.refill.at_limit == "stop":
                raise RefillError(f"step {step}: {refill.shortfall()}")
            self.progress.write(f"step {step} is left out: {refill.shortfall()}")
            skipped = made.metrics | {"training/skipped_steps": 1.0}
            return StepResult(BatchRef({}, 0), skipped, made.timing_s, made.spans)
        rest = graph.select(op.name for op in graph.operations if op.name not in graph.refill)
        return joined(made, self._checked_run(rest, refill.batch(), step))

    def _check_initial_kl(self, batch: BatchRef, limit: float) -> None:
        """Raise InitialKLError unless the mean log ratio over response tokens is within `limit` of 0."""
        data = self.fetch(batch.select(["old_log_probs", "ref_log_prob", "response_mask"])).batch
        ratio = (data["old_log_probs"] - data["ref_log_prob"]).double()[data["response_mask"].bool()]
        if len(ratio) and not abs(initial_kl := ratio.mean().item()) <= limit:
            actor, ref = (self.groups[role].checkpoint()[0] for role in ("actor", "ref"))
            raise InitialKLError(
                f"before the first update the KL between actor and reference is {initial_kl:.4g} nats per "
                f"token, over {len(ratio)} tokens; ref.expect_initial_kl allows {limit:g}. The actor is "
                f"{actor}, the reference is {ref}: is one of them another checkpoint than was meant?"
            )

    def _run(
        self,
        graph: StepGraph,
        batch: BatchRef,
        step: int,
        *,
        greedy: bool = False,
    ) -> StepResult:
        arguments = self._arguments(graph, step, greedy=greedy)
        result = self._controller(graph).run(batch, arguments, step=step, groups=self._groups(graph, batch))
        self.log.spans(result.spans)
        return result

    def _controller(self, graph: StepGraph) -> Controller:
        return Controller(
            graph, self.groups, overlap=self.spec.overlap, order=self.spec.order, progress=self.progress
        )

    def _arguments(self, graph: StepGraph, step: int, *, greedy: bool = False) -> dict[str, Arguments]:
        """What the operations of a step are told besides their batches."""
        arguments: dict[str, Arguments] = {
            "generate": lambda _: {"greedy": greedy},
            "advantage": lambda ref: {
                "spec": self.spec.advantage,
                "kl_coef": self.kl.value,
                "dropped": self._dropped_groups(ref),
                "version": self._version(step - 1),
            },
            "update_actor": lambda ref: self._mini_batches(ref, self.groups["actor"].layout),
            "update_critic": lambda ref: self._mini_batches(ref, self.groups["critic"].layout),
        }
        loads = [operation.name for operation in graph.operations if operation.method == "load_weights"]
        return arguments | dict.fromkeys(loads, lambda _: {"version": self._version(step)})

    def _version(self, step: int) -> int:
        """Of the actor's weights after a step: in how many it has learnt."""
        return max(0, step - self.spec.critic_warmup)

    def _groups(self, graph: StepGraph, batch: BatchRef) -> list[str] | None:
        """The `uid` of each row, where an operation takes the samples of a prompt together."""
        if all(operation.takes != "groups" for operation in graph.operations):
            return None
        uids: list[str] = self.fetch(batch.select(["uid"])).non_tensor_batch["uid"].tolist()
        return uids

    def _mini_batches(self, batch: BatchRef, layout: Layout) -> dict[str, Any]:
        plan: MiniBatchPlan = plan_mini_batches(
            batch.tokens or (), self.spec.mini_batch_samples, layout.dp, self._kept_rows(batch)
        )
        return {"rows": plan.rows, "sizes": plan.sizes}

    def _dropped_groups(self, batch: BatchRef) -> frozenset[str]:
        """The `uid` of every prompt of whose answers the reward left one out: all of them go."""
        if not (lost := sorted(LOST & set(batch.columns))):
            return frozenset()
        data = self.fetch(batch.select([*lost, "uid"]))
        rows = torch.stack([data.batch[name] for name in lost]).any(dim=0)
        return frozenset(data.non_tensor_batch["uid"][rows.numpy()])

    def _kept_rows(self, batch: BatchRef) -> list[int]:
        """The rows that count in this step."""
        if not (dropped := self._dropped_groups(batch)):
            return list(range(batch.n_rows))
        uids = self.fetch(batch.select(["uid"])).non_tensor_batch["uid"]
        return [row for row, uid in enumerate(uids) if uid not in dropped]

    def _report(self, step: int, metrics: Mapping[str, float]) -> None:
        self.log.metrics(step, {**self.data_metrics, **metrics})
        self.on_step(step, metrics)


def joined(first: StepResult, then: StepResult) -> StepResult:
    """Two runs of one step: the batch of the second; seconds of operations that ran in both add up."""
    seconds = dict(first.timing_s)
    for name, value in then.timing_s.items():
        seconds[name] = seconds.get(name, 0.0) + value
    return StepResult(then.batch, first.metrics | then.metrics, seconds, [*first.spans, *then.spans])


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
