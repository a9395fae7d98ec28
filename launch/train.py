"""`rolemesh train`: from a checked recipe to pools, worker groups and the training loop."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rolemesh.engine.batch_ref import BatchRef
from rolemesh.engine.checkpoint.manifest import Manifest
from rolemesh.engine.checkpoint.store import FOLDER, CheckpointStore
from rolemesh.engine.data.loader import PromptLoader
from rolemesh.engine.data.prompts import PromptDataset
from rolemesh.engine.data.sources import weighted
from rolemesh.engine.future import as_completed
from rolemesh.engine.loggers import Loggers
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.ray.blocks import fetch_batch, put_batch
from rolemesh.engine.ray.cluster import joined_cluster, local_cluster, read_cluster
from rolemesh.engine.ray.pools import ResourcePool, create_pools
from rolemesh.engine.ray.process_pool import ProcessPool
from rolemesh.engine.ray.recovery import Spared, lost_workers
from rolemesh.engine.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup
from rolemesh.engine.recovery import Recoveries, WorkersLost
from rolemesh.engine.run_log import RunLog
from rolemesh.engine.trainer import Trainer
from rolemesh.engine.user_file import UserClass
from rolemesh.engine.workers.actor import ActorWorker
from rolemesh.engine.workers.critic import CriticWorker
from rolemesh.engine.workers.judge import JudgeWorker
from rolemesh.engine.workers.reference import RefWorker
from rolemesh.engine.workers.remote_reference import RemoteRefWorker
from rolemesh.engine.workers.reward import RewardWorker
from rolemesh.engine.workers.rollout import RolloutWorker
from rolemesh.engine.workers.scorer import ScoreWorker
from rolemesh.engine.workers.vllm_rollout import VLLMRolloutWorker
from rolemesh.launch import assemble
from rolemesh.launch.attempts import checkpoints_of, take_up
from rolemesh.launch.checkpoints import read_shapes
from rolemesh.launch.config import to_yaml
from rolemesh.launch.loggers import run_info
from rolemesh.launch.plan import PLANNING_ERRORS, as_planned, plan_on_what_is_left
from rolemesh.launch.pricing import priced
from rolemesh.launch.progress import Progress
from rolemesh.launch.pulse import Pulse
from rolemesh.launch.recovery import Lost, Start, guarded, recoveries_of, until_done, workers
from rolemesh.launch.report import MEMORY_FILE
from rolemesh.launch.request import graph_of
from rolemesh.launch.run_folder import write_memory
from rolemesh.launch.schema import Recipe, Run
from rolemesh.launch.signals import EXIT_TERMINATED, stop_on_sigterm
from rolemesh.launch.staged import staged
from rolemesh.launch.walltime import EXIT_WALLTIME, Walltime, requeue
from rolemesh.placement.cluster import ClusterSpec, DeviceKind
from rolemesh.placement.plan import PlacementPlan

SHOWN = ("critic/score/mean", "val/reward/mean", "actor/pg_loss", "critic/vf_loss", "response_length/mean")


def _never(error: BaseException, groups: Mapping[str, Any]) -> None:
    """Workers that cannot be started again are not lost: the run is."""


@dataclass(frozen=True)
class Runtime:
    """What carries a run out: where its devices and worker groups come from, and where batches are kept.

    `lost` says which death of workers an error comes from, if any, and `live` what is there of the cluster
    then.
    """

    cluster: Callable[[Run, PlacementPlan], AbstractContextManager[ClusterSpec]]
    groups: Callable[..., AbstractContextManager[dict[str, Any]]]
    put: Callable[[DataProto, set[int]], BatchRef]
    fetch: Callable[[BatchRef], DataProto]
    lost: Lost = _never
    live: Callable[[DeviceKind], ClusterSpec] = read_cluster


def run_training(
    recipe: Recipe, checked: PlacementPlan, resume: Path | None = None, runtime: Runtime | None = None
) -> int:
    """Train as the recipe says, placed as in `checked`, the plan of its pre-flight check: on the nodes of
    the live cluster, or on a local one with as many devices; from the verified checkpoint `resume`, if any.

    The run folder exists. Returns the exit code: 0, EXIT_TERMINATED after a SIGTERM, or EXIT_WALLTIME where
    the job's time is over; whatever fails raises, after every process of the run is ended. Workers that are
    lost are started again, as often as the recipe says. Ray is the `runtime` unless another one is given.
    """
    with Pulse(Path(recipe.run.dir)) as pulse:
        return pulse.ended(_run_training(recipe, checked, resume, runtime, pulse))


def _run_training(
    recipe: Recipe, checked: PlacementPlan, resume: Path | None, runtime: Runtime | None, pulse: Pulse
) -> int:
    if runtime is None:
        groups = functools.partial(_worker_groups, Spared())
        runtime = Runtime(run_cluster, groups, put_batch, fetch_batch, lost_workers)
    tokenizer = AutoTokenizer.from_pretrained(recipe.actor.path, trust_remote_code=False)
    train, val = load_prompts(recipe, tokenizer)
    if recipe.smoke:
        train.rows.sort(key=lambda row: -len(row.token_ids))
    steps = recipe.run.steps
    steps = recipe.run.epochs * len(_loader(recipe, train)) if steps is None else steps
    done = 0 if resume is None else Manifest.read(resume).step
    with runtime.cluster(recipe.run, checked) as cluster:
        info = functools.partial(run_info, recipe.run, to_yaml(recipe), steps, done, SHOWN)
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
            training = _Training(
                recipe, steps, tokenizer, train, val, runtime, log, progress, stop, recoveries, pulse
            )
            training.place(checked.on(cluster), cluster)
            done = until_done(recipe.run, recoveries, progress, resume, training.attempt)
            if not recipe.smoke:
                progress.write(_ending(recipe, log, done, steps))
    return 0 if done == steps else ended_early(recipe.run, wall)


def stopping_by(asked: Callable[[], bool], wall: Walltime) -> Callable[[], bool]:
    """Whether a run is to stop after its step: someone asked, or the job's time is over. Both are asked."""
    return lambda: any([wall.due(), asked()])


