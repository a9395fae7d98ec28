"""Whole runs under layouts and settings that each have tests of their own: they go together too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny import tiny_checkpoint
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(900)]

RECIPE = """
run: {steps: 2, save_every: 2}
cluster: {nodes: 1, device: cpu, per_node: 2}
data: {train_files: [train.jsonl], max_prompt_tokens: 8}
algorithm: {name: ppo, kl: {in: reward, kind: k1, coef: 0.05}}
batch: {prompts: 8, samples_per_prompt: 2, micro_batch_tokens: 64}
lengths: {max_response_tokens: 8}
actor: {path: policy, dtype: float32, optim: {lr: 1.0e-3}}
critic: {path: policy, dtype: float32, new_head: true, optim: {lr: 1.0e-3}}
ref: {dtype: float32}
reward: ./reward.py:compute_score
placement: colocate
"""
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    return float(len(solution_str))\n"
)
RUNS = {
    "vpp, recompute, offload": {
        "actor": {"layout": {"pp": 2, "vpp": 2}, "recompute": "full", "offload": True},
        "critic": {"layout": {"pp": 2, "pp_layers": [1, 3]}, "recompute": "selective", "offload": True},
        "ref": {"layout": {"pp": 2}, "offload": True},
    },
    "cp, sp": {
        "actor": {"layout": {"cp": 2}},
        "critic": {"layout": {"tp": 2, "sequence_parallel": True}},
        "ref": {"layout": {"cp": 2}},
    },
    "LoRA": {
        "actor": {"layout": {"tp": 2}, "lora": {"rank": 4}},
        "critic": {"lora": {"rank": 4}},
        "ref": None,
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_two_steps_learn_and_the_checkpoint_loads_in_transformers(tmp_path: Path, name: str) -> None:
    tiny_checkpoint(tmp_path / "policy", layers=4)
    rows = [json.dumps({"prompt": f"{i * 37 % 1000}>"}) for i in range(16)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "reward.py").write_text(REWARD)
    recipe = yaml.safe_load(RECIPE)
    for role, changes in RUNS[name].items():
        recipe[role] = None if changes is None else {**recipe[role], **changes}
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump({role: keys for role, keys in recipe.items() if keys is not None})
    )
    run = tmp_path / "run"
    rolemesh = [sys.executable, "-m", "rolemesh.launch"]
    for command in (["train", "recipe.yaml", f"run.dir={run}"], ["convert", str(run), str(tmp_path / "hf")]):
        done = subprocess.run(
            [*rolemesh, *command], cwd=tmp_path, capture_output=True, text=True, timeout=700
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    first, last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-2:]
    assert first["actor/log_prob_diff_max"] < 1e-4  # the engine has the trainer's weights
    assert last["actor/grad_norm"] > 0
    assert last["critic/grad_norm"] > 0
    assert first["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-5)  # the reference is the first actor
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
