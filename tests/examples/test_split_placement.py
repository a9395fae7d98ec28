"""The hand-written split placement: its dry run on the 7B shapes, and two real steps on tiny models."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tiny import char_tokenizer, tiny_checkpoint
from transformers import AutoModelForCausalLM

EXAMPLE = Path(__file__).parents[2] / "examples" / "split_placement"

DEEPSEEK_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 102400,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def shape_only(folder: Path, config: dict) -> str:
    """A model folder with the right configuration and tokenizer whose weights file is empty."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    char_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def environment(tmp_path):
    scorer = DEEPSEEK_7B | {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    rows = {"prompt": [f"{i}>" for i in range(2048)]}
    pq.write_table(pa.table(rows), tmp_path / "train.parquet")
    return os.environ | {
        "ACTOR": shape_only(tmp_path / "chat", DEEPSEEK_7B),
        "CRITIC": shape_only(tmp_path / "critic", scorer),
        "REWARD": shape_only(tmp_path / "rm", scorer),
        "TRAIN": str(tmp_path / "train.parquet"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def run(*command: str, env: dict[str, str], timeout: float = 240) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout)


@pytest.mark.full
def test_the_script_places_a_7b_run_on_halves_of_a_node(environment):
    done = run("bash", str(EXAMPLE / "run_deepseek7b_llm.sh"), "--dry-run", env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "{'actor_pool': [4], 'critic_pool': [4]}" in done.stdout
    assert "'Critic': 'critic_pool'" in done.stdout
    assert "actor: tp=2 dp=2" in done.stdout


@pytest.mark.full
def test_the_dry_run_refuses_a_layout_that_does_not_divide(environment):
    done = run(
        "bash", str(EXAMPLE / "run_deepseek7b_llm.sh"), "--dry-run", "actor.layout.tp=3", env=environment
    )
    assert done.returncode == 2
    assert "tp=3" in done.stdout


@pytest.mark.full
def test_a_critic_warmup_is_refused_rather_than_ignored(environment):
    script = str(EXAMPLE / "run_deepseek7b_llm.sh")
    done = run("bash", script, "--dry-run", "batch.critic_warmup=3", env=environment)
    assert done.returncode == 2
    assert "critic_warmup" in done.stderr


@pytest.mark.full
def test_two_real_steps_follow_the_recipe_and_leave_the_actor(tmp_path):
    tiny_checkpoint(tmp_path / "policy")
    tiny_checkpoint(tmp_path / "scorer", head="score")
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}>"}) for i in range(12)))
    recipe = {
        "run": {"steps": 2, "dir": "run"},
        "cluster": {"nodes": 1, "device": "cpu", "per_node": 4},
        "data": {"train_files": ["train.jsonl"], "max_prompt_tokens": 8},
        "algorithm": {"name": "ppo", "kl": {"in": "reward", "coef": 0.5, "target": 1.0, "horizon": 120}},
        "batch": {"prompts": 6, "samples_per_prompt": 2, "mini_batch_samples": 5},
        "lengths": {"max_response_tokens": 6},
        "actor": {"path": "policy", "dtype": "float32", "optim": {"lr": 0.01}},
        "ref": {"dtype": "float32"},
        "critic": {"path": "scorer", "dtype": "float32", "layout": {"tp": 2}},
        "reward": {"path": "scorer", "dtype": "float32", "layout": {"tp": 2}},
        "placement": "split",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    done = run(
        sys.executable,
        str(EXAMPLE / "main_ppo_split.py"),
        str(tmp_path / "recipe.yaml"),
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (ast.literal_eval(shown) for shown in re.findall(r"step \d/2 (\{.*\})", done.stdout))
    assert "critic/vf_loss" in second
    assert first["actor/log_prob_diff_max"] > 0.001  # the policy moved before the last mini-batch
    coefs = [metrics["actor/reward_kl_penalty_coeff"] for metrics in (first, second)]
    assert coefs == [0.5, pytest.approx(0.5 * (1 - 0.2 * 12 / 120))]  # no KL yet over 12 samples
    out_dir = tmp_path / "run" / "export" / "actor"
    assert f"actor exported to {out_dir}" in done.stdout
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "policy", out_dir))
    assert not before.lm_head.weight.equal(after.lm_head.weight)
