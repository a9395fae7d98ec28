"""The built-in engine takes a mixture of experts by the names in its checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_checkpoint
from transformers import AutoModelForCausalLM

from rolemesh.engine.rollout.hf import HFRollout
from rolemesh.engine.rollout.sampling import RolloutError


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_weights_by_stored_names_make_the_model_that_transformers_loads(tmp_path: Path, family: str):
    source = tiny_checkpoint(tmp_path, family)
    weights = load_file(source / "model.safetensors")
    engine = HFRollout(source, "cpu", "float32", max_params=10**9)
    engine.load_weights(weights.items())
    wanted = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    found = engine.model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(tensor) for name, tensor in wanted.items())
    lost = next(name for name in weights if "experts.3." in name)
    with pytest.raises(RolloutError, match=f"1 parameters got no weights: {lost}"):
        engine.load_weights((name, tensor) for name, tensor in weights.items() if name != lost)
    with pytest.raises(RolloutError, match=r"no parameter 'model\.layers\.0\.mlp\.experts\.9"):
        engine.load_weights([("model.layers.0.mlp.experts.9.up_proj.weight", torch.zeros(1))])


def test_the_bias_that_chooses_experts_stays_in_fp32(tmp_path: Path):
    engine = HFRollout(tiny_checkpoint(tmp_path, "deepseek_v3"), "cpu", "bfloat16", max_params=10**9)
    biases = {
        buffer.dtype
        for name, buffer in engine.model.named_buffers()
        if name.endswith("e_score_correction_bias")
    }
    assert biases == {torch.float32}
