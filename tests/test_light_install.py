"""What `pip install rolemesh` without extras can do, and what it says of the rest."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIGHT = [sys.executable, str(Path(__file__).parent / "light_install.py")]
PLAN_70B_S = 10.0
LAUNCH = "launch slurm examples/quickstart.yaml --dry-run"
NEED_TRAIN = (
    "train examples/quickstart.yaml", "check examples/quickstart.yaml", "doctor", "convert a b", "cluster",
    "sft examples/quickstart_sft.yaml", "train-rm examples/quickstart_rm.yaml", "serve-rm x", "serve-ref x",
    "calibrate --out none.yaml", LAUNCH,
)  # fmt: skip
NEED_NOTHING = (
    "schema run.env", f"{LAUNCH} --no-check", "cluster --preset 16xh100-80x8",
    "import verl examples/imports/verl_dapo.sh", "import openrlhf examples/imports/openrlhf_ppo.sh",
)  # fmt: skip


def each(*lines: str) -> list[dict]:
    done = subprocess.run(
        [*LIGHT, "--each", *lines], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"ROLEMESH_SITE": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_command_that_lacks_its_extra_names_it_and_a_launch_needs_none():
    train, checked, launch = each(NEED_TRAIN[0], LAUNCH, f"{LAUNCH} --no-check")
    assert train["code"] == 1
    assert "is not installed: pip install 'rolemesh[train]'" in train["said"]
    assert "launch with --no-check" in checked["said"]
    assert (launch["code"], "#SBATCH --nodes=1\n" in launch["said"]) == (0, True)


@pytest.mark.full
def test_every_command_works_or_names_its_extra():
    needs, works = NEED_TRAIN, NEED_NOTHING
    results = each(*needs, *works)
    for line, result in zip(needs, results[: len(needs)], strict=True):
        assert result["code"] == 1, line
        assert "is not installed: pip install 'rolemesh[train]'" in result["said"], line
    for line, result in zip(works, results[len(needs) :], strict=True):
        assert result["code"] == 0, (line, result["said"])


@pytest.mark.full
def test_a_70b_run_is_planned_in_seconds_without_torch():
    """In seconds of the processor, which other work on the machine does not change."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*LIGHT, "plan", "examples/plan_70b.yaml", "--cluster", "16xh100-80x8"],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "128 devices" in done.stdout
    assert "step: " in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < PLAN_70B_S
