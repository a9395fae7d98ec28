"""`rolemesh launch`: a recipe checked, then handed to Slurm, Kubernetes or torchrun."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rolemesh.launch.config import load_recipe
from rolemesh.launch.environment import OF_LOGGERS, passage
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.reward_keys import scorers
from rolemesh.launch.schema import Recipe
from rolemesh.launch.site import Site, load_site
from rolemesh.launch.starts import Job, k8s_manifest, manifest_text, slurm_script, torchrun_command

_SUBMIT_S = 120.0
_NOT_INSTALLED = "is not installed"


@dataclass(frozen=True)
class Asked:
    """The command line of `rolemesh launch`. `nodes` 0: as many as the recipe says; `node_rank` None: every
    node's command is printed.
    """

    recipe: Path
    overrides: Sequence[str]
    nodes: int
    container: str | None = None
    dry_run: bool = False
    check: bool = True
    node_rank: int | None = None
    endpoint: str = ""
    run_id: str = ""


def launch(kind: str, asked: Asked, tell: Callable[[str], None]) -> int:
    """Check, fill in, start (nothing with `dry_run`, which prints what would be). The exit code.

    `tell` gets what is not the script itself. Raises RecipeError for what cannot start, and a missing tool.
    """
    if kind not in _STARTS:
        raise RecipeError(f"launch {kind}: there are {', '.join(_STARTS)}")
    site = load_site()
    recipe = _recipe(asked)
    asked = replace(asked, nodes=asked.nodes or recipe.cluster.nodes)
    if kind != "slurm" and recipe.run.requeue:
        raise RecipeError(f"run.requeue asks Slurm, and this is launch {kind}: leave it out")
    if kind != "slurm" and recipe.run.stop_before_walltime and recipe.run.walltime is None:
        raise RecipeError(f"run.stop_before_walltime: launch {kind} knows no end of it; give run.walltime")
    elsewhere = kind == "k8s" or bool(asked.container or site.container)
    if asked.check and (problems := preflight(recipe, asked, site, elsewhere=elsewhere, tell=tell)):
        raise RecipeError(f"{problems} of the check: nothing was started (--no-check starts all the same)")
    job = job_of(recipe, asked, site)
    for line in job.passage.lines([*job.sets, *recipe.run.env]):
        tell(line)
    return _STARTS[kind](job, asked, tell)


def _recipe(asked: Asked) -> Recipe:
    recipe = load_recipe(asked.recipe, asked.overrides)
    if recipe.run.address is not None:
        raise RecipeError("run.address: a launch starts a cluster of its own; leave it out")
    if asked.nodes and "cluster.nodes" in recipe.given and recipe.cluster.nodes != asked.nodes:
        raise RecipeError(
            f"cluster.nodes is {recipe.cluster.nodes}, --nodes says {asked.nodes}: leave one of them "
            f"out (cluster.nodes={asked.nodes} behind the recipe overrides it)"
        )
    return recipe


def _on_cpu(recipe: Recipe) -> bool:
    return "cpu" in (recipe.run.device, recipe.cluster.device)


def preflight(
    recipe: Recipe, asked: Asked, site: Site, *, elsewhere: bool, tell: Callable[[str], None]
) -> str:
    """`rolemesh check` for the nodes asked for, its table told; "2 problems", or empty where all is well.

    `elsewhere`: the run's packages are not this machine's, so that what is missing here is no problem.
    """
    try:
        from rolemesh.launch.check import check_recipe
        from rolemesh.launch.checkpoints import read_shapes
        from rolemesh.launch.preflight import checkpoint_rows, trained_numbers
    except ModuleNotFoundError as error:
        error.add_note("from a machine with the planner alone, launch with --no-check")
        raise

    settled = [f"cluster.nodes={asked.nodes}"]
    if not _on_cpu(recipe):
        settled += ["run.device=cuda"]
        settled += [] if recipe.cluster.per_node else [f"cluster.per_node={site.gpus_per_node}"]
    report = check_recipe(load_recipe(asked.recipe, [*asked.overrides, *settled]), offline=True)
    if elsewhere:
        report.rows = [
            replace(row, state="note") if row.state == "problem" and _NOT_INSTALLED in row.text else row
            for row in report.rows
        ]
    if report.plan is not None:
        used = {name for fitted in report.plan.nodes.values() for name, _ in fitted}
        if used and len(used) < asked.nodes:
            idle = asked.nodes - len(used)
            report.note(
                "placement", [f"{idle} of {asked.nodes} nodes stay idle: --nodes {len(used)} is enough"]
            )
    if not elsewhere:  # its disks are those of the nodes, or they share the run folder's
        shapes, _ = read_shapes(recipe)
        steps = recipe.run.steps or 0
        report.rows += checkpoint_rows(recipe.run, trained_numbers(recipe, shapes), steps, None)
    tell(report.text())
    n = len(report.problems)
    return f"{n} problem{'s' * (n > 1)}" if n else ""


def job_of(recipe: Recipe, asked: Asked, site: Site, environ: Mapping[str, str] = os.environ) -> Job:
    """What is to be started, of recipe, command line and site file."""
    more = [OF_LOGGERS[name] for name in recipe.run.loggers if name in OF_LOGGERS]
    on_cpu = _on_cpu(recipe)
    return Job(
        name=re.sub(r"[^a-z0-9]+", "-", f"rolemesh-{asked.recipe.stem.lower()}").strip("-")[:40].strip("-"),
        recipe=asked.recipe.absolute(),
        run_dir=Path(recipe.run.dir),
        overrides=[item for item in asked.overrides if not item.startswith("run.dir=")],
        nodes=asked.nodes,
        devices=recipe.cluster.per_node or (None if on_cpu else site.gpus_per_node),
        on_cpu=on_cpu,
        site=site,
        container=asked.container or site.container,
        passage=passage(environ, [*site.forward, *more, *_tokens(recipe)]),
        requeue=recipe.run.requeue,
    )


def _tokens(recipe: Recipe) -> Iterator[str]:
    """Variables that hold tokens of the recipe's services."""
    yield from (keys.token_env for _, keys, _ in scorers(recipe.reward) if keys.token_env)
    if recipe.has_ref and recipe.ref.token_env:
        yield recipe.ref.token_env


