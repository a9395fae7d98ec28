"""Which modules layers are made of where Transformer Engine is installed (it is not, in tests)."""

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from rolemesh.parallel import spec
from rolemesh.parallel.attention import GroupedSelfAttention


@pytest.mark.parametrize("transformer_engine", [True, False])
def test_tp_above_the_kv_heads_is_handled_with_and_without_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, transformer_engine: bool
):
    layer = get_gpt_layer_local_spec()  # stands in for Transformer Engine's: the same tree of modules
    monkeypatch.setattr(spec, "uses_transformer_engine", lambda device: transformer_engine)
    monkeypatch.setattr(spec, "get_gpt_layer_with_transformer_engine_spec", lambda qk_layernorm: layer)
    built = spec.block_spec(2, qk_norm=False, device=torch.device("cpu"))
    layers = [built] if transformer_engine else built.layer_specs
    assert all(layer.submodules.self_attention.module is GroupedSelfAttention for layer in layers)
