"""The recipe's loggers: rules of their keys, whether they could log, and what they know of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rolemesh.engine.loggers import OFFLINE, RunInfo, logger_problems
from rolemesh.engine.loggers.secrets import hide, without_secrets
from rolemesh.launch.schema import Run


def useless_logger_keys(run: Run) -> Iterator[tuple[str, str]]:
    """Keys that count for nothing without a logger that sends metrics, with the reason."""
    if not set(OFFLINE) & set(run.loggers):
        for name in ("project", "name", "log_offline"):
            yield f"run.{name}", f"run.loggers has none of {', '.join(OFFLINE)}"


def absent_loggers(run: Run) -> Iterator[str]:
    """Why the recipe's loggers could not log on this machine."""
    for name in sorted({name for name in run.loggers if run.loggers.count(name) > 1}):
        yield f"run.loggers names {name} more than once"
    for problem in logger_problems(run.loggers, offline=run.log_offline):
        yield f"run.loggers: {problem}"


def run_info(
    run: Run, recipe: str, steps: int, done: int, shown: Sequence[str], write: Callable[[str], None]
) -> RunInfo:
    """What the loggers of a run are told; `recipe` is its text, `done` the steps of before a resume."""
    folder = Path(run.dir)
    config = dict(_leaves(without_secrets(yaml.safe_load(recipe) or {})))
    project, name = hide(run.project), hide(run.name or folder.name)
    return RunInfo(folder, project, name, config, steps, done, shown, run.log_offline, write)


def without_recipe_secrets(recipe: str) -> str:
    """The text of a recipe without secrets; those of the environment are read from there again."""
    tree = yaml.safe_load(recipe)
    kept = without_secrets(tree)
    return recipe if kept == tree else yaml.safe_dump(kept, sort_keys=False, width=100)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
