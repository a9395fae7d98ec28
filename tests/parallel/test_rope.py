"""Rotary frequencies, to the bit those of transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rolemesh.parallel.rope import inverse_frequencies, rotation_scale, softmax_scale
from rolemesh.placement.model import ModelShape

DATA = Path(__file__).parents[1] / "data"
YARN = {
    "plain": {},
    "one mscale": {"mscale": 1.0},
    "two mscales": {"mscale": 0.8, "mscale_all_dim": 0.6},
    "given": {"attention_factor": 1.25},
    "not rounded": {"truncate": False},
    "slow and fast": {"beta_fast": 16, "beta_slow": 2},
}


@pytest.mark.parametrize("name", ["llama-3.1-70b", "llama-3.1-405b", "qwen3-235b-a22b"])
def test_published_decoders_turn_as_in_transformers(name: str):
    folder = DATA / name
    shape = ModelShape.from_config(json.loads((folder / "config.json").read_text()))
    reference = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))
    assert torch.equal(inverse_frequencies(shape), reference.inv_freq)
    assert rotation_scale(shape) == reference.attention_scaling == 1.0
    assert softmax_scale(shape) == shape.head_dim**-0.5


@pytest.mark.parametrize("changes", YARN.values(), ids=YARN)
def test_yarn_turns_and_scales_as_in_transformers(changes: dict[str, object]):
    config = json.loads((DATA / "deepseek-v3" / "config.json").read_text())
    kept = {"factor", "original_max_position_embeddings", "rope_type"}
    scaling = {key: value for key, value in config["rope_scaling"].items() if key in kept}
    config["rope_scaling"] = scaling | changes
    shape = ModelShape.from_config(config)
    sizes = {key: value for key, value in config.items() if key != "model_type"}
    theirs = AutoConfig.for_model("deepseek_v3", **sizes)
    reference = DeepseekV3RotaryEmbedding(theirs)
    assert torch.equal(inverse_frequencies(shape), reference.inv_freq)
    assert rotation_scale(shape) == pytest.approx(reference.attention_scaling, rel=1e-12)
    with torch.device("meta"):
        attention = DeepseekV3Attention(theirs, 0)
    assert softmax_scale(shape) == pytest.approx(attention.scaling, rel=1e-12)
