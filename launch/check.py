"""What can be known about a run before anything starts: files, models, placement, batch arithmetic."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rolemesh.engine.data.files import DataError, columns_and_rows, data_files, rows_per_source
from rolemesh.engine.data.sources import check_weights
from rolemesh.launch.algorithm_rules import algorithm_notes
from rolemesh.launch.arithmetic import batch_lines, epoch_line, total_steps, updates
from rolemesh.launch.checkpoint_rules import Resume, find_checkpoint
from rolemesh.launch.checkpoints import Checkpoint, read_checkpoint
from rolemesh.launch.engine_check import engine_problems, judge_problems
from rolemesh.launch.fields import RecipeError, Section
from rolemesh.launch.live_cluster import live_cluster
from rolemesh.launch.loggers import absent_loggers
from rolemesh.launch.plan import PLANNING_ERRORS, expected_cluster, not_runnable, plan_on
from rolemesh.launch.reward_keys import Scorer, scorers
from rolemesh.launch.roles import Ref
from rolemesh.launch.schema import Cluster, Recipe, Run
from rolemesh.parallel.checkpoint_error import CheckpointError
from rolemesh.placement.cluster import ClusterSpec, DeviceKind
from rolemesh.placement.plan import PlacementPlan


@dataclass
class CheckReport:
    """Lines for the user; the run can start when there are no problems."""

    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    plan: PlacementPlan | None = None
    resume: Resume = field(default_factory=Resume)

    def text(self) -> str:
        said = [f"note: {note}" for note in self.notes] + [f"problem: {problem}" for problem in self.problems]
        verdict = f"{len(self.problems)} problems" if self.problems else "ok"
        return "\n".join([*self.lines, *said, verdict])


def _set_aside(recipe: Recipe) -> Iterator[str]:
    """One line per reason for which keys of the file count for nothing."""
    for reason in dict.fromkeys(recipe.set_aside.values()):
        keys = ", ".join(key for key, why in recipe.set_aside.items() if why == reason)
        yield f"{keys}: no effect here ({reason})"


def check_recipe(recipe: Recipe, *, offline: bool = False) -> CheckReport:
    """Everything that is wrong with the recipe, as many problems as can be told at once.

    `offline` leaves the live machine (or the Ray cluster at `run.address`) out: only what the recipe
    says about its cluster counts.
    """
    report = CheckReport(notes=[*_set_aside(recipe), *algorithm_notes(recipe)])
    report.problems += [*absent_files(recipe.data), *_reward_functions(recipe), *_services(recipe)]
    report.problems += absent_loggers(recipe.run)
    if not report.problems:
        _check_prompts(recipe, report)
    checkpoints = _read_models(recipe, report)
    judge = checkpoints.get("reward") if recipe.judge_is_placed else None
    alike = {role: one for role, one in checkpoints.items() if one is not judge}  # see the same tokens
    report.problems += [
        *_quantized(alike),
        *_heads(recipe, alike),
        *_lengths(recipe, alike),
        *_vocabularies(alike),
    ]
    if recipe.actor.router_loss and "actor" in checkpoints and checkpoints["actor"].shape.moe is None:
        report.problems.append("actor.router_loss: the actor is no mixture of experts: leave it out")
    try:
        report.plan = _plan(recipe, checkpoints, offline, report)
    except (RecipeError, *PLANNING_ERRORS) as error:
        report.problems.append(f"placement: {error}")
    if not offline:
        resume_from(recipe.run, report)
    if report.plan is not None:
        report.problems += not_runnable(report.plan)
        if "actor" in checkpoints:
            report.problems += engine_problems(recipe, report.plan, checkpoints["actor"].shape)
        if judge is not None:
            report.problems += judge_problems(recipe, report.plan, judge)
        report.notes += _nothing_overlaps(recipe, report.plan)
        report.lines += report.plan.summary()
        report.lines += batch_lines(recipe, report.plan)
    return report


def _nothing_overlaps(recipe: Recipe, plan: PlacementPlan) -> Iterator[str]:
    """Staleness that buys nothing."""
    pool = plan.pool_of("rollout")
    if recipe.schedule.staleness and "actor" in pool.roles:
        yield (
            f"schedule.staleness is {recipe.schedule.staleness}, but rollout and actor take turns on pool "
            f"{pool.name}: samples get older and hardly anything overlaps; give the rollout a pool of its own"
        )


def resume_from(run: Run, report: CheckReport) -> None:
    """Find the checkpoint to go on from, and say so."""
    try:
        report.resume = find_checkpoint(run)
        report.lines += report.resume.lines
    except CheckpointError as error:
        report.problems.append(f"run.resume: {error}")


def absent_files(data: Section) -> Iterator[str]:
    """What is wrong with the files that the data section names."""
    for name in ("train_files", "val_files"):
        for path in getattr(data, name):
            try:
                data_files(path)
            except DataError as error:
                yield f"data.{name}: {error}"


def _services(recipe: Recipe) -> Iterator[str]:
    """Tokens, tokenizers and templates that rewards and a remote reference name and that are not there."""
    sections: list[tuple[str, Scorer | Ref]] = [(name, keys) for name, keys, _ in scorers(recipe.reward)]
    if recipe.has_ref:
        sections.append(("ref", recipe.ref))
    for section, keys in sections:
        if keys.token_env is not None and not os.environ.get(keys.token_env):
            yield f"{section}.token_env: the environment variable {keys.token_env} is not set"
        if isinstance(keys, Scorer):
            folder, template = keys.text.tokenizer, keys.judge.template
            if folder is not None and not Path(folder).is_dir():
                yield f"{section}.text.tokenizer: no folder {folder}"
            if template is not None and not Path(template).is_file():
                yield f"{section}.judge.template: no file {template}"


def _reward_functions(recipe: Recipe) -> Iterator[str]:
    for section, keys, kind in scorers(recipe.reward):
        if kind == "function":
            yield from _function(f"{section}.path", str(keys.path))


def _function(key: str, reward: str) -> Iterator[str]:
    path, _, name = reward.rpartition(":")
    if not Path(path).is_file():
        yield f"{key}: no file {path}"
        return
    try:
        body = ast.parse(Path(path).read_text()).body
    except SyntaxError as error:
        yield f"{key}: {path} line {error.lineno}: {error.msg}"
        return
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    imported = [a.asname or a.name for node in body if isinstance(node, ast.ImportFrom) for a in node.names]
    if name not in functions + imported:
        yield f"{key}: {path} has no function {name} (it has {', '.join(functions) or 'none'})"


def _check_prompts(recipe: Recipe, report: CheckReport) -> None:
    counts = {}
    for name in ("train_files", "val_files"):
        counts[name] = 0
        for path in getattr(recipe.data, name):
            columns, rows = columns_and_rows(path)
            counts[name] += rows
            if recipe.data.prompt_key not in columns:
                report.problems.append(
                    f"data.prompt_key is {recipe.data.prompt_key}, but {path} has "
                    f"{', '.join(columns) or 'no rows'}"
                )
    if counts["train_files"] == 0:
        report.problems.append("data.train_files hold no prompts")
        return
    try:
        if recipe.data.weights:
            rows_of = rows_per_source(recipe.data.train_files)
            counts["train_files"] = check_weights(rows_of, recipe.data.weights)
        report.lines.append(epoch_line(recipe, counts["train_files"]))
        report.problems += _decays(recipe, updates(recipe, total_steps(recipe, counts["train_files"])))
    except DataError as error:
        report.problems.append(str(error))


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
            checkpoints[role] = read_checkpoint(getattr(recipe, role).path)
        except RecipeError as error:
            report.problems.append(f"{role}.path: {error}")
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


def _plan(
    recipe: Recipe, checkpoints: Mapping[str, Checkpoint], offline: bool, report: CheckReport
) -> PlacementPlan | None:
    shapes = {role: checkpoint.shape for role, checkpoint in checkpoints.items()}
    if recipe.run.address is not None and not offline:
        return plan_on(recipe, live_devices(recipe.run, recipe.cluster, report), shapes)
    if any(pool.where != type(pool.where)() for pool in recipe.placement.pools.values()):
        if not offline:
            raise RecipeError("`where` chooses among the nodes of a Ray cluster: set run.address")
        report.notes.append("placement: `where` is checked on the live cluster only")
        return None
    kind, gpus = local_devices(recipe.run, recipe.cluster, offline)
    cluster = expected_cluster(recipe, kind, shapes, gpus)
    plan = plan_on(recipe, cluster, shapes)
    report.notes += [f"node {name}: {count} of its devices stay unused" for name, count in plan.idle.items()]
    return plan


def live_devices(run: Run, expected: Cluster, report: CheckReport) -> ClusterSpec:
    """The Ray cluster at `run.address`; the report notes where it isn't the expected one."""
    cluster = live_cluster(str(run.address))
    if run.device not in ("auto", cluster.device_kind):
        raise RecipeError(
            f"run.device is {run.device}, but the cluster at {run.address} has {cluster.device_kind} devices"
        )
    wanted = expected.nodes * (expected.per_node or 0)
    if wanted and cluster.n_devices != wanted:
        report.notes.append(f"cluster says {wanted} devices, the live one has {cluster.n_devices}")
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
