"""The commands of docs/checkpoints.md, run as they stand there, and its keys."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from test_docs import ROOT, blocks, commands, run
from tiny import tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rolemesh.launch.fields import members
from rolemesh.launch.schema import Run

DOCUMENT = "docs/checkpoints.md"
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
RECIPE = """
run: {steps: 2, save_every: 1, dir: runs/my}
cluster: {per_node: 1, device: cpu}
data: {train_files: train.jsonl, max_prompt_tokens: 8}
algorithm: ppo
batch: {prompts: 4, micro_batch_tokens: 64}
lengths: {max_response_tokens: 4}
actor: {path: policy, dtype: float32}
critic: {path: scorer, dtype: float32}
reward: scorer
"""


@pytest.mark.slow
def test_the_commands_run(tmp_path):
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    tiny_checkpoint(tmp_path / "policy")
    tiny_checkpoint(tmp_path / "scorer", head="score", seed=1)
    (tmp_path / "my.yaml").write_text(RECIPE)
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}>"}) for i in range(8)))
    _of_verl(tmp_path / "checkpoints/my-run/global_step_120/actor", tmp_path / "policy")
    said = {command: run(command, tmp_path) for command in commands(DOCUMENT)}
    assert len(said) == 4
    AutoModelForCausalLM.from_pretrained(tmp_path / "from-verl")
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "values").config.num_labels == 1


def _of_verl(role: Path, model: Path) -> None:
    """What one rank of verl saves of a model."""
    shutil.copytree(model, role / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(load_file(model / "model.safetensors"), role / "model_world_size_1_rank_0.pt")


@pytest.mark.parametrize("document", [DOCUMENT, "docs/failures.md"])
def test_the_keys_are_the_recipes(document):
    (text,) = blocks(document, "yaml run")
    assert set(yaml.safe_load(text)["run"]) <= set(members(Run))
