"""`torchrun ... -m rolemesh.launch.spmd RECIPE [KEY=VALUE]...`: the training of `rolemesh train` without Ray.

Every role is on all of torchrun's ranks. Rank 0 also drives: trainer, controller and data are there, and the
other ranks do what it calls.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from rolemesh.engine.loggers.secrets import hide
from rolemesh.engine.spmd.held import fetch_batch, put_batch
from rolemesh.engine.spmd.rank import World
from rolemesh.engine.spmd.worker_group import Everywhere, SpmdWorkerGroup
from rolemesh.launch.check import check_recipe, resume_from
from rolemesh.launch.cli import EXIT_BAD_RECIPE, EXIT_FAILED, EXIT_INTERRUPTED, describe_error
from rolemesh.launch.config import load_recipe
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.preflight import endpoint_rows
from rolemesh.launch.process import end_with
from rolemesh.launch.progress import Progress
from rolemesh.launch.rendezvous import LaunchError, LauncherWorld, own_address, use_interface_of
from rolemesh.launch.request import graph_of
from rolemesh.launch.run_folder import open_run_folder
from rolemesh.launch.run_lock import only_run_in
from rolemesh.launch.schema import Recipe, Run
from rolemesh.launch.torchrun import Meeting
from rolemesh.launch.train import Runtime, run_training, worker_of
from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.layout import Layout
from rolemesh.placement.plan import PlacementPlan

_STORE_S = 60.0
_END_S = 10.0  # for rank 0 to say how a run ended that broke off
_POLL_S = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; the same exit code on every rank."""
    parser = argparse.ArgumentParser("rolemesh.launch.spmd", description=__doc__)
    parser.add_argument("recipe", metavar="RECIPE")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*")
    given = parser.parse_args(arguments)
    try:
        launcher = LauncherWorld.take()
        meeting = Meeting(launcher, launcher.store(_STORE_S))
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    code = _lead(meeting, given.recipe, given.overrides) if launcher.rank == 0 else _follow(meeting)
    meeting.leave()
    return code


def _lead(meeting: Meeting, recipe: str, overrides: list[str]) -> int:
    code = EXIT_FAILED
    try:
        code = _train(meeting, recipe, overrides)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else EXIT_FAILED
    except Exception as error:
        print(hide(describe_error(error)), file=sys.stderr, flush=True)
        code = EXIT_BAD_RECIPE if isinstance(error, RecipeError) else EXIT_FAILED
    finally:
        meeting.tell("end", code)
    return code


def _train(meeting: Meeting, path: str, overrides: list[str]) -> int:
    launcher = meeting.world
    recipe = load_recipe(path, [*overrides, *_settled(load_recipe(path, overrides), launcher)])
    report = check_recipe(recipe, offline=True)
    resume_from(recipe.run, report)
    report.rows += endpoint_rows(recipe)
    print(report.text(), flush=True)
    if report.problems or report.plan is None:
        return EXIT_BAD_RECIPE
    with only_run_in(recipe.run.dir):
        if moved := open_run_folder(recipe, report.resume.path):
            print(f"an earlier run in {recipe.run.dir} was moved to {moved}", flush=True)
        return _run(meeting, recipe, report.plan, report.resume.path)


def _run(meeting: Meeting, recipe: Recipe, plan: PlacementPlan, resume: Path | None) -> int:
    """Train on all ranks with the checked plan."""
    launcher, kind = meeting.world, plan.pools[0].device_kind
    begin: dict[str, Any] = {"device": kind, "limit_s": recipe.run.timeout_s}
    meeting.tell("begin", begin)
    cluster = ClusterSpec.uniform(
        launcher.n_nodes,
        launcher.local_world_size,
        device_kind=kind,
        device_type=recipe.cluster.device or "",
    )
    with _world(launcher, **begin) as world:
        spmd = _Spmd(world, cluster)
        runtime = Runtime(spmd.cluster, spmd.groups, put_batch, fetch_batch)
        code = run_training(recipe, plan, resume, runtime)
        world.end()
    return code


def _settled(recipe: Recipe, launcher: LauncherWorld) -> list[str]:
    """Overrides: these ranks and their device. Raises RecipeError where the recipe says otherwise."""
    if recipe.run.address is not None:
        raise RecipeError("run.address: nothing here runs on Ray; leave it out")
    for name in ("stage", "env"):
        if getattr(recipe.run, name):
            raise RecipeError(f"run.{name} is carried out by Ray, on each node; leave it out here")
    if recipe.rollout.engine == "vllm":
        raise RecipeError(
            "rollout.engine vllm has processes of its own, which Ray starts: use engine hf here"
        )
    if recipe.judge_is_placed:
        raise RecipeError("reward.path: Ray starts a judge's engines: serve it and name its endpoints here")
    placement = recipe.placement
    if placement.strategy != "colocate":
        raise RecipeError(
            "placement: without Ray every role is on all ranks: say `placement: colocate` (this recipe has "
            f"{placement.strategy or ('a plan' if placement.plan else 'pools')})"
        )
    sizes = {"nodes": launcher.n_nodes, "per_node": launcher.local_world_size}
    for name, size in sizes.items():
        said = getattr(recipe.cluster, name)
        if f"cluster.{name}" in recipe.given and said != size:
            raise RecipeError(f"cluster.{name} is {said}, torchrun started {size}")
    on_cpu = "cpu" in (recipe.run.device, recipe.cluster.device) or not torch.cuda.is_available()
    if on_cpu and (recipe.run.device == "cuda" or recipe.cluster.device not in (None, "cpu")):
        raise RecipeError("the recipe asks for GPUs, torch sees none here")
    gpus = 0 if on_cpu else torch.cuda.device_count()
    if not on_cpu and gpus < launcher.local_world_size:
        raise RecipeError(f"torchrun started {launcher.local_world_size} ranks on a node with {gpus} GPUs")
    device = "cpu" if on_cpu else "cuda"
    return [f"run.device={device}", *(f"cluster.{name}={size}" for name, size in sizes.items())]


