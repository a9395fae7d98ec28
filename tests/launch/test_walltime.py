"""A run that ends before its job does."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rolemesh.launch.config import parse_recipe
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.schema import Run
from rolemesh.launch.walltime import (
    EXIT_WALLTIME,
    Walltime,
    job_end,
    requeue,
    walltime_lines,
    walltime_problems,
)

RECIPE = """
data: train.jsonl
algorithm: grpo
batch: {samples_per_prompt: 2}
actor: policy
reward: reward.py:compute_score
"""


def ends(*keys: str) -> Run:
    return parse_recipe(RECIPE, Path("/"), keys).run


def stops_at(step_s: list[float], job_s: float, before_s: float) -> int:
    """The step after which a run stops whose steps take so long; 0: it does not."""
    now, told = [1000.0], list[str]()
    wall = Walltime(1000.0 + job_s, before_s, told.append, clock=lambda: now[0])
    for step, seconds in enumerate(step_s, 1):
        now[0] += seconds
        if wall.due():
            assert wall.reached
            assert len(told) == 1
            return step
    assert not told
    return 0


def test_a_run_stops_before_the_step_that_would_end_too_late():
    assert stops_at([10] * 9, job_s=200, before_s=60) == 0
    assert stops_at([10] * 30, job_s=200, before_s=60) == 13  # at 130 s: the next one would end at 140
    assert stops_at([10, 50, *[10] * 30], job_s=200, before_s=60) == 5  # a step may take 50 s again
    assert stops_at([300], job_s=200, before_s=60) == 1


def test_a_run_without_the_key_never_asks(tmp_path):
    wall = Walltime.of(ends(), pytest.fail, {"SLURM_JOB_END_TIME": "1"})
    assert not wall.due()
    assert list(walltime_lines(ends())) == []


def test_slurm_says_when_the_job_ends_and_a_given_time_wins(tmp_path, monkeypatch):
    run = ends("run.stop_before_walltime=600")
    assert job_end(run, {"SLURM_JOB_END_TIME": "1900000000", "SLURM_JOB_ID": "7"}) == 1_900_000_000
    slurm(
        tmp_path, monkeypatch, 'echo "JobId=7 StartTime=2030-01-01T00:00:00 EndTime=2030-01-02T00:00:00 X=1"'
    )
    assert job_end(run, {"SLURM_JOB_ID": "7"}) == time.mktime((2030, 1, 2, 0, 0, 0, 0, 0, -1))
    given = ends("run.stop_before_walltime=600", "run.walltime=3600")
    assert abs(job_end(given, {"SLURM_JOB_END_TIME": "1"}) - time.time()) < 3600
    slurm(tmp_path, monkeypatch, "echo EndTime=Unknown")
    with pytest.raises(RecipeError, match=r"Slurm's job 7 has no end \('Unknown'\): give run.walltime"):
        job_end(run, {"SLURM_JOB_ID": "7"})
    with pytest.raises(RecipeError, match=r"Neither Slurm says so here, nor run\.walltime"):
        job_end(run, {})


def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    (folder / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {folder}/asked\n{body}\n')
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_the_job_goes_back_into_the_queue_or_slurm_s_reason_is_told(tmp_path, monkeypatch):
    slurm(tmp_path, monkeypatch, "exit 0")
    assert requeue({"SLURM_JOB_ID": "7"}) == "Slurm starts job 7 again"
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    slurm(tmp_path, monkeypatch, "echo Requested operation is presently disabled >&2; exit 1")
    with pytest.raises(
        RecipeError, match="`scontrol requeue 7` said: Requested operation is presently disabled"
    ):
        requeue({"SLURM_JOB_ID": "7"})
    with pytest.raises(RecipeError, match="this is no Slurm job"):
        requeue({})


def test_a_check_says_what_this_machine_cannot_do(monkeypatch):
    run = ends("run.stop_before_walltime=600", "run.requeue=true", "run.resume=auto")
    assert list(walltime_lines(run)) == [
        "the run saves and ends 600 s before Slurm's end of the job; then Slurm starts the job again"
    ]
    assert [line.split(":")[0] for line in walltime_problems(run, {})] == [
        "run.stop_before_walltime", "run.requeue",
    ]  # fmt: skip
    monkeypatch.setenv("PATH", "/none")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1900000000"}
    assert list(walltime_problems(run, job)) == [
        "run.requeue: scontrol is not on the PATH here (in a container: mount it)"
    ]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["run.walltime=60"], "run.walltime would have no effect: run.stop_before_walltime is not given"),
        (["run.stop_before_walltime=60", "run.requeue=true"], "set run.resume: auto, or it begins anew"),
        (["run.stop_before_walltime=60", "run.walltime=60"], "no time is left to train"),
        (["run.env.CUDA_VISIBLE_DEVICES=0"], "run.env.CUDA_VISIBLE_DEVICES is set by"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys, said):
    with pytest.raises(RecipeError, match=said):
        ends(*keys)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_run_whose_job_ends_saves_and_is_put_back_into_the_queue(tmp_path, monkeypatch):
    """With its model read from a copy, and variables of the recipe in the process of its reward."""
    from small_runs import small_recipe

    from rolemesh.engine.checkpoint.manifest import Manifest
    from rolemesh.engine.checkpoint.store import newest_good

    slurm(tmp_path, monkeypatch, "exit 0")
    keys = {
        "stop_before_walltime": 600,
        "requeue": True,
        "resume": "auto",
        "stage": "disk",
        "env": {"MINE": "7"},
    }
    recipe = small_recipe(tmp_path, run={"dir": "run", "steps": 4, **keys})
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 300), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "rolemesh.launch", "train", str(recipe)],
        env=os.environ | job, capture_output=True, text=True, timeout=360, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == EXIT_WALLTIME, said
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    assert "stopped after step 1 of 4" in said
    assert "Slurm starts job 7 again" in said
    saved = newest_good(tmp_path / "run/checkpoints").path
    assert saved is not None
    assert Manifest.read(saved).step == 1
    (copy,) = [path for path in (tmp_path / "disk").iterdir() if path.is_dir()]
    assert re.search(rf"copied on 1 of 1 nodes in \d+ s, to {re.escape(str(copy))}", said)
    assert json.loads((tmp_path / "seen.json").read_text())["MINE"] == "7"
