"""Runs without Ray: torchrun's ranks are the workers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny import tiny_checkpoint

from rolemesh.launch import spmd
from rolemesh.launch.config import load_recipe
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.rendezvous import LauncherWorld

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(sum(c.isdigit() for c in solution_str)), "length": len(solution_str)}
"""
WORLD = LauncherWorld(
    rank=0, world_size=2, local_rank=0, local_world_size=2, node=0, n_nodes=1, master_addr="127.0.0.1",
    master_port=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """Two PPO steps: a critic over tp, a reference, a reward function, held-out prompts, checkpoints."""
    folder = tmp_path_factory.mktemp("spmd")
    tiny_checkpoint(folder / "policy", layers=1, hidden=32)
    tiny_checkpoint(folder / "scorer", layers=1, hidden=32, head="score", seed=1)
    for name, n in (("train", 16), ("val", 3)):
        rows = [{"prompt": f"{i * 37 % 1000}>", "reward_model": {"ground_truth": ""}} for i in range(n)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "reward.py").write_text(REWARD)
    content = {
        "run": {"dir": "run", "steps": 2, "save_every": 1},
        "cluster": {"device": "cpu", "per_node": 2},
        "data": {"train_files": ["train.jsonl"], "val_files": ["val.jsonl"], "max_prompt_tokens": 8},
        "algorithm": {"name": "ppo", "kl": {"in": "reward", "kind": "k1", "coef": 0.01}},
        "batch": {"prompts": 7, "mini_batch_samples": 4, "micro_batch_tokens": 64},
        "lengths": {"max_response_tokens": 8},
        "actor": {"path": "policy", "dtype": "float32", "optim": {"lr": 1e-3}},
        "ref": {"dtype": "float32"},
        "critic": {"path": "scorer", "dtype": "float32", "optim": {"lr": 1e-3}, "layout": {"tp": 2}},
        "reward": "reward.py:compute_score",
        "placement": "colocate",
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run(*command: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def torchrun(*arguments: str, code: int = 0) -> str:
    launcher = ("torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    return run(*launcher, "-m", "rolemesh.launch.spmd", *arguments, code=code)


def metrics(folder: Path) -> list[dict]:
    """What was measured at each step, times left out."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing_s/", "perf/")
    return [
        {name: value for name, value in row.items() if not name.startswith(timed) and name != "time"}
        for row in rows
    ]


def weights(run: Path) -> dict[str, torch.Tensor]:
    files = sorted((run / "export" / "step_2" / "actor").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(500)
@pytest.mark.slow
def test_a_run_without_ray_gives_the_metrics_and_weights_of_a_colocated_run_with_it(recipe):
    here, there = recipe.parent / "spmd", recipe.parent / "ray"
    output = torchrun(str(recipe), f"run.dir={here}")
    assert "actor exported to" in output
    run("rolemesh.launch", "train", str(recipe), f"run.dir={there}")
    ours, rays = metrics(here), metrics(there)
    assert [row["step"] for row in ours] == [0, 1, 2]
    assert ours == rays
    mine, its = weights(here), weights(there)
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    start = load_file(recipe.parent / "policy" / "model.safetensors")
    assert any(not torch.equal(mine[name], start[name]) for name in mine if name in start)
    assert (here / "checkpoints" / "step_2" / "trainer.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_goes_on_from_its_checkpoint(recipe):
    """The last step again, from the checkpoint before it, gives the same numbers and weights."""
    whole, again = recipe.parent / "whole", recipe.parent / "again"
    torchrun(str(recipe), f"run.dir={whole}")
    torchrun(str(recipe), f"run.dir={again}", f"run.resume={whole / 'checkpoints' / 'step_1'}")
    assert metrics(again)[-1] == metrics(whole)[-1]
    assert all(torch.equal(tensor, weights(again)[name]) for name, tensor in weights(whole).items())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_failing_reward_function_ends_every_rank_with_its_message(recipe):
    bad = recipe.parent / "bad.py"
    bad.write_text("def compute_score(*_, **__):\n    raise KeyError('no such answer')\n")
    output = torchrun(
        str(recipe), f"run.dir={recipe.parent / 'bad'}", f"reward.path={bad}:compute_score", code=1
    )
    assert "no such answer" in output
    assert "reward rank 0" in output


def settled(recipe: Path, *overrides: str) -> list[str]:
    return spmd._settled(load_recipe(recipe, list(overrides)), WORLD)


def test_the_cluster_is_what_torchrun_started(recipe):
    assert settled(recipe) == ["run.device=cpu", "cluster.nodes=1", "cluster.per_node=2"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("placement=split", r"say `placement: colocate` \(this recipe has split\)"),
        ("run.address=auto", r"run\.address: nothing here runs on Ray"),
        ("cluster.per_node=4", r"cluster\.per_node is 4, torchrun started 2"),
        ("cluster.nodes=2", r"cluster\.nodes is 2, torchrun started 1"),
    ],
)
def test_what_a_run_without_ray_cannot_do_is_refused(recipe, override, message):
    with pytest.raises(RecipeError, match=message):
        settled(recipe, override)
