"""Runs that stop and go on, by the command line: real Ray, real megatron-core ranks."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import yaml
from broken_runs import actor_of, output_of, start_run, worker_pids
from safetensors.torch import load_file
from tiny import tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolemesh.engine.checkpoint.store import newest_good
from rolemesh.launch.report import read_report

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
EXIT_TERMINATED = 143
STEPS = 5
MEASURED = re.compile(r"^(timing_s|perf)/")  # of the clock, not of the training


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, prompts and a PPO recipe with an adaptive KL weight and decaying learning rates."""
    root = tmp_path_factory.mktemp("resume")
    tiny_checkpoint(root / "policy")
    tiny_checkpoint(root / "scorer", head="score", seed=1)
    for name, n in (("train", 20), ("val", 3)):
        rows = [{"prompt": f"{i * 37 % 1000}>"} for i in range(n)]
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    optim = {"lr": 1e-3, "decay": "cosine", "warmup_steps": 2}
    recipe = {
        "run": {"steps": STEPS, "save_every": 1, "validate_every": 1},
        "cluster": {"nodes": 1, "device": "cpu", "per_node": 2},
        "data": {"train_files": ["train.jsonl"], "val_files": ["val.jsonl"], "max_prompt_tokens": 8},
        "algorithm": {
            "name": "ppo",
            "kl": {"in": "reward", "kind": "k1", "coef": 0.05, "target": 0.01, "horizon": 50},
        },
        "batch": {"prompts": 8, "mini_batch_samples": 4, "micro_batch_tokens": 64},
        "lengths": {"max_response_tokens": 8},
        "actor": {"path": "policy", "dtype": "float32", "optim": optim},
        "ref": {"dtype": "float32"},
        "critic": {"path": "scorer", "dtype": "float32", "optim": optim},
        "reward": {"path": "scorer", "dtype": "float32"},
        "placement": "colocate",
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


def train(folder: Path, run: str, *overrides: str, code: int = 0) -> str:
    process = start_run(folder, f"run.dir={run}", *overrides)
    try:
        output = process.communicate(timeout=600)[0]
    finally:
        process.kill()
    assert process.returncode == code, output
    return output


def metrics(run: Path) -> dict[int, dict]:
    """What was learnt in each step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)), steps
    return {row["step"]: {k: v for k, v in row.items() if not MEASURED.match(k)} for row in rows}


def trained(run: Path) -> list[str]:
    """The prompts of every step."""
    return (run / "trained.jsonl").read_text().splitlines()


@pytest.fixture(scope="module")
def unbroken(folder):
    """(Run folder, output) of a run that nothing stops."""
    output = train(folder, "unbroken", "run.keep_last=3")
    return folder / "unbroken", output


@pytest.mark.slow
def test_stopped_by_sigterm_and_resumed_a_run_is_the_unbroken_one_bit_for_bit(folder, unbroken):
    process = start_run(folder, "run.dir=stopped")
    lines: list[str] = []

    def read() -> None:
        for line in process.stdout or ():
            lines.append(line)
            if re.match(r"step 2/\d+ [\d.]+ s ", line):  # its figures; the status line has a comma there
                process.send_signal(signal.SIGTERM)  # in step 3

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert process.wait(600) == EXIT_TERMINATED, "".join(lines)
        reader.join(10)
    finally:
        process.kill()
    output = "".join(lines)
    run = folder / "stopped"
    done = max(metrics(run))
    assert done == 3, output
    assert f"stopped after step {done} of {STEPS}" in output
    assert newest_good(run / "checkpoints").path.name == f"step_{done}"
    assert not (run / "export").exists()

    resumed = train(folder, "stopped", "--resume", "auto")
    assert f"resume: from step {done}" in resumed
    one, other = metrics(unbroken[0]), metrics(run)
    assert sorted(other) == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        assert other[step] == one[step], step
    first, second = actor_of(unbroken[0], STEPS), actor_of(run, STEPS)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_killed_worker_costs_the_step_and_the_run_is_the_unbroken_one_bit_for_bit(folder, unbroken):
    """Killed in step 4, the last checkpoint is of step 2: step 3 is trained a second time."""
    run = folder / "killed"
    process = start_run(folder, "run.dir=killed", "run.save_every=2")
    output = output_of(process, {3: lambda: os.kill(worker_pids(run)["all_rank_1"], signal.SIGKILL)}, 400)
    assert process.returncode == 0, output
    assert re.search(r"lost workers in step 4: \w+ rank 1 on node .* died in \w+", output), output
    assert "back at the checkpoint of step 2; steps 3 to 4 are trained again" in output
    one, other = metrics(unbroken[0]), metrics(run)
    assert sorted(other) == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        recovery = {k: other[step].pop(k) for k in list(other[step]) if k.startswith("recovery/")}
        assert recovery.get("recovery/count") == (1 if step > 2 else None)
        assert other[step] == one[step], step
    assert trained(run) == trained(unbroken[0])
    first, second = actor_of(unbroken[0], STEPS), actor_of(run, STEPS)
    assert all(torch.equal(first[name], second[name]) for name in first)
    (told,) = read_report(run).recoveries
    assert re.search(r"in step 4: \w+ rank 1 .* died.*went on after step 2", told)
    log = (run / "logs" / "all_rank_0.log").read_text()
    assert re.search(r"^[\d:]{8} actor rank 0 step 5 update_actor \| begins$", log, re.MULTILINE), log


@pytest.mark.slow
def test_resumed_under_another_layout_a_run_learns_the_same(folder, unbroken):
    """The newest checkpoint is cut short: the one before it is taken, and the reason told."""
    run = folder / "other"
    shutil.copytree(unbroken[0] / "checkpoints", run / "checkpoints")
    shutil.rmtree(run / "checkpoints" / "step_5")
    shard = next((run / "checkpoints" / "step_4" / "critic").glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size // 2)
    output = train(
        folder, "other", "--resume", "auto", "actor.layout.tp=2", "critic.layout.pp=2", "run.keep_last=3"
    )
    assert re.search(r"resume: skipped step_4: .*wrong size of critic/__", output), output
    assert "resume: from step 3" in output
    one, other = metrics(unbroken[0]), metrics(run)
    assert sorted(other) == [4, 5]
    for step in (4, 5):
        for name, value in one[step].items():
            assert other[step][name] == pytest.approx(value, rel=1e-4, abs=1e-5), (step, name)
    first, second = actor_of(unbroken[0], STEPS), actor_of(run, STEPS)
    assert max((first[name] - second[name]).abs().max().item() for name in first) < 1e-5


def test_the_last_checkpoints_are_kept_and_the_end_says_where_the_model_is(folder, unbroken):
    run, output = unbroken
    assert sorted(p.name for p in (run / "checkpoints").glob("step_*")) == ["step_3", "step_4", "step_5"]
    (command,) = re.findall(r"rolemesh (convert .*) OUT", output)
    out = folder / "converted"
    subprocess.run(
        [sys.executable, "-m", "rolemesh.launch", *command.split(), str(out)], check=True, cwd=folder
    )
    converted, exported = load_file(out / "model.safetensors"), actor_of(run, STEPS)
    assert converted.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in converted.items())
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == 128
    assert AutoTokenizer.from_pretrained(out).eos_token_id == 2
