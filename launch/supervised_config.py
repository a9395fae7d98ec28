"""YAML and dotted overrides to a checked recipe of `rolemesh sft` or `rolemesh train-rm`, and back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rolemesh.launch.checkpoint_rules import (
    check_checkpoints,
    check_walltime,
    useless_checkpoint_keys,
    useless_recovery_keys,
    useless_walltime_keys,
)
from rolemesh.launch.config import build, covers, read_tree, written_out
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.loggers import useless_logger_keys
from rolemesh.launch.suggest import leaves
from rolemesh.launch.supervised_schema import RmRecipe, SupervisedRecipe

R = TypeVar("R", bound=SupervisedRecipe)


def load_supervised(kind: type[R], path: str | Path, overrides: Sequence[str] = ()) -> R:
    """Read a recipe file and apply overrides, with the rules of `load_recipe`. Raises RecipeError."""
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"no recipe at {path}: give the path of a YAML file")
    return parse_supervised(kind, path.read_text(), path.absolute().parent, overrides, source=str(path))


def parse_supervised(
    kind: type[R], text: str, folder: Path, overrides: Sequence[str] = (), source: str = "recipe.yaml"
) -> R:
    """`load_supervised` for text that stands in `folder`."""
    tree = read_tree(kind, text, folder, overrides)
    recipe = build(kind, tree)
    folder_name = recipe.run.dir or os.path.abspath(Path("runs") / Path(source).stem)
    recipe = replace(
        recipe, run=replace(recipe.run, dir=folder_name), source=source, given=frozenset(leaves(tree))
    )
    for name, reason in useless_keys(recipe).items():
        if written := sorted(key for key in recipe.given if covers(name, key)):
            raise RecipeError(f"{written[0]} would have no effect: {reason}; leave it out")
    check_checkpoints(recipe.run, recipe.data.val_files)
    check_walltime(recipe.run)
    if recipe.run.best_metric == "val/accuracy" and not isinstance(recipe, RmRecipe):
        raise RecipeError("run.best_metric is val/accuracy, which pairs have (train-rm): use val/loss")
    return recipe


def useless_keys(recipe: SupervisedRecipe) -> dict[str, str]:
    """Dotted keys that count for nothing in this recipe, with the reason."""
    run = recipe.run
    useless = (useless_checkpoint_keys, useless_recovery_keys, useless_walltime_keys, useless_logger_keys)
    idle = dict(pair for rule in useless for pair in rule(run))
    if recipe.run.steps is not None:
        idle["run.epochs"] = f"run.steps fixes the length at {recipe.run.steps} steps"
    if recipe.run.address is not None:
        idle["run.temp_dir"] = "run.address joins a running Ray cluster, which has its own"
    if not recipe.data.val_files:
        idle |= dict.fromkeys(("data.val_rows", "run.validate_every"), "data.val_files is empty")
    if recipe.optim.decay == "constant":
        idle["optim.min_lr"] = "optim.decay is constant"
    return idle


def supervised_yaml(recipe: SupervisedRecipe) -> str:
    """The recipe as YAML with its constant defaults written out: loading it gives an equal recipe."""
    return written_out(recipe, recipe.given, useless_keys(recipe))
