"""A recipe that lets the scheduler decide, planned and really run on the slots of this machine."""

import json
import os
import subprocess
import sys

import pytest
import yaml
from tiny import tiny_checkpoint

from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.timeline import Timeline

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]


@pytest.mark.slow
def test_a_recipe_with_placement_auto_trains_as_its_plan_says(tmp_path):
    tiny_checkpoint(tmp_path / "policy", layers=4, hidden=64)
    tiny_checkpoint(tmp_path / "scorer", layers=2, hidden=64, head="score", seed=1)
    rows = [{"prompt": f"{i * 37 % 1000}>", "reward_model": {"ground_truth": str(i)}} for i in range(32)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    recipe = {
        "run": {"dir": "runs/auto", "steps": 2, "device": "cpu"},
        "cluster": {"nodes": 1, "device": "cpu", "per_node": 2},
        "data": {"train_files": ["train.jsonl"], "max_prompt_tokens": 8},
        "algorithm": {"name": "ppo", "kl": {"in": "reward", "kind": "k1", "coef": 0.01}},
        "batch": {"prompts": 16},
        "lengths": {"max_response_tokens": 16},
        "actor": {"path": "policy", "dtype": "float32", "optim": {"lr": 1e-4}},
        "ref": {"dtype": "float32"},
        "critic": {"path": "scorer", "dtype": "float32", "optim": {"lr": 1e-4}},
        "reward": {"path": "scorer", "dtype": "float32"},
        "placement": "auto",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run = subprocess.run(
        [sys.executable, "-m", "rolemesh.launch", "train", str(tmp_path / "recipe.yaml")],
        capture_output=True,
        text=True,
        timeout=380,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    folder = tmp_path / "runs/auto"
    plan = PlacementPlan.from_yaml((folder / "plan.yaml").read_text())
    assert plan.strategy == "auto"
    assert plan.proof is not None
    assert plan.proof.optimal
    assert plan.n_devices <= 2
    assert set(plan.roles) == {"actor", "rollout", "critic", "ref", "reward"}
    operations = set(plan.prediction.operations_s)
    ran = {span.name for span in Timeline.load(folder / "timeline.json").spans}
    assert operations <= ran