def _follow(meeting: Meeting) -> int:
    """Another rank: work for rank 0 until the run ends. A first SIGTERM, which is sent to every rank, is rank
    0's to act on: it stops after the step, with a checkpoint.
    """
    asked = 0

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, note)
    while (begin := meeting.told("begin")) is None:
        if (code := meeting.told("end")) is not None:
            return int(code)
        time.sleep(_POLL_S)
    try:
        with _world(meeting.world, **begin) as world:
            recipe, plan, steps = world.share_setup()
            for role in plan.roles:
                _create(world, recipe, plan, role, steps, plan.layout_of(role))
            world.follow()
    except Exception as error:
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline and isinstance(error, dist.DistBackendError | RuntimeError):
            if (code := meeting.told("end")) is not None:
                return int(code)  # rank 0 has said why
            time.sleep(_POLL_S)
        print(f"rank {meeting.world.rank}:\n{hide(traceback.format_exc())}", file=sys.stderr, flush=True)
        os._exit(EXIT_FAILED)  # its connections close, so nobody waits for it
    return meeting.wait_for_end()


@contextlib.contextmanager
def _world(launcher: LauncherWorld, device: str, limit_s: float) -> Iterator[World]:
    """torch.distributed over all ranks, and this rank's place in it."""
    use_interface_of(own_address(launcher.master_addr, launcher.n_nodes))
    threads = int(
        os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // launcher.local_world_size)
    )
    torch.set_num_threads(threads)
    if device == "cuda":
        torch.cuda.set_device(launcher.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=dist.PrefixStore("world", launcher.store(limit_s)),
        rank=launcher.rank,
        world_size=launcher.world_size,
        timeout=timedelta(seconds=limit_s),
    )
    try:
        yield World(
            dist.PrefixStore("calls", launcher.store(limit_s)),
            dist.PrefixStore("questions", launcher.store(limit_s)),
            node=socket.gethostname(),
            device=device,
            local_rank=launcher.local_rank,
            limit_s=limit_s,
            meets_at=(launcher.master_addr, launcher.master_port),
        )
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _create(
    world: World,
    recipe: Recipe,
    plan: PlacementPlan,
    role: str,
    steps: int,
    layout: Layout,
    device: str | None = None,
) -> Any:
    """This rank's worker of a role; its class."""
    made = worker_of(recipe, plan, role, steps)
    world.create(role, made.cls, made.args, made.kwargs, layout, device)
    return made.cls


class _Spmd:
    """What `Runtime` asks for, on rank 0."""

    def __init__(self, world: World, cluster: ClusterSpec) -> None:
        self.world, self._cluster = world, cluster

    @contextlib.contextmanager
    def cluster(self, run: Run, checked: PlacementPlan) -> Iterator[ClusterSpec]:
        yield self._cluster

    @contextlib.contextmanager
    def groups(
        self, recipe: Recipe, plan: PlacementPlan, steps: int, progress: Progress
    ) -> Iterator[dict[str, SpmdWorkerGroup]]:
        """Every role's worker group with its model loaded; roles without a model are on rank 0 alone."""
        world, pool, limit_s = self.world, Everywhere(), recipe.run.timeout_s
        unplaced = [role for role in graph_of(recipe).roles() if role not in plan.roles]
        layouts = {role: plan.layout_of(role) for role in plan.roles} | dict.fromkeys(unplaced, Layout())
        dp_sizes = sorted({1, *(layout.dp for layout in layouts.values())})
        progress.start("start workers")
        world.share_setup((recipe, plan, steps))
        groups = {}
        for role, layout in layouts.items():
            cls = _create(world, recipe, plan, role, steps, layout, "cpu" if role in unplaced else None)
            groups[role] = SpmdWorkerGroup(
                world, cls, layout=layout, role=role, pool=pool, dp_sizes=dp_sizes, timeout_s=limit_s
            )
        progress.end("start workers")
        progress.start("load models")
        for group in groups.values():
            group.init_model()
        progress.end("load models")
        yield groups


if __name__ == "__main__":
    end_with(main)
