"""A smoke run of a model without weights, asked for status and stacks while it goes on."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import MarkedRun, small_recipe
from tiny import tiny_checkpoint

from rolemesh.launch.run_state import read_state

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

REWARD = """
import os, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    deadline = time.monotonic() + 120
    while not os.path.exists(os.path.join(os.path.dirname(__file__), "go")) and time.monotonic() < deadline:
        time.sleep(0.05)
    return float(len(solution_str))
"""


def rolemesh(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "rolemesh.launch", *arguments], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def in_operation(run: Path, operation: str, limit_s: float) -> bool:
    """Wait until a rank of the run is in the operation."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        state = read_state(run)
        if state is not None and any(rank.operation == operation for rank in state.ranks):
            return True
        time.sleep(0.2)
    return False


def test_a_smoke_run_reads_no_weights_tells_how_it_stands_and_prints_its_memory(tmp_path):
    recipe = small_recipe(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    for weights in (tmp_path / "policy").glob("*.safetensors"):
        weights.unlink()
    folder = tmp_path / "run-smoke"
    run = MarkedRun(recipe, "--smoke")
    try:
        assert in_operation(folder, "reward.compute_score", 240), run.output
        code, said = rolemesh("status", str(folder))
        assert code == 0, said
        assert "step            1 of 2" in said
        assert "compute_score on 1 of 1 ranks" in said
        code, said = rolemesh("stacks", str(folder), "--role", "reward")
        assert code == 0, said
        assert "--- reward rank 0" in said
        assert "in compute_score" in said
        (tmp_path / "go").touch()
        assert run.process.wait(240) == 0, run.output
    finally:
        run.kill()
    assert "every rank is within its device; worst ratio" in run.output
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert all(step["response_length/mean"] == 8 for step in steps[1:])
    assert not (folder / "export").exists()
    assert list(folder.glob("checkpoints/step_*")) == []
    assert rolemesh("status", str(folder))[0] == 0
    assert read_state(folder).state == "finished"


@pytest.mark.slow
def test_of_a_run_whose_driver_is_killed_with_9_the_last_operations_are_told(tmp_path):
    """The small version, without Ray, is in `test_status.py`."""
    recipe = small_recipe(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    run = MarkedRun(recipe)
    try:
        assert in_operation(tmp_path / "run", "reward.compute_score", 240), run.output
        run.process.send_signal(signal.SIGKILL)
        run.process.wait(10)
        code, said = rolemesh("status", str(tmp_path / "run"))
        assert code == 1
        assert "run: dead" in said
        assert "reward.compute_score" in said
        code, said = rolemesh("stacks", str(tmp_path / "run"))
        assert code == 1
        assert "the driver is dead" in said
        assert "reward_process rank 0" in said
        assert run.left_after(60) == []
    finally:
        run.kill()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_with_vllm_too_every_response_is_as_long_as_allowed(tmp_path):
    """The small version, with the built-in engine, is above."""
    recipe = small_recipe(tmp_path, rollout={"engine": "vllm", "max_batch_tokens": 1024})
    tiny_checkpoint(tmp_path / "policy", layers=1, heads=2)  # heads of 32, that vLLM takes on a CPU
    for weights in (tmp_path / "policy").glob("*.safetensors"):
        weights.unlink()
    (tmp_path / "go").touch()
    run = MarkedRun(recipe, "--smoke")
    try:
        assert run.process.wait(240) == 0, run.output
    finally:
        run.kill()
    steps = [json.loads(line) for line in (tmp_path / "run-smoke" / "metrics.jsonl").read_text().splitlines()]
    assert all(step["response_length/mean"] == 8 for step in steps[1:])
