"""The commands of docs/planning.md, run as they stand there."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_checkpoint
from typer.testing import CliRunner

from rolemesh.launch import plan_command
from rolemesh.launch.cli import main
from rolemesh.placement.plan import PlacementPlan

ROOT = Path(__file__).parents[1]


def commands() -> list[list[str]]:
    text = (ROOT / "docs" / "planning.md").read_text()
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The examples, and tiny models and prompts in the place of those that `make quickstart` makes."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "examples", folder / "examples")
    assets = folder / "runs" / "quickstart-assets"
    assets.mkdir(parents=True)
    tiny_checkpoint(assets / "actor")
    tiny_checkpoint(assets / "reward", head="score")
    for name in ("train", "val"):
        rows = [json.dumps({"prompt": f"{i}+1="}) for i in range(128)]
        (assets / f"{name}.jsonl").write_text("\n".join(rows))
    return folder


def run(arguments: list[str]) -> tuple[int, str]:
    done = CliRunner().invoke(main, arguments)
    return done.exit_code, done.output


@pytest.mark.full
def test_the_planning_guides_commands_run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for limit, seconds in (("_PRINTED_S", (0.3, 0.2)), ("_DRAWN_S", (0.5, 0.3)), ("_COUNTS_S", 0.5)):
        monkeypatch.setattr(plan_command, limit, seconds)  # what is compared has tests of its own
    said = {}
    for arguments in commands():
        if arguments[0] in ("plan", "import"):
            code, output = run(arguments)
            assert code == (arguments[1] == "diff"), output  # the two plans differ
            said[" ".join(arguments)] = output
    assert len(said) == 12
    assert "strategy" in said["plan diff runs/split.yaml runs/colocate.yaml"]
    assert PlacementPlan.from_yaml((folder / "runs" / "colocate.yaml").read_text()).strategy == "colocate"
    assert "# verl takes 32" in said["plan --from verl examples/imports/verl_ppo.yml trainer.nnodes=4"]
    assert "batch.mini_batch_samples" in said["import openrlhf examples/imports/openrlhf_ppo.sh"]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(580)
def test_train_runs_the_very_plan_that_was_written(folder, monkeypatch):
    monkeypatch.chdir(folder)
    recipe = "examples/quickstart.yaml"
    code, output = run(["plan", recipe, "placement.strategy=colocate", "--out", "runs/colocate.yaml"])
    assert code == 0, output
    (train,) = [arguments for arguments in commands() if arguments[0] == "train"]
    rolemesh = [sys.executable, "-c", "from rolemesh.launch.cli import main; main()"]
    done = subprocess.run([*rolemesh, *train, "run.steps=1"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    planned = PlacementPlan.from_yaml((folder / "runs" / "colocate.yaml").read_text())
    ran = PlacementPlan.from_yaml((folder / "runs" / "planned" / "plan.yaml").read_text())
    assert (ran.strategy, ran.layouts, ran.settings) == (planned.strategy, planned.layouts, planned.settings)
    assert list(ran.order.values()) == list(planned.order.values())
