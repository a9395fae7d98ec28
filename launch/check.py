"""What can be known about a run before anything starts: files, models, placement, batch arithmetic."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from rolemesh.engine.data.files import DataError, columns_and_rows, data_files, read_rows, rows_per_source
from rolemesh.engine.data.sources import check_weights
from rolemesh.engine.rewards.judge_template import JudgeError, JudgeTemplate
from rolemesh.launch.algorithm_rules import algorithm_notes
from rolemesh.launch.arithmetic import batch_lines, epoch_line, total_steps, updates
from rolemesh.launch.check_report import CheckReport
from rolemesh.launch.checkpoint_rules import find_checkpoint
from rolemesh.launch.checkpoints import Checkpoint, has_chat_template, needs_own_code, read_checkpoint
from rolemesh.launch.engine_check import engine_problems, judge_problems
from rolemesh.launch.fields import RecipeError, Section
from rolemesh.launch.live_cluster import live_cluster
from rolemesh.launch.loggers import absent_loggers
from rolemesh.launch.plan import PLANNING_ERRORS, expected_cluster, not_runnable, plan_on
from rolemesh.launch.preflight import live_rows
from rolemesh.launch.pricing import priced
from rolemesh.launch.request import graph_of
from rolemesh.launch.reward_keys import Scorer, scorers
from rolemesh.launch.roles import Ref
from rolemesh.launch.schema import Cluster, Recipe, Run
from rolemesh.launch.tokens import hide_tokens, token_notes, token_problems
from rolemesh.launch.walltime import walltime_lines
from rolemesh.parallel.checkpoint_error import CheckpointError
from rolemesh.placement.cluster import ClusterSpec, DeviceKind
from rolemesh.placement.memory.items import GIB
from rolemesh.placement.model import ModelShape
from rolemesh.placement.plan import PlacementPlan


def _set_aside(recipe: Recipe) -> Iterator[str]:
    """One line per reason for which keys of the file count for nothing."""
    for reason in dict.fromkeys(recipe.set_aside.values()):
        keys = ", ".join(key for key, why in recipe.set_aside.items() if why == reason)
        yield f"{keys}: no effect here ({reason})"


def check_recipe(recipe: Recipe, *, offline: bool = False) -> CheckReport:
    """Everything that is wrong with the recipe, as many problems as can be told at once.

    `offline` leaves the live machine (or the Ray cluster at `run.address`) out: only what the recipe
    says about its cluster counts. Tokens of services are hidden in all that is printed from now on.
    """
    hide_tokens(_with_tokens(recipe))
    report = CheckReport()
    report.note("recipe", [*_set_aside(recipe), *algorithm_notes(recipe)])
    report.problem("recipe", absent_loggers(recipe.run))
    report.problem("services", _services(recipe))
    report.note("services", token_notes(_with_tokens(recipe)))
    report.problem("reward", _reward_functions(recipe))
    report.problem("classes", _classes(recipe))
    report.problem("data", absent_files(recipe.data))
    steps = 0 if "data" in [row.area for row in report.rows] else _check_prompts(recipe, report)
    checkpoints = _read_models(recipe, report)
    judge = checkpoints.get("reward") if recipe.judge_is_placed else None
    alike = {role: one for role, one in checkpoints.items() if one is not judge}  # see the same tokens
    report.problem("models", [*_quantized(alike), *_heads(recipe, alike), *_lengths(recipe, alike)])
    report.problem("tokenizers", _vocabularies(alike))
    if recipe.actor.router_loss and "actor" in checkpoints and checkpoints["actor"].shape.moe is None:
        report.problem("models", ["actor.router_loss: the actor is no mixture of experts: leave it out"])
    shapes = {role: checkpoint.shape for role, checkpoint in checkpoints.items()}
    _check_placement(recipe, shapes, offline, report)
    if judge is not None and report.plan is not None:
        report.problem("engine", judge_problems(recipe, report.plan, judge))
    report.fine("walltime", walltime_lines(recipe.run))
    if not offline:
        resume_from(recipe.run, report)
        live_rows(recipe, shapes, report, steps)
    return report


def _check_placement(
    recipe: Recipe, shapes: Mapping[str, ModelShape], offline: bool, report: CheckReport
) -> None:
    """Where roles go, whether they fit into memory there, and how a step's batch is shared out."""
    try:
        placed = _placed(recipe, shapes, offline, report)
    except (RecipeError, *PLANNING_ERRORS) as error:
        report.problem("placement", [f"placement: {error}"])
        return
    if placed is None:
        return
    report.plan, cluster = placed
    report.problem("placement", not_runnable(report.plan))
    if "actor" in shapes:
        report.problem("engine", engine_problems(recipe, report.plan, shapes["actor"]))
    report.note("placement", _nothing_overlaps(recipe, report.plan))
    report.fine("placement", report.plan.summary())
    report.fine("batch", batch_lines(recipe, report.plan))
    try:
        report.fine("memory", _memory(recipe, cluster, report.plan, shapes))
    except PLANNING_ERRORS as error:
        report.problem("memory", [str(error)])


