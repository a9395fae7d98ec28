"""Runs that torchrun starts: two agents on this machine, each a node with a Ray of its own."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from small_runs import small_recipe, users_of

from rolemesh.launch import torchrun
from rolemesh.launch.rendezvous import LaunchError, LauncherWorld

WORLD = LauncherWorld(
    rank=0, world_size=3, local_rank=0, local_world_size=1, node=0, n_nodes=3, master_addr="127.0.0.1",
    master_port=1,
)  # fmt: skip


@pytest.mark.full
def test_a_launch_ends_with_the_code_of_what_torchrun_started(tmp_path):
    (tmp_path / "ends.py").write_text("import sys; sys.exit(75)")
    command = [
        sys.executable,
        "-m",
        "rolemesh.launch.elastic",
        "--nproc-per-node=1",
        str(tmp_path / "ends.py"),
    ]
    assert subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 75


def start(recipe: Path, *overrides: str, per_node: int = 1, nodes: int = 2) -> list[subprocess.Popen]:
    """An agent of torchrun for each node; a store of rank 0's agent on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={nodes}",
        f"--nproc-per-node={per_node}",
    ]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    return [
        subprocess.Popen(
            [*command, f"--node-rank={node}", "-m", "rolemesh.launch.torchrun", str(recipe), *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        for node in range(nodes)
    ]


def finish(agents: list[subprocess.Popen], limit_s: float) -> list[str]:
    try:
        return [agent.communicate(timeout=limit_s)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(400)
@pytest.mark.slow
def test_two_nodes_train_and_leave_nothing_behind(tmp_path):
    """Standing-by ranks, a port that another Ray may have, a long folder for Ray's files; with variables of
    the recipe and a copy of the model on both nodes, which share a disk here.
    """
    recipe, long = small_recipe(tmp_path), tmp_path / ("x" * 80)
    with contextlib.ExitStack() as open_:
        with contextlib.suppress(OSError):  # taken already: as good
            open_.enter_context(socket.create_server(("127.0.0.1", 6379)))
        ours = [f"run.temp_dir={long}", "run.env.MINE=7", f"run.stage={tmp_path}/disk"]
        agents = start(recipe, *ours, per_node=2)
        outputs = finish(agents, 300)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    assert "nodes: 2" in outputs[0]
    assert "port 6379 is in use" in outputs[0]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [0, 1]
    assert "all: 2 devices" in outputs[0]
    assert re.search(r"GiB copied on 1 of 2 nodes in \d+ s, to \S+/disk/policy-", outputs[0])
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["MINE"] == "7"
    assert not [name for name in seen if name in torchrun_names() or name.startswith("TORCHELASTIC_")]
    assert not list(long.iterdir())
    assert not users_of(long)


def torchrun_names() -> set[str]:
    from rolemesh.launch import rendezvous

    return set(rendezvous.LAUNCHER)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_wrong_recipe_ends_every_rank_with_its_code_before_ray_starts(tmp_path):
    recipe = small_recipe(tmp_path, cluster={"device": "cpu", "per_node": 1, "nodes": 3})
    agents = start(recipe, per_node=2)
    outputs = finish(agents, 100)
    assert "cluster.nodes is 3, torchrun started 2 nodes" in outputs[0]
    assert all(set(re.findall(r"exitcode *: (-?\d+)", output)) == {"2"} for output in outputs), outputs
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("what", [signal.SIGTERM, signal.SIGKILL], ids=["sigterm", "sigkill"])
def test_a_run_whose_launchers_end_leaves_no_process(tmp_path, what):
    temp = tmp_path / "temp"
    agents = start(small_recipe(tmp_path), "run.steps=500", f"run.temp_dir={temp}")
    log = tmp_path / "run" / "metrics.jsonl"
    end = time.monotonic() + 250
    while not (log.exists() and len(log.read_text().splitlines()) > 1):
        assert time.monotonic() < end, finish(agents, 1)
        time.sleep(0.5)
    family = [child for agent in agents for child in psutil.Process(agent.pid).children(recursive=True)]
    ranks = [process for process in family if "rolemesh.launch.torchrun" in process.cmdline()]
    for process in agents if what == signal.SIGTERM else ranks:
        process.send_signal(what)
    finish(agents, 90)
    end = time.monotonic() + 30
    while users_of(temp) and time.monotonic() < end:
        time.sleep(0.5)
    assert not users_of(temp)


def test_nodes_that_are_missing_are_named():
    meeting = torchrun.Meeting(WORLD, dist.HashStore())
    meeting.tell("node/2", {"where": "b, 10.0.0.3", "joined": False, "error": None})
    with pytest.raises(LaunchError) as error:
        torchrun._wait_for_nodes(meeting, wait_s=0.5)
    assert str(error.value) == (
        "1/3 nodes after 0.5 s; missing: node 1 (has not called), "
        "node 2 (b, 10.0.0.3: has called, its Ray has not joined)"
    )


def test_a_node_whose_ray_fails_ends_the_wait_with_its_message():
    meeting = torchrun.Meeting(WORLD, dist.HashStore())
    meeting.tell("node/1", {"where": "b, 10.0.0.2", "joined": False, "error": "the disk is full"})
    with pytest.raises(LaunchError, match=r"node 1 \(b, 10\.0\.0\.2\) could not join: the disk is full"):
        torchrun._wait_for_nodes(meeting, wait_s=30)


def test_ranks_that_stand_by_end_with_the_runs_code():
    meeting = torchrun.Meeting(replace(WORLD, rank=1, local_rank=1), dist.HashStore())
    meeting.tell("end", 143)
    assert meeting.wait_for_end() == 143


def test_ranks_that_are_gone_are_waited_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(torchrun, "_END_S", 0.2)
    before, start = signal.getsignal(signal.SIGTERM), time.monotonic()
    try:
        torchrun.Meeting(WORLD, dist.HashStore()).leave()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert 0.2 < time.monotonic() - start < 10


def test_the_address_of_a_cluster_in_the_recipe_is_refused(tmp_path):
    from rolemesh.launch.fields import RecipeError

    given = torchrun.Arguments.parse([str(small_recipe(tmp_path)), "run.address=auto"])
    with pytest.raises(RecipeError, match=r"run\.address: torchrun's nodes become a Ray cluster"):
        torchrun._expected(given, 2)


def test_options_of_train_go_on_to_it():
    given = torchrun.Arguments.parse(["a.yaml", "--resume", "auto", "run.steps=2", "--wait-s", "5"])
    assert (given.overrides, given.train, given.wait_s) == (["run.steps=2"], ["--resume=auto"], 5)