def _slurm(job: Job, asked: Asked, tell: Callable[[str], None]) -> int:
    script = slurm_script(job)
    if asked.dry_run:
        print(script, end="")
        return 0
    return _submitted(
        ["sbatch"], script, {n: v for n, v in os.environ.items() if n not in job.passage.blocked}
    )


def _k8s(job: Job, asked: Asked, tell: Callable[[str], None]) -> int:
    documents = k8s_manifest(job)
    if asked.dry_run:
        print(manifest_text(documents, shown=True), end="")
        return 0
    return _submitted(["kubectl", "apply", "-f", "-"], manifest_text(documents, shown=False), os.environ)


def _submitted(command: Sequence[str], text: str, environ: Mapping[str, str]) -> int:
    """Give `text` to a scheduler's command; its exit code. Raises RecipeError for one missing or silent."""
    tool = _tool(command[0])
    try:
        done = subprocess.run(
            [tool, *command[1:]], input=text, text=True, env=dict(environ), timeout=_SUBMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RecipeError(
            f"{command[0]} has not answered within {_SUBMIT_S:g} s: is its service up?"
        ) from error
    return done.returncode


def _torchrun(job: Job, asked: Asked, tell: Callable[[str], None]) -> int:
    if asked.nodes > 1 and not asked.endpoint:
        raise RecipeError("--endpoint is missing: HOST:PORT of node 0, the same on every node")
    if asked.nodes > 1 and asked.node_rank is None and not asked.dry_run:
        raise RecipeError(
            f"--node-rank is missing: which of the {asked.nodes} nodes is this one, from 0? (--dry-run "
            "prints the commands of all)"
        )
    if asked.node_rank is not None and not 0 <= asked.node_rank < asked.nodes:
        raise RecipeError(f"--node-rank {asked.node_rank}: the nodes are 0 to {asked.nodes - 1}")
    ranks = range(asked.nodes) if asked.node_rank is None else [asked.node_rank]
    endpoint, run_id = asked.endpoint or "127.0.0.1:29500", asked.run_id or job.name
    for rank in ranks:
        sets, command = torchrun_command(job, rank, endpoint, run_id)
        if asked.dry_run:
            print(" ".join([*(f"{n}={shlex.quote(v)}" for n, v in sets.items()), shlex.join(command)]))
            continue
        kept = {n: v for n, v in os.environ.items() if n not in job.passage.blocked}
        tool = _tool(command[0])
        sys.stdout.flush()
        os.execve(tool, command, {**kept, **sets})
    return 0


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise RecipeError(f"{name} is not on this machine's PATH: launch where it is, or use --dry-run")
    return found


_STARTS = {"slurm": _slurm, "torchrun": _torchrun, "k8s": _k8s}