def _memory(
    recipe: Recipe, cluster: ClusterSpec, plan: PlacementPlan, shapes: Mapping[str, ModelShape]
) -> Iterator[str]:
    """The fullest device of each pool. Raises PlacementError where one is too small."""
    if plan.prediction.peak:  # the summary says it
        return
    told, unknown = priced(recipe, cluster, plan, shapes)
    if unknown:
        yield f"not predicted: {unknown}"
    for pool, peak in told.prediction.peak.items():
        limit = told.prediction.limit.get(pool)
        of = f" of {limit / GIB:.1f}" if limit else ""
        yield f"pool {pool}: {peak / GIB:.1f}{of} GiB at most on a device"


def _nothing_overlaps(recipe: Recipe, plan: PlacementPlan) -> Iterator[str]:
    """Staleness, or a reference that streams, that buys nothing."""
    pool = plan.pool_of("rollout")
    if recipe.has_ref and recipe.ref.stream and "ref" in pool.roles:
        yield (
            f"ref.stream is true, but rollout and ref take turns on pool {pool.name}: nothing overlaps; give "
            "the reference a pool of its own"
        )
    if recipe.schedule.staleness and "actor" in pool.roles:
        yield (
            f"schedule.staleness is {recipe.schedule.staleness}, but rollout and actor take turns on pool "
            f"{pool.name}: samples get older and hardly anything overlaps; give the rollout a pool of its own"
        )


def resume_from(run: Run, report: CheckReport) -> None:
    """Find the checkpoint to go on from, and say so."""
    try:
        report.resume = find_checkpoint(run)
        report.fine("checkpoint", report.resume.lines)
    except CheckpointError as error:
        report.problem("checkpoint", [f"run.resume: {error}"])


def absent_files(data: Section) -> Iterator[str]:
    """What is wrong with the files that the data section names."""
    for name in ("train_files", "val_files"):
        for path in getattr(data, name):
            try:
                data_files(path)
            except DataError as error:
                yield f"data.{name}: {error}"


def _with_tokens(recipe: Recipe) -> list[tuple[str, Scorer | Ref]]:
    """The sections that may name a token, by their dotted names."""
    sections: list[tuple[str, Scorer | Ref]] = [(name, keys) for name, keys, _ in scorers(recipe.reward)]
    return [*sections, ("ref", recipe.ref)] if recipe.has_ref else sections


def _services(recipe: Recipe) -> Iterator[str]:
    """Tokens, tokenizers and templates that rewards and a remote reference name and that are not there."""
    yield from token_problems(_with_tokens(recipe))
    for section, keys in _with_tokens(recipe):
        if isinstance(keys, Scorer):
            folder, template = keys.text.tokenizer, keys.judge.template
            if folder is not None and not Path(folder).is_dir():
                yield f"{section}.text.tokenizer: no folder {folder}"
            elif folder is not None and not has_chat_template(Path(folder)):
                yield f"{section}.text.tokenizer: {folder} has no chat template, which template: chat needs"
            if template is not None:
                try:
                    JudgeTemplate.load(template, pairs=keys.judge.form == "pairwise")
                except JudgeError as error:
                    yield f"{section}.judge.template: {error}"


def _reward_functions(recipe: Recipe) -> Iterator[str]:
    for section, keys, kind in scorers(recipe.reward):
        if kind == "function":
            yield from _named(f"{section}.path", str(keys.path), "function")


def _classes(recipe: Recipe) -> Iterator[str]:
    """The user's agent, and workers of roles."""
    if recipe.rollout.agent is not None:
        yield from _named("rollout.agent", recipe.rollout.agent, "class")
    for role in graph_of(recipe).roles():
        if (path := getattr(recipe, role).worker) is not None:
            yield from _named(f"{role}.worker", path, "class")


def _named(key: str, value: str, kind: Literal["function", "class"]) -> Iterator[str]:
    """What is wrong with `file.py:name`, told without running the file."""
    path, _, name = value.rpartition(":")
    if not path:
        yield f"{key} is {value!r}, but must name a file and a {kind} in it: file.py:name"
        return
    if not Path(path).is_file():
        yield f"{key}: no file {path}"
        return
    try:
        body = ast.parse(Path(path).read_text()).body
    except SyntaxError as error:
        yield f"{key}: {path} line {error.lineno}: {error.msg}"
        return
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    classes = [node.name for node in body if isinstance(node, ast.ClassDef)]
    there = classes if kind == "class" else functions
    imported = [a.asname or a.name for node in body if isinstance(node, ast.ImportFrom) for a in node.names]
    if name not in there + imported:
        yield f"{key}: {path} has no {kind} {name} (it has {', '.join(there) or 'none'})"