def ended_early(run: Run, wall: Walltime) -> int:
    """The exit code of a run that stopped before its last step; Slurm starts the job again where it should.

    Raises RecipeError where Slurm refuses.
    """
    if not wall.reached:
        return EXIT_TERMINATED
    if run.requeue:
        print(requeue(), flush=True)
    return EXIT_WALLTIME


@dataclass
class _Training:
    """What all attempts of one run have in common; `planned` is the recipe with the settings of `plan`."""

    recipe: Recipe
    steps: int
    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset
    val: PromptDataset | None
    runtime: Runtime
    log: RunLog
    progress: Progress
    stopping: Callable[[], bool]
    recoveries: Recoveries
    pulse: Pulse
    plan: PlacementPlan = field(init=False)
    planned: Recipe = field(init=False)

    def place(self, plan: PlacementPlan, cluster: ClusterSpec) -> None:
        """Run on these pools from now on."""
        self.planned = as_planned(self.recipe, plan)
        self.plan, unknown = _predicted(self.planned, cluster, plan)
        self.log.aside("plan.yaml", lambda file: file.write_text(self.plan.to_yaml()))
        if unknown:
            self.progress.write(f"the plan has no prediction to compare this run with: {unknown}")

    def attempt(self, resume: Path | None) -> int:
        """Train with new workers, from a checkpoint if one is given; the steps done.

        Raises WorkersLost.
        """
        with workers(self._start(), self.recoveries, self._replanned) as groups:
            trainer = self._trainer(groups)
            with guarded(trainer, groups, self.runtime.lost), self.pulse.watching(groups):
                if resume is not None:
                    take_up(trainer, resume, self.progress)
                self.recoveries.restored(trainer.done)
                trainer.data_metrics = {**trainer.data_metrics, **self.recoveries.metrics()}
                done = trainer.fit()
                self.log.aside(MEMORY_FILE, lambda file: write_memory(file, groups.values()))
                return done

    def _start(self) -> Start:
        return functools.partial(self.runtime.groups, self.planned, self.plan, self.steps, self.progress)

    def _replanned(self) -> Start:
        """The workers of a plan for what is there now."""
        cluster = self.runtime.live(self.plan.pools[0].device_kind)
        plan = plan_on_what_is_left(self.recipe, cluster, read_shapes(self.recipe)[0])
        self.place(plan, cluster)
        self.recoveries.placed("; ".join(line.strip() for line in plan.summary()))
        return self._start()

    def _trainer(self, groups: Mapping[str, Any]) -> Trainer:
        recipe, val, runtime = self.planned, self.val, self.runtime
        loader = _loader(recipe, self.train)
        return Trainer(
            spec=assemble.trainer_spec(recipe, self.steps, self.plan.order),
            graph=graph_of(recipe),
            groups=groups,
            prompts=itertools.chain.from_iterable(itertools.repeat(loader)),
            val_prompts=None if val is None else _first(val, recipe.data.val_prompts),
            tokenizer=self.tokenizer,
            kl=assemble.kl_controller(recipe),
            store=lambda batch: runtime.put(batch, {group.layout.dp for group in groups.values()}),
            fetch=runtime.fetch,
            log=self.log,
            progress=self.progress,
            on_step=lambda step, _: count_step(self.progress, step),
            loader=loader,
            checkpoints=checkpoints_of(
                recipe.run, groups, assemble.trained_roles(recipe), self.plan, self.progress
            ),
            stopping=self.stopping,
            data_metrics=self.train.metrics("train") | (val.metrics("val") if val else {}),
        )


