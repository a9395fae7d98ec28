"""`rolemesh sft` and `rolemesh train-rm`: from a checked recipe to a worker group and the supervised loop."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from rolemesh.engine.checkpoint.manifest import Manifest
from rolemesh.engine.checkpoint.saver import TrainedRole
from rolemesh.engine.data.loader import PromptLoader
from rolemesh.engine.data.supervised import Encoder, PairDataset, SftDataset, SupervisedDataset
from rolemesh.engine.loggers import Loggers
from rolemesh.engine.ray.blocks import put_batch
from rolemesh.engine.ray.cluster import read_cluster
from rolemesh.engine.ray.pools import ResourcePool, create_pools
from rolemesh.engine.ray.recovery import lost_workers
from rolemesh.engine.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup
from rolemesh.engine.recovery import Recoveries
from rolemesh.engine.run_log import RunLog
from rolemesh.engine.supervised import SupervisedSpec, SupervisedTrainer
from rolemesh.engine.workers.megatron import RoleSpec
from rolemesh.engine.workers.pairs import PairsWorker
from rolemesh.engine.workers.sft import SftWorker
from rolemesh.launch.assemble import end_tokens, optim_config
from rolemesh.launch.attempts import checkpoints_of, take_up
from rolemesh.launch.loggers import run_info
from rolemesh.launch.progress import Progress
from rolemesh.launch.pulse import Pulse
from rolemesh.launch.recovery import Start, guarded, recoveries_of, until_done, workers
from rolemesh.launch.report import MEMORY_FILE
from rolemesh.launch.run_folder import write_memory
from rolemesh.launch.signals import stop_on_sigterm
from rolemesh.launch.staged import stage_on_nodes
from rolemesh.launch.supervised_check import plan_colocated
from rolemesh.launch.supervised_config import supervised_yaml
from rolemesh.launch.supervised_schema import PairData, SftData, SupervisedRecipe
from rolemesh.launch.train import count_step, ended_early, run_cluster, stopping_by
from rolemesh.launch.walltime import Walltime
from rolemesh.placement.plan import PlacementPlan

SHOWN = ("train/loss", "train/accuracy", "val/loss", "val/accuracy", "train/lr", "perf/throughput")


def run_supervised(recipe: SupervisedRecipe, checked: PlacementPlan, resume: Path | None = None) -> int:
    """Train as the recipe says, placed as in `checked`; from the verified checkpoint `resume`, if any.

    The run folder exists. Returns the exit code, as `run_training`; whatever fails raises, after every
    process of the run is ended.
    """
    with Pulse(Path(recipe.run.dir)) as pulse:
        return pulse.ended(_run_supervised(recipe, checked, resume, pulse))


def _run_supervised(
    recipe: SupervisedRecipe, checked: PlacementPlan, resume: Path | None, pulse: Pulse
) -> int:
    train, val = load_examples(recipe)
    steps = recipe.run.steps
    steps = recipe.run.epochs * len(_loader(recipe, train)) if steps is None else steps
    done = 0 if resume is None else Manifest.read(resume).step
    with run_cluster(recipe.run, checked) as cluster:
        info = functools.partial(run_info, recipe.run, supervised_yaml(recipe), steps, done, SHOWN)
        with (
            Progress(steps) as progress,
            Loggers(recipe.run.loggers, info(progress.write)) as loggers,
            stop_on_sigterm(progress.write, progress.stepping) as stopping,
        ):
            pulse.progress = progress
            log = RunLog(recipe.run.dir, loggers, progress.write)
            progress.write(f"train: {train.describe()}")
            recoveries = recoveries_of(recipe.run, progress)
            wall = Walltime.of(recipe.run, progress.write)
            stop = stopping_by(stopping, wall)
            training = _Training(recipe, steps, train, val, log, progress, stop, recoveries, pulse)
            training.place(checked.on(cluster))
            done = until_done(recipe.run, recoveries, progress, resume, training.attempt)
            progress.write(_ending(recipe, log, done, steps))
    return 0 if done == steps else ended_early(recipe.run, wall)


@dataclass
class _Training:
    """What all attempts of one run have in common."""

    recipe: SupervisedRecipe
    steps: int
    train: SupervisedDataset
    val: SupervisedDataset | None
    log: RunLog
    progress: Progress
    stopping: Callable[[], bool]
    recoveries: Recoveries
    pulse: Pulse
    plan: PlacementPlan = field(init=False)

    def place(self, plan: PlacementPlan) -> None:
        """Run on this pool from now on."""
        self.plan = plan
        self.log.aside("plan.yaml", lambda file: file.write_text(plan.to_yaml()))

    def attempt(self, resume: Path | None) -> int:
        """Train with new workers, from a checkpoint if one is given; the steps done. Raises WorkersLost."""
        with workers(self._start(), self.recoveries, self._replanned) as group:
            trainer, groups = self._trainer(group), {self.recipe.role: group}
            with guarded(trainer, groups, lost_workers), self.pulse.watching(groups):
                if resume is not None:
                    take_up(trainer, resume, self.progress)
                self.recoveries.restored(trainer.done)
                trainer.run_metrics = self.recoveries.metrics()
                done = trainer.fit()
                self.log.aside(MEMORY_FILE, lambda file: write_memory(file, [group]))
                return done

    def _start(self) -> Start:
        return functools.partial(_worker_group, self.recipe, self.plan, self.steps, self.progress)

    def _replanned(self) -> Start:
        """The workers of a plan for what is there now."""
        self.place(plan_colocated(self.recipe, read_cluster(self.plan.pools[0].device_kind)))
        self.recoveries.placed("; ".join(line.strip() for line in self.plan.summary()))
        return self._start()

    def _trainer(self, group: RayWorkerGroup) -> SupervisedTrainer:
        recipe, val = self.recipe, self.val
        role, model = recipe.role, recipe.model
        trained = {role: TrainedRole(model.path, recipe.head, model.dtype)}
        return SupervisedTrainer(
            spec=SupervisedSpec(
                role=role,
                steps=self.steps,
                validate_every=recipe.run.validate_every,
                save_every=recipe.run.save_every,
                best_metric=recipe.run.best_metric if recipe.run.keep_best else None,
            ),
            group=group,
            loader=_loader(recipe, self.train),
            val=None if val is None else val.collate(range(_val_rows(recipe, val))),
            store=lambda batch: put_batch(batch, {group.layout.dp}),
            log=self.log,
            progress=self.progress,
            on_step=lambda step, _: count_step(self.progress, step),
            checkpoints=checkpoints_of(recipe.run, {role: group}, trained, self.plan, self.progress),
            stopping=self.stopping,
        )


def _loader(recipe: SupervisedRecipe, train: SupervisedDataset) -> PromptLoader:
    return PromptLoader(train, recipe.batch.size, seed=recipe.run.seed, shuffle=recipe.data.shuffle)


def load_examples(recipe: SupervisedRecipe) -> tuple[SupervisedDataset, SupervisedDataset | None]:
    """Examples to learn from, and held-out ones (None without `data.val_files`). Raises DataError."""
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path, trust_remote_code=False)
    encoder = Encoder(tokenizer, end_tokens(recipe.model.path, tokenizer.eos_token_id))
    data = recipe.data
    if isinstance(data, SftData):
        kind: type[SupervisedDataset] = SftDataset
        names = {"prompt": data.prompt_key, "response": data.response_key, "messages": data.messages_key}
    else:
        assert isinstance(data, PairData)
        kind = PairDataset
        names = {"prompt": data.prompt_key, "chosen": data.chosen_key, "rejected": data.rejected_key}

    def read(files: tuple[str, ...]) -> SupervisedDataset:
        return kind(files, encoder, names, max_tokens=data.max_tokens, overlong=data.overlong)

    return read(data.train_files), read(data.val_files) if data.val_files else None


def _val_rows(recipe: SupervisedRecipe, val: SupervisedDataset) -> int:
    return min(len(val), recipe.data.val_rows or len(val))


def role_spec(recipe: SupervisedRecipe, steps: int) -> RoleSpec:
    """What the workers load, and how they train."""
    return RoleSpec(
        path=recipe.model.path,
        head=recipe.head,
        dtype=recipe.model.dtype,
        optim=optim_config(recipe.optim, steps),
        micro_batch_tokens=recipe.batch.micro_batch_tokens,
        new_head=recipe.head == "value",
        recompute=recipe.model.recompute,
    )


@contextlib.contextmanager
def _worker_group(
    recipe: SupervisedRecipe,
    plan: PlacementPlan,
    steps: int,
    progress: Progress,
    wait_s: float | None = None,
) -> Iterator[RayWorkerGroup]:
    """The model's worker group, loaded; its processes are ended with the block. `wait_s` as for `train`."""
    (spec,) = plan.pools
    limit_s, model = recipe.run.timeout_s, recipe.model
    if recipe.run.stage is not None:
        copies = stage_on_nodes([model.path], recipe.run, spec.device_kind, progress)
        recipe = replace(recipe, model=replace(model, path=copies[model.path]))
    pool = ResourcePool(
        spec.process_on_nodes,
        name_prefix=spec.name,
        device=spec.device_kind,
        where=spec.where,
        collective_timeout_s=limit_s,
        fetch_timeout_s=limit_s,
        silent_s=recipe.run.silent_s,
        logs=str(Path(recipe.run.dir).absolute() / "logs"),
    )
    worker = SftWorker if recipe.head == "lm" else PairsWorker
    try:
        progress.start("start workers")
        patience: dict[str, Any] = {} if wait_s is None else {"wait_s": wait_s, "patient": True}
        create_pools([pool], report=progress.write, **patience)
        group = RayWorkerGroup(
            pool,
            RayClassWithInitArgs(worker, role_spec(recipe, steps)),
            layout=plan.layout_of(recipe.role),
            role=recipe.role,
            timeout_s=limit_s,
        )
        progress.end("start workers")
        progress.start("load model")
        group.init_model()
        progress.end("load model")
        yield group
    finally:
        pool.shutdown()


def _ending(recipe: SupervisedRecipe, log: RunLog, done: int, steps: int) -> str:
    if done == steps:
        return f"{recipe.role} exported to {log.export_dir(steps, recipe.role)} (a Hugging Face folder)"
    return f"stopped after step {done} of {steps}; go on with: rolemesh {recipe.command} RECIPE --resume auto"