def _check_prompts(recipe: Recipe, report: CheckReport) -> int:
    """Steps of the run; 0 where the prompts do not say."""
    try:
        rows = {name: _rows(recipe, name, report) for name in ("train_files", "val_files")}
        if rows["train_files"] == 0:
            report.problem("data", ["data.train_files hold no prompts"])
            return 0
        if recipe.data.weights:
            rows_of = rows_per_source(recipe.data.train_files)
            rows["train_files"] = check_weights(rows_of, recipe.data.weights)
    except DataError as error:
        report.problem("data", [str(error)])
        return 0
    report.fine("data", [epoch_line(recipe, rows["train_files"])])
    steps = total_steps(recipe, rows["train_files"])
    report.problem("data", _decays(recipe, updates(recipe, steps)))
    return steps


def _rows(recipe: Recipe, name: str, report: CheckReport) -> int:
    """Prompts in the files of `data.<name>`; what is wrong with them is reported. Raises DataError."""
    n_rows, key = 0, recipe.data.prompt_key
    for path in getattr(recipe.data, name):
        columns, found = columns_and_rows(path)
        n_rows += found
        if key not in columns:
            there = ", ".join(columns) or "no rows"
            report.problem("data", [f"data.prompt_key is {key}, but {path} has {there}"])
        elif found:
            report.problem("data", _chat_prompts(recipe, path))
    return n_rows


def _chat_prompts(recipe: Recipe, path: str) -> Iterator[str]:
    """Chat messages (the first row says whether) need a tokenizer that can write them."""
    _, first = next(iter(read_rows(path, [recipe.data.prompt_key])))
    if isinstance(first.get(recipe.data.prompt_key), str) or not Path(recipe.actor.path).is_dir():
        return
    if not has_chat_template(Path(recipe.actor.path)):
        yield (
            f"{path}: its prompts are chat messages, but the actor's tokenizer ({recipe.actor.path}) has no "
            "chat template: take an instruction-tuned model, or prompts that are text"
        )


def _decays(recipe: Recipe, n_updates: int) -> Iterator[str]:
    for role in ("actor", "critic") if recipe.has_critic else ("actor",):
        optim = getattr(recipe, role).optim
        if optim.decay != "constant" and optim.warmup_steps >= n_updates:
            yield (
                f"{role}.optim.warmup_steps is {optim.warmup_steps}, but the run has {n_updates} updates: "
                f"the {optim.decay} decay would never begin"
            )


def _read_models(recipe: Recipe, report: CheckReport) -> dict[str, Checkpoint]:
    checkpoints: dict[str, Checkpoint] = {}
    for role in recipe.roles:
        if role == "rollout":
            continue
        try:
            checkpoints[role] = read_checkpoint(getattr(recipe, role).path, weights=not recipe.smoke)
        except RecipeError as error:
            report.problem("models", [f"{role}.path: {error}"])
    return checkpoints


def _quantized(checkpoints: Mapping[str, Checkpoint]) -> Iterator[str]:
    for role, checkpoint in checkpoints.items():
        if checkpoint.quantized:
            yield (
                f"{role}.path: {checkpoint.path} holds {checkpoint.quantized} weights; training and scoring "
                "need them in bfloat16 or float32: take a folder of the model in such a type, or convert it "
                "with its publisher's script"
            )


def _heads(recipe: Recipe, checkpoints: Mapping[str, Checkpoint]) -> Iterator[str]:
    labels = {role: checkpoint.shape.n_labels for role, checkpoint in checkpoints.items()}
    for role in ("actor", "ref"):
        if labels.get(role) is not None:
            yield f"{role}.path holds a classifier with {labels[role]} labels, not a language model"
    for role in ("critic", "reward"):
        if role in labels and labels[role] not in (None, 1):
            yield f"{role}.path has {labels[role]} labels, but a scalar head has 1"
    if labels.get("critic", 1) is None and not recipe.critic.new_head:
        yield "critic.path is a language model without a value head: set critic.new_head to train a fresh one"
    if labels.get("reward", 1) is None:
        yield "reward.path is a language model without a scalar head: its scores would be random"


