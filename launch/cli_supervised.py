"""Commands of supervised training: `sft`, `train-rm`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rolemesh.launch.cli_options import RecipePath, ResumeFrom

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as layout.tp=2.")
]
CheckOnly = Annotated[bool, typer.Option("--check", help="Check the recipe only; start nothing.")]


def add_commands(main: typer.Typer) -> None:
    """Make them commands of `rolemesh`."""
    main.command("sft")(sft)
    main.command("train-rm")(train_rm)


def sft(
    recipe_path: RecipePath, overrides: Overrides = None, resume: ResumeFrom = "", check: CheckOnly = False
) -> int:
    """Fine-tune a model on prompts with answers."""
    return _run("sft", recipe_path, overrides or [], resume, check)


def train_rm(
    recipe_path: RecipePath, overrides: Overrides = None, resume: ResumeFrom = "", check: CheckOnly = False
) -> int:
    """Train a reward model on pairs of a better and a worse answer."""
    return _run("train-rm", recipe_path, overrides or [], resume, check)


def _run(command: str, recipe_path: Path, overrides: list[str], resume: str, check: bool) -> int:
    from rolemesh.launch.run_folder import make_run_folder
    from rolemesh.launch.run_lock import only_run_in
    from rolemesh.launch.supervised_check import check_supervised
    from rolemesh.launch.supervised_config import load_supervised, supervised_yaml
    from rolemesh.launch.supervised_schema import COMMANDS

    going_on = [f"run.resume={json.dumps(resume)}"] if resume else []
    recipe = load_supervised(COMMANDS[command], recipe_path, [*overrides, *going_on])
    report = check_supervised(recipe)
    print(report.text(), flush=True)
    if report.problems or report.plan is None:
        return 2
    if check:
        return 0
    from rolemesh.launch.supervised import run_supervised

    with only_run_in(recipe.run.dir):
        if moved := make_run_folder(Path(recipe.run.dir), supervised_yaml(recipe), report.resume.path):
            print(f"an earlier run in {recipe.run.dir} was moved to {moved}", flush=True)
        return run_supervised(recipe, report.plan, report.resume.path)
