"""Which modules layers are made of where Transformer Engine is installed (it is not, in tests)."""

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer

from rolemesh.parallel import spec
from rolemesh.parallel.attention import GroupedSelfAttention
from rolemesh.placement.model import Experts, ModelShape


@pytest.mark.parametrize("transformer_engine", [True, False])
def test_tp_above_the_kv_heads_is_handled_with_and_without_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, transformer_engine: bool
):
    layer = get_gpt_layer_local_spec()  # stands in for Transformer Engine's: the same tree of modules
    monkeypatch.setattr(spec, "uses_transformer_engine", lambda device: transformer_engine)
    monkeypatch.setattr(spec, "get_gpt_layer_with_transformer_engine_spec", lambda **_: layer)
    shape = ModelShape("llama", 2, 8, 16, 2, 2, 4, 32, 64)
    built = spec.block_spec(shape, range(2), torch.device("cpu")).layer_specs
    assert len(built) == 2
    assert all(layer.submodules.self_attention.module is GroupedSelfAttention for layer in built)


def test_layers_with_experts_are_where_the_model_has_them():
    experts = Experts(4, 2, 16, dense_layers=(0, 2))
    shape = ModelShape("qwen3_moe", 4, 8, 16, 2, 2, 4, 32, 64, moe=experts)
    built = spec.block_spec(shape, range(1, 4), torch.device("cpu")).layer_specs
    assert [layer.submodules.mlp.module is MoELayer for layer in built] == [True, False, True]
