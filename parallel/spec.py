"""Which modules a decoder layer is made of."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from rolemesh.parallel.attention import CausalAttention, GroupedSelfAttention, RMSNorm


def uses_transformer_engine(device: torch.device) -> bool:
    """Whether layers on `device` are Transformer Engine's (their norms are then fused into linear layers)."""
    return device.type == "cuda" and find_spec("transformer_engine") is not None


def block_spec(
    n_layers: int, *, qk_norm: bool, device: torch.device
) -> ModuleSpec | TransformerBlockSubmodules:
    """Spec of a stage of `n_layers` layers: Transformer Engine's modules where they can run, else torch's."""
    if uses_transformer_engine(device):
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)
        layer.submodules.self_attention.module = GroupedSelfAttention
        return layer
    layer = get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention
    attention.module = GroupedSelfAttention
    attention.submodules.core_attention = CausalAttention
    if qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * n_layers, layer_norm=RMSNorm)