def _lengths(recipe: Recipe, checkpoints: Mapping[str, Checkpoint]) -> Iterator[str]:
    longest = recipe.data.max_prompt_tokens + recipe.lengths.max_response_tokens
    for role, checkpoint in checkpoints.items():
        if longest > checkpoint.shape.max_positions:
            yield (
                f"{role}: data.max_prompt_tokens {recipe.data.max_prompt_tokens} + "
                f"lengths.max_response_tokens {recipe.lengths.max_response_tokens} = {longest} tokens, but "
                f"the model ends at {checkpoint.shape.max_positions} positions"
            )


def _vocabularies(checkpoints: Mapping[str, Checkpoint]) -> Iterator[str]:
    actor = checkpoints.get("actor")
    if actor is None:
        return
    if actor.tokens is None:
        yield f"actor.path: {actor.path} has no tokenizer (tokenizer.json or tokenizer.model)"
        return
    for path in dict.fromkeys(checkpoint.path for checkpoint in checkpoints.values()):
        if needs_own_code(Path(path)):
            yield (
                f"the tokenizer in {path} is Python code of its own, which is not run: save it as "
                "tokenizer.json (save_pretrained of a fast tokenizer) in a copy of the folder"
            )
    for role, checkpoint in checkpoints.items():
        if actor.n_tokens is not None and actor.n_tokens > checkpoint.shape.vocab:
            yield (
                f"{role}: the actor's tokenizer has {actor.n_tokens} tokens, but the model of {role} has "
                f"{checkpoint.shape.vocab} embeddings: it is not made for this tokenizer"
            )
        elif checkpoint.tokens is not None and checkpoint.tokens != actor.tokens:
            other = [t for t, i in actor.tokens.items() if checkpoint.tokens.get(t) != i] or list(
                checkpoint.tokens.keys() - actor.tokens.keys()
            )
            yield (
                f"{role}: its tokenizer isn't the actor's ({len(other)} tokens differ, as {other[0]!r}): "
                "other text than was written would be read; use a model with the actor's tokenizer"
            )


def _placed(
    recipe: Recipe, shapes: Mapping[str, ModelShape], offline: bool, report: CheckReport
) -> tuple[PlacementPlan, ClusterSpec] | None:
    """The plan and the cluster it is for; None where only a live cluster could tell."""
    if recipe.run.address is not None and not offline:
        cluster = live_devices(recipe.run, recipe.cluster, report)
        return plan_on(recipe, cluster, shapes), cluster
    if any(pool.where != type(pool.where)() for pool in recipe.placement.pools.values()):
        if not offline:
            raise RecipeError("`where` chooses among the nodes of a Ray cluster: set run.address")
        report.note("placement", ["placement: `where` is checked on the live cluster only"])
        return None
    kind, gpus = local_devices(recipe.run, recipe.cluster, offline)
    cluster = expected_cluster(recipe, kind, shapes, gpus)
    plan = plan_on(recipe, cluster, shapes)
    unused = [f"node {name}: {count} of its devices stay unused" for name, count in plan.idle.items()]
    report.note("placement", unused)
    return plan, cluster


def live_devices(run: Run, expected: Cluster, report: CheckReport) -> ClusterSpec:
    """The Ray cluster at `run.address`; the report notes where it isn't the expected one."""
    cluster = live_cluster(str(run.address), tell=lambda line: report.fine("placement", [line]))
    if run.device not in ("auto", cluster.device_kind):
        raise RecipeError(
            f"run.device is {run.device}, but the cluster at {run.address} has {cluster.device_kind} devices"
        )
    wanted = expected.nodes * (expected.per_node or 0)
    if wanted and cluster.n_devices != wanted:
        said = f"cluster says {wanted} devices, the live one has {cluster.n_devices}"
        report.note("placement", [said])
    return cluster


def local_devices(keys: Run, expected: Cluster, offline: bool) -> tuple[DeviceKind, int]:
    """Kind of device, and how many GPUs this machine has (0 when that doesn't count).

    Raises RecipeError for more than this machine has.
    """
    run, cluster = keys.device, expected.device
    if expected.nodes > 1 and not offline:
        raise RecipeError(
            f"cluster.nodes is {expected.nodes}, but without run.address a run has this machine alone: "
            "give the address of a Ray cluster, or `check --offline`"
        )
    if run != "auto" and cluster is not None and (run == "cpu") != (cluster == "cpu"):
        raise RecipeError(f"run.device is {run}, but cluster.device is {cluster}: leave one of them out")
    if "cpu" in (run, cluster):
        return "cpu", 0
    named = run == "cuda" or cluster is not None
    if offline:
        return ("cuda" if named else "cpu"), 0
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (gpus or named) and ((wanted := expected.per_node or gpus) > gpus or gpus == 0):
        raise RecipeError(f"{wanted or 'at least 1'} GPUs are wanted, torch sees {gpus} (`rolemesh doctor`)")
    return ("cuda" if gpus or named else "cpu"), gpus
