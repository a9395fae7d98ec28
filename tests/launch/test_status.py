"""Status and stacks of a run by its folder: while it goes on, when it has ended, and when it was killed."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolemesh.launch.cli import main
from rolemesh.launch.pulse import Pulse
from rolemesh.launch.run_state import (
    RankState,
    RunState,
    asked_for_stacks,
    read_stacks,
    read_state,
    this_machine,
)
from rolemesh.launch.stacks import get_stacks
from rolemesh.launch.status import NoRunError, last_metrics, read_status, verdict

DRIVER = """
import sys, time
from pathlib import Path
from rolemesh.launch.pulse import Pulse
from rolemesh.launch.run_lock import only_run_in

def wait_for_the_step():
    sys.stdin.read()

folder = Path(sys.argv[1])
with only_run_in(folder):
    folder.mkdir()
    with Pulse(folder, every_s=0.1) as pulse:
        print("up", flush=True)
        wait_for_the_step()
        pulse.ended(int(sys.argv[2]))
"""
TOLD = RunState(beat=3, at_s=1000.0, every_s=2.0, began_s=900.0, host="a", machine="m", pid=7)
RANK = RankState("all", 0, "n0", ("actor", "ref"), "actor.update_actor", 4, 12.0, 2 << 30, 8 << 30, 999.0)


@pytest.fixture
def driver(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "run"), "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.wait(10)


def test_a_run_that_goes_on_says_so_and_shows_its_stack_then_it_ends(tmp_path, driver):
    run = tmp_path / "run"
    status = read_status(run)
    assert (status.state, status.exit_code, status.told.pid) == ("running", 0, driver.pid)
    report = get_stacks(run, limit_s=20)
    assert report.problem == ""
    assert "in wait_for_the_step" in report.text()
    assert "thread MainThread" in report.text()
    assert asked_for_stacks(run) == "", "the question is closed"
    driver.stdin.close()
    assert driver.wait(20) == 0
    ended = read_status(run)
    assert (ended.state, ended.told.exit_code) == ("finished", 0)
    assert "the run has finished" in get_stacks(run, limit_s=1).problem


def test_a_driver_killed_with_9_is_dead_at_once_and_its_last_stacks_are_shown(tmp_path, driver):
    run = tmp_path / "run"
    get_stacks(run, limit_s=20)
    driver.send_signal(signal.SIGKILL)
    driver.wait(10)
    status = read_status(run)
    assert (status.state, status.exit_code) == ("dead", 1)
    assert "nobody holds its folder" in status.why
    report = get_stacks(run, limit_s=20)
    assert "the driver is dead" in report.problem
    assert "the last known stacks are" in report.text()
    assert "in wait_for_the_step" in report.text()


def test_a_stopped_driver_is_silent_and_a_question_to_it_is_not_waited_for_longer_than_asked(
    tmp_path, driver
):
    run = tmp_path / "run"
    driver.send_signal(signal.SIGSTOP)
    later = time.time() + 100
    status = read_status(run, clock=lambda: later)
    assert status.state == "silent"
    assert "though its process is there" in status.why
    began = time.monotonic()
    assert "no answer within 0.5 s" in get_stacks(run, limit_s=0.5).problem
    assert time.monotonic() - began < 10
    driver.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(
    ("held", "age_s", "moves", "state"),
    [
        (True, 1.0, None, "running"),
        (None, 1.0, None, "running"),  # no locks on this disk
        (None, 100.0, None, "dead"),
        (False, 1.0, None, "dead"),
        (True, 100.0, None, "silent"),
        (False, 9999.0, True, "running"),  # another machine, whose clock differs and whose locks do not show
        (False, 1.0, False, "dead"),
        (True, 1.0, False, "silent"),
    ],
)
def test_what_lock_and_heartbeat_come_to(held, age_s, moves, state):
    assert verdict(TOLD, held, age_s, moves)[0] == state
    assert verdict(replace(TOLD, state="failed", exit_code=1), held, age_s, moves)[0] == "failed"


def test_from_another_machine_the_heartbeat_is_watched_whatever_the_clocks_say(tmp_path):
    replace(TOLD, at_s=time.time() + 3600).write(tmp_path)
    looks = []

    def beats(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            replace(TOLD, beat=4).write(tmp_path)

    assert read_status(tmp_path, sleep=beats).state == "running"
    assert len(looks) == 3
    assert read_status(tmp_path, sleep=lambda seconds: None).state == "dead"


def test_how_a_run_ended_is_written(tmp_path):
    with Pulse(tmp_path) as pulse:
        pulse.ended(143)
    assert (read_state(tmp_path).state, read_state(tmp_path).exit_code) == ("stopped", 143)
    with pytest.raises(KeyboardInterrupt), Pulse(tmp_path):
        raise KeyboardInterrupt
    assert (read_state(tmp_path).state, read_state(tmp_path).exit_code) == ("stopped", 130)
    with pytest.raises(RuntimeError), Pulse(tmp_path):
        raise RuntimeError("rank 3 died\npassword=hunter2hunter2")
    told = read_state(tmp_path)
    assert (told.state, told.exit_code) == ("failed", 1)
    assert "rank 3 died" in told.error
    assert "hunter2" not in told.error
    assert os.listdir(tmp_path) == ["status.json"]


class Group:
    """What a pulse asks of a worker group."""

    class resource_pool:
        name = "all"

    nodes = ("n0", "n1")

    def __init__(self) -> None:
        self.answers = {0: replace_state("actor.update_actor"), 1: "rank 1 does not answer: GetTimeoutError"}

    def states(self):
        return self.answers

    def stacks(self):
        return {
            0: "thread compute\n" + "x y=1 " * 1_000_000 + "\n\nthread other",
            1: "rank 1 does not answer",
        }


def replace_state(operation):
    class State:
        step, seconds, resident_bytes, available_bytes = 4, 12.0, 2 << 30, 8 << 30

    State.operation = operation
    return State


def test_workers_are_asked_within_the_block_alone_and_answers_are_bounded(tmp_path):
    pulse, group = Pulse(tmp_path), Group()
    with pulse.watching({"actor": group, "ref": group, "plain": object()}):
        pulse._beat()
        first, second = read_state(tmp_path).ranks
        assert (first.operation, first.roles, first.node, first.step) == (
            "actor.update_actor",
            ("actor", "ref"),
            "n0",
            4,
        )
        assert "does not answer" in second.silent
        pulse._stacks("0" * 16).write(tmp_path)
    assert (tmp_path / "stacks.json").stat().st_size < 1 << 20
    assert [one.pool for one in read_stacks(tmp_path).ranks] == ["driver", "all", "all"]
    group.states = None  # to be asked now would raise
    pulse._beat()


def test_a_beat_survives_workers_that_are_gone_and_a_folder_that_is_gone(tmp_path):
    group = Group()
    group.states = lambda: 1 / 0
    pulse = Pulse(tmp_path / "none")
    with pulse.watching({"actor": group}):
        pulse._beat()
    assert not (tmp_path / "none").exists()


def test_the_text_says_step_operations_metrics_and_where_things_are(tmp_path):
    told = replace(
        TOLD, at_s=time.time(), machine=this_machine()[1], step=4, steps=20, done=3, step_s=75.0,
        operations={"update_actor": 12.0}, done_operations=(7, 9), left_s=3700.0, ranks=(RANK,),
    )  # fmt: skip
    told.write(tmp_path)
    rows = [
        {"step": 2, "critic/score/mean": 1.0},
        {"step": 3, "critic/score/mean": 2.5, "perf/throughput": 9},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 4, "cut')
    (tmp_path / "checkpoints" / "step_2").mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "all_rank_0.log").write_text("")
    status = read_status(tmp_path)
    text = status.text()
    for said in (
        "running",
        "4 of 20, for 1:15; 1:01:40 left",
        "update_actor for 12 s; 7 of 9 done",
        "update_actor on 1 of 1 ranks of all, for 12 s",
        "critic/score/mean 2.5; perf/throughput 9",
        "of step 2",
        "(1 files)",
        "all 0",
    ):
        assert said in text, text
    assert json.loads(status.json())["told"]["ranks"][0]["operation"] == "actor.update_actor"


def test_the_last_whole_line_of_a_long_file_is_found(tmp_path):
    line = json.dumps({"step": 1, "x": 1.0, "padding": "p" * 1000})
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n" * 400)
    assert last_metrics(tmp_path) == {"step": 1, "x": 1.0}
    assert last_metrics(tmp_path / "none") == {}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"beat": 1}', '{"ranks": 3}'])
def test_a_damaged_status_file_is_no_run(tmp_path: Path, content: str):
    (tmp_path / "status.json").write_text(content)
    with pytest.raises(NoRunError):
        read_status(tmp_path)


def test_a_folder_that_is_none_and_one_without_a_run_are_told_apart(tmp_path):
    with pytest.raises(NoRunError, match="no folder"):
        read_status(tmp_path / "none")
    with pytest.raises(NoRunError, match="is no run folder"):
        read_status(tmp_path)
    (tmp_path / "recipe.yaml").write_text("")
    with pytest.raises(NoRunError, match="not begun yet"):
        read_status(tmp_path)


def test_the_documents_commands_run_and_exit_as_it_says(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs/failures.md").read_text()
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    assert [shlex.split(line)[1] for line in lines] == ["status", "stacks"]
    monkeypatch.chdir(tmp_path)
    codes = []
    for state, code in ((None, None), ("finished", 0), ("failed", 1)):
        if state is not None:
            (tmp_path / "runs" / "quickstart").mkdir(parents=True, exist_ok=True)
            replace(TOLD, state=state, exit_code=code).write(tmp_path / "runs" / "quickstart")
        codes.append([CliRunner().invoke(main, shlex.split(line)[1:]).exit_code for line in lines])
    assert codes == [[2, 2], [0, 1], [1, 1]]
    shown = CliRunner().invoke(main, ["status", "runs/quickstart", "--json"])
    assert json.loads(shown.stdout)["state"] == "failed"
