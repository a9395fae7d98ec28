"""docs/first-hour.md: its commands run as they stand there, and print the lines that it shows."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolemesh.launch.cli import main

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.full, pytest.mark.timeout(580)]
ON_A_LAPTOP = ("plan", "import")
STARTING = (("doctor", "check"), ("smoke",), ("launch",), ("train", "status", "report"))
FEW_STEPS = """
import dataclasses, pathlib, make_assets
few = {"policy_steps": 3, "reward_steps": 3, "n_answers": 256, "n_pairs": 256}
settings = dataclasses.replace(make_assets.Settings(), **few)
make_assets.make_assets(pathlib.Path("runs/quickstart-assets"), settings)
"""  # the page's run is about its commands, not about what the models can do


def steps() -> list[tuple[list[str], list[str]]]:
    """The words of each command, without `rolemesh`, and the lines that the page shows of its output."""
    text = (ROOT / "docs" / "first-hour.md").read_text()
    found = re.findall(r"```sh\n(.*?)```\n+(?:```text\n(.*?)```)?", text, re.DOTALL)
    return [(shlex.split(command)[1:], shown.splitlines()) for command, shown in found]


def name_of(command: list[str]) -> str:
    return "smoke" if "--smoke" in command else command[0]


def missing(shown: list[str], output: str) -> list[str]:
    """The lines that were not printed; one that ends with ... was where its beginning was."""
    printed = output.splitlines()
    return [
        line
        for line in shown
        if not any(
            one.startswith(line.removesuffix("...")) if line.endswith("...") else one.rstrip() == line
            for one in printed
        )
    ]


def without_figures(line: str) -> str:
    """The line with each number as #, and its spaces as one: figures differ from run to run."""
    return re.sub(r"-?[\d.]+(e-\d+)?", "#", " ".join(line.split()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "examples", folder / "examples")
    return folder


def test_what_needs_no_devices_prints_what_the_page_shows(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    laptop = [step for step in steps() if step[0][0] in ON_A_LAPTOP]
    assert len(laptop) == 3
    for command, shown in laptop:
        done = CliRunner().invoke(main, command)
        output = done.output.replace(f"{folder}/", "")
        assert shown, command
        assert missing(shown, output) == [], output
        assert done.exit_code == (3 if "InfeasibleError" in shown[0] else 0)


@pytest.fixture(scope="module")
def with_models(folder: Path) -> Path:
    path = {"PYTHONPATH": "examples/quickstart"}
    subprocess.run(
        [sys.executable, "-c", FEW_STEPS], cwd=folder, check=True, timeout=300, env=os.environ | path
    )
    return folder


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", STARTING, ids=" ".join)
def test_the_commands_that_start_something_run(with_models: Path, names: tuple[str, ...]):
    there = [step for step in steps() if name_of(step[0]) in names]
    assert tuple(name_of(command) for command, _ in there) == names
    for command, shown in there:
        done = subprocess.run(
            [sys.executable, "-m", "rolemesh.launch", *command],
            cwd=with_models, capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        kinds = {without_figures(line) for line in said.splitlines()}
        assert [line for line in shown if without_figures(line) not in kinds] == [], said


def test_no_command_of_the_page_is_left_out():
    names = {name_of(command) for command, _ in steps()}
    assert names == {*ON_A_LAPTOP, *(name for group in STARTING for name in group)}
