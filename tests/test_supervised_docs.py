"""docs/supervised.md: its commands run as they stand there, on few steps; its recipe and keys are real."""

import importlib
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_docs import ROOT, blocks, commands, run

from rolemesh.launch.fields import declared, section_of
from rolemesh.launch.supervised_config import parse_supervised
from rolemesh.launch.supervised_schema import COMMANDS, SftRecipe

DOCUMENT = "docs/supervised.md"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_the_commands_run_and_each_takes_up_what_the_one_before_made(tmp_path):
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
    try:
        quickstart = importlib.import_module("make_assets")
    finally:
        sys.path.pop(0)
    sizes = {"policy_steps": 2, "reward_steps": 2, "n_train": 140, "n_val": 8, "n_answers": 70, "n_pairs": 70}
    settings = replace(quickstart.Settings(), **sizes)
    quickstart.make_assets(tmp_path / "runs" / "quickstart-assets", settings)
    listed = commands(DOCUMENT)
    assert [line.split()[1] for line in listed] == ["sft", "train-rm", "train"]
    for line in listed:
        steps = "run.steps=1" if " train " in line else "run.steps=2 run.epochs=null optim.warmup_steps=0"
        run(f"{line.replace('step_384', 'step_2')} {steps} run.validate_every=1", tmp_path)
    assert (tmp_path / "runs" / "quickstart" / "export" / "step_1" / "actor").is_dir()


def test_the_recipe_is_one():
    (text,) = blocks(DOCUMENT, "yaml sft")
    assert parse_supervised(SftRecipe, text, Path("/")).layout.tp == 4


def test_every_key_that_recipes_of_train_do_not_have_is_listed():
    text = (ROOT / DOCUMENT).read_text()
    listed = set(re.findall(r"^\| `(\w+\.\w+)`", text, re.M))
    keys = {key.path for kind in COMMANDS.values() for key in declared(kind) if not section_of(key.type)}
    assert listed == {key for key in keys if key.split(".")[0] in ("data", "model", "batch")}
