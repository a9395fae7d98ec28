"""What can be known about supervised training before anything starts: files, model, placement, arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rolemesh.engine.data.files import DataError, columns_and_rows
from rolemesh.launch.check import absent_files, live_devices, local_devices, resume_from
from rolemesh.launch.check_report import CheckReport
from rolemesh.launch.checkpoints import Checkpoint, read_checkpoint
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.loggers import absent_loggers
from rolemesh.launch.plan import PLANNING_ERRORS
from rolemesh.launch.preflight import checkpoint_rows, machine_rows, stage_rows
from rolemesh.launch.supervised_schema import PairData, SftData, SupervisedRecipe
from rolemesh.launch.walltime import walltime_lines
from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.layout import Layout
from rolemesh.placement.plan import PlacementPlan, make_plan


def check_supervised(recipe: SupervisedRecipe) -> CheckReport:
    """Everything that is wrong with the recipe, as many problems as can be told at once; starts nothing."""
    report = CheckReport()
    report.problem("recipe", absent_loggers(recipe.run))
    report.problem("data", absent_files(recipe.data))
    steps, trained = 0, dict[str, int]()
    if "data" not in [row.area for row in report.rows]:
        try:
            steps = _check_examples(recipe, report)
        except DataError as error:
            report.problem("data", [str(error)])
    try:
        checkpoint = read_checkpoint(recipe.model.path)
        trained = {recipe.role: checkpoint.shape.n_params}
        report.problem("models", _model(recipe, checkpoint))
        report.plan = _plan(recipe, checkpoint, report)
        report.fine("placement", report.plan.summary())
        if recipe.head == "value" and checkpoint.shape.n_labels is None:
            said = f"{recipe.model.path} is a language model: its scalar head starts from zeros"
            report.note("models", [said])
    except RecipeError as error:
        report.problem("models", [f"model.path: {error}" if "no folder" in str(error) else str(error)])
    except PLANNING_ERRORS as error:
        report.problem("placement", [f"layout: {error}"])
    resume_from(recipe.run, report)
    report.fine("walltime", walltime_lines(recipe.run))
    machine_rows(recipe.run, report)
    if recipe.run.address is None:
        report.rows += stage_rows(recipe.run, [recipe.model.path])
    report.rows += checkpoint_rows(recipe.run, trained, steps, report.resume.path)
    return report


def _check_examples(recipe: SupervisedRecipe, report: CheckReport) -> int:
    """Updates of the run; 0 where the examples do not say. Raises DataError."""
    data, rows = recipe.data, 0
    for name in ("train_files", "val_files"):
        for path in getattr(data, name):
            columns, found = columns_and_rows(path)
            rows += found if name == "train_files" else 0
            if lacks := _lacks(data, columns):
                report.problem("data", [f"{path} has {', '.join(columns) or 'no rows'}, but no {lacks}"])
    if rows == 0:
        report.problem("data", ["data.train_files hold no examples"])
        return 0
    per_epoch = math.ceil(rows / recipe.batch.size)
    steps = recipe.run.epochs * per_epoch if recipe.run.steps is None else recipe.run.steps
    report.fine(
        "data",
        [
            f"data: {rows} examples / {recipe.batch.size} per update = {per_epoch} updates per epoch; "
            f"{steps} updates in all, less what is left out"
        ],
    )
    if recipe.optim.decay != "constant" and recipe.optim.warmup_steps >= steps:
        report.problem(
            "data",
            [
                f"optim.warmup_steps is {recipe.optim.warmup_steps}, but the run has {steps} updates: "
                f"the {recipe.optim.decay} decay would never begin"
            ],
        )
    return steps


def _lacks(data: object, columns: list[str]) -> str:
    """The columns that an example needs and this file lacks, with the keys that name them."""
    if isinstance(data, SftData) and data.messages_key not in columns:
        needed = {"prompt_key": data.prompt_key, "response_key": data.response_key}
    elif isinstance(data, PairData):
        needed = {"chosen_key": data.chosen_key, "rejected_key": data.rejected_key}
    else:
        needed = {}
    return " and ".join(
        f"{name} (see data.{key})" for key, name in needed.items() if name not in columns
    )  # fmt: skip


def _model(recipe: SupervisedRecipe, checkpoint: Checkpoint) -> Iterator[str]:
    shape = checkpoint.shape
    if recipe.head == "lm" and shape.n_labels is not None:
        yield f"model.path holds a classifier with {shape.n_labels} labels, not a language model"
    if recipe.head == "value" and shape.n_labels not in (None, 1):
        yield f"model.path has {shape.n_labels} labels, but a scalar head has 1"
    if checkpoint.tokens is None:
        yield f"model.path: {checkpoint.path} has no tokenizer (tokenizer.json or tokenizer.model)"
    elif checkpoint.n_tokens is not None and checkpoint.n_tokens > shape.vocab:
        yield f"model.path: the tokenizer has {checkpoint.n_tokens} tokens, the model embeds {shape.vocab}"
    if recipe.data.max_tokens > shape.max_positions:
        yield (
            f"data.max_tokens is {recipe.data.max_tokens}, but the model ends at {shape.max_positions} "
            "positions"
        )


def _plan(recipe: SupervisedRecipe, checkpoint: Checkpoint, report: CheckReport) -> PlacementPlan:
    """All devices for the one model."""
    pins: dict[str, Any] = recipe.layout.pins
    if recipe.run.address is not None:
        cluster = live_devices(recipe.run, recipe.cluster, report)
    else:
        kind, gpus = local_devices(recipe.run, recipe.cluster, offline=False)
        per_node = recipe.cluster.per_node or gpus or Layout(**pins).world
        cluster = ClusterSpec.uniform(
            1, per_node, device_kind=kind, device_type=recipe.cluster.device or ""
        )  # fmt: skip
    return plan_colocated(recipe, cluster, checkpoint)


def plan_colocated(
    recipe: SupervisedRecipe, cluster: ClusterSpec, checkpoint: Checkpoint | None = None
) -> PlacementPlan:
    """The one model on all devices of the cluster. Raises one of PLANNING_ERRORS."""
    shapes = {recipe.role: (checkpoint or read_checkpoint(recipe.model.path)).shape}
    layouts = {recipe.role: recipe.layout.pins}
    return make_plan("colocate", (recipe.role,), cluster, layouts=layouts, shapes=shapes)