def _loader(recipe: Recipe, train: PromptDataset) -> PromptLoader:
    return PromptLoader(
        train,
        recipe.batch.prompts,
        seed=recipe.run.seed,
        shuffle=recipe.data.shuffle,
        sources=weighted(train.sources(), recipe.data.weights),
    )


def _ending(recipe: Recipe, log: RunLog, done: int, steps: int) -> str:
    """Where the model is, or how to go on and get one."""
    checkpoints = Path(recipe.run.dir) / FOLDER
    best = CheckpointStore(checkpoints, keep_best=1).best() if recipe.run.keep_best else None
    lines = [f"best checkpoint: step {best[0]}, {recipe.run.best_metric} {best[1]:.4g}"] if best else []
    saved = [path for path in checkpoints.glob("step_*") if path.name == f"step_{done}"]
    command = f"rolemesh convert {saved[0] if saved else checkpoints.parent} OUT"
    if done == steps:
        lines.append(f"actor exported to {log.export_dir(steps, 'actor')} (a Hugging Face folder)")
        lines += [f"as Hugging Face folder, any checkpoint: {command}"] if saved else []
    else:
        lines.append(f"stopped after step {done} of {steps}; go on with: rolemesh train RECIPE --resume auto")
        lines += [f"its model as a Hugging Face folder: {command}"] if saved else []
    return "\n".join(lines)


def _predicted(recipe: Recipe, cluster: ClusterSpec, plan: PlacementPlan) -> tuple[PlacementPlan, str]:
    """The plan with what each operation should take, for the report; or as it is, and why that is unknown."""
    try:
        return priced(recipe, cluster, plan, read_shapes(recipe)[0])
    except PLANNING_ERRORS as error:
        return plan, str(error)


def load_prompts(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> tuple[PromptDataset, PromptDataset | None]:
    """Training prompts, and the held-out ones (None without `data.val_files`). Raises DataError."""

    def read(files: tuple[str, ...]) -> PromptDataset:
        data = recipe.data
        return PromptDataset(
            files,
            tokenizer,
            prompt_key=data.prompt_key,
            max_prompt_tokens=data.max_prompt_tokens,
            overlong=data.overlong,
        )

    return read(recipe.data.train_files), read(recipe.data.val_files) if recipe.data.val_files else None


def _first(prompts: PromptDataset, n: int | None) -> DataProto:
    """The first `n` prompts (None: all) as one batch."""
    return prompts.collate(range(min(len(prompts), n or len(prompts))))


def count_step(progress: Progress, step: int) -> None:
    """A step is done; step 0 is the look at the model before the first one."""
    if step == 0:
        progress.begin_steps()
    else:
        progress.end_step()


@contextlib.contextmanager
def run_cluster(run: Run, checked: PlacementPlan) -> Iterator[ClusterSpec]:
    """The cluster at `run.address`, or our own with the plan's devices; with the run's variables."""
    kind = checked.pools[0].device_kind
    with _environment(run.env):
        if run.address is not None:
            with joined_cluster(run.address, device_kind=kind, env=run.env) as cluster:
                yield cluster
            return
        slots = checked.n_devices + sum(checked.idle.values()) if kind == "cpu" else 0
        with local_cluster(slots, device_kind=kind, temp_dir=run.temp_dir) as cluster:
            yield cluster


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value is not None else {})


@contextlib.contextmanager
def _worker_groups(
    spared: Spared,
    recipe: Recipe,
    plan: PlacementPlan,
    steps: int,
    progress: Progress,
    wait_s: float | None = None,
) -> Iterator[dict[str, RayWorkerGroup]]:
    """Every role's worker group with its model loaded; their processes are ended with the block, but for
    those that a loss of others spares: `spared` has them until the next start.

    `wait_s`: as long as devices are missing that were there before.
    """
    recipe = staged(recipe, plan.pools[0].device_kind, progress)
    kept = spared.take()
    old = {group.resource_pool.name: group.resource_pool for group in kept.values()}
    common: dict[str, Any] = {
        "collective_timeout_s": recipe.run.timeout_s,
        "fetch_timeout_s": recipe.run.timeout_s,
        "silent_s": recipe.run.silent_s,
        "logs": str(Path(recipe.run.dir).absolute() / "logs"),
    }
    pools = {
        pool.name: old.get(pool.name)
        or ResourcePool(
            pool.process_on_nodes,
            name_prefix=pool.name,
            device=pool.device_kind,
            where=pool.where,
            **common,
        )
        for pool in plan.pools
    }
    unplaced = [role for role in graph_of(recipe).roles() if role not in plan.roles]
    beside = {
        role: old.get(f"{role}_process") or ProcessPool(f"{role}_process", **common) for role in unplaced
    }
    ending = [*pools.values(), *beside.values()]
    if old:
        progress.write(f"recovery: the processes of {', '.join(sorted(old))} stay as they are")
    try:
        progress.start("start workers")
        patience: dict[str, Any] = {} if wait_s is None else {"wait_s": wait_s, "patient": True}
        new = [pool for pool in pools.values() if pool.name not in old]
        held = [pool for pool in pools.values() if pool.name in old]
        create_pools(new, report=progress.write, beside=held, **patience)
        starting = ThreadPoolExecutor(len(pools))  # not joined: the shutdown below ends a start that hangs
        list(starting.map(ResourcePool.hosts, pools.values()))
        for process in beside.values():
            process.dp_sizes = next(iter(pools.values())).dp_sizes  # its results are cut for their consumers
        progress.end("start workers")
        groups = {
            role: kept.get(role)
            or RayWorkerGroup(
                pools[plan.pool_of(role).name],
                worker_of(recipe, plan, role, steps),
                layout=plan.layout_of(role),
                role=role,
                timeout_s=recipe.run.timeout_s,
            )
            for role in plan.roles
        }
        for role, process in beside.items():
            groups[role] = kept.get(role) or RayWorkerGroup(
                process, worker_of(recipe, plan, role, steps), role=role, timeout_s=recipe.run.timeout_s
            )
        progress.start("load models")
        loading = [group.init_model(blocking=False) for role, group in groups.items() if role not in kept]
        for future in as_completed(loading, timeout=max(future.timeout_s for future in loading)):
            future.get()
        progress.end("load models")
        yield groups
    except WorkersLost:
        learning = {plan.pool_of(role).name for role in assemble.trained_roles(recipe)}
        for pool in spared.keep(ending, groups, learning):
            ending.remove(pool)
        raise
    finally:
        for pool in ending:
            pool.shutdown()


def worker_of(recipe: Recipe, plan: PlacementPlan, role: str, steps: int) -> RayClassWithInitArgs:
    """The worker class of a role, the user's where there is one, and what its constructor takes.

    Raises UserFileError for a class that is not there, or is no worker of this role.
    """
    made = _own_worker(recipe, plan, role, steps)
    if (path := getattr(recipe, role).worker) is None:
        return made
    return RayClassWithInitArgs(UserClass(path, f"{role}.worker", made.cls), *made.args, **made.kwargs)


def _own_worker(recipe: Recipe, plan: PlacementPlan, role: str, steps: int) -> RayClassWithInitArgs:
    if role == "rollout" and recipe.rollout.engine == "vllm":
        return RayClassWithInitArgs(VLLMRolloutWorker, assemble.vllm_spec(recipe, plan))
    if role == "rollout":
        return RayClassWithInitArgs(RolloutWorker, assemble.rollout_spec(recipe))
    if role == "reward" and recipe.judge_is_placed:
        return RayClassWithInitArgs(JudgeWorker, assemble.judge_spec(recipe, plan))
    if role == "reward" and recipe.reward.kind != "model":
        return RayClassWithInitArgs(ScoreWorker, assemble.scorer(recipe), tokenizer=recipe.actor.path)
    if role == "ref" and recipe.ref.kind == "remote":
        return RayClassWithInitArgs(RemoteRefWorker, assemble.remote_ref_spec(recipe))
    spec = assemble.role_spec(recipe, role, steps)
    if role == "actor":
        return RayClassWithInitArgs(ActorWorker, spec, assemble.policy_loss(recipe))
    if role == "critic":
        return RayClassWithInitArgs(CriticWorker, spec, assemble.value_loss(recipe))
    return RayClassWithInitArgs({"ref": RefWorker, "reward": RewardWorker}[role], spec)
