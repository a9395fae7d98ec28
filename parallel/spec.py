"""Which modules decoder layers are made of."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from rolemesh.parallel.attention import CausalAttention, GroupedSelfAttention, RMSNorm
from rolemesh.parallel.latent import LatentAttention
from rolemesh.parallel.router import TopKRouter
from rolemesh.placement.model import Experts, ModelShape


def uses_transformer_engine(device: torch.device) -> bool:
    """Whether layers on `device` are Transformer Engine's (their norms are then fused into linear layers)."""
    return device.type == "cuda" and find_spec("transformer_engine") is not None


def block_spec(shape: ModelShape, layers: range, device: torch.device) -> TransformerBlockSubmodules:
    """Spec of these layers of the model: Transformer Engine's modules where they can run, else torch's.

    Latent attention is our own, over torch's modules.
    """
    engine = uses_transformer_engine(device) and not shape.latent
    make = _engine_layer if engine else _torch_layer
    kinds = {n: shape.moe if n in shape.moe_layers else None for n in layers}
    made = {experts: make(shape, experts) for experts in set(kinds.values())}
    return TransformerBlockSubmodules(
        layer_specs=[made[kinds[n]] for n in layers], layer_norm=TENorm if engine else RMSNorm
    )


def _engine_layer(shape: ModelShape, experts: Experts | None) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts.n if experts else None, qk_layernorm=shape.qk_norm
    )
    layer.submodules.self_attention.module = GroupedSelfAttention
    return _routed(layer, experts)


def _torch_layer(shape: ModelShape, experts: Experts | None) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=experts.n if experts else None, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention
    if shape.latent:
        params = {"attn_mask_type": AttnMaskType.causal, "shape": shape}
        layer.submodules.self_attention = ModuleSpec(module=LatentAttention, params=params)
        return _routed(layer, experts)
    attention.module = GroupedSelfAttention
    attention.submodules.core_attention = CausalAttention
    if shape.qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    return _routed(layer, experts)


def _routed(layer: ModuleSpec, experts: Experts | None) -> ModuleSpec:
    """The layer with our router, if it has one."""
    if experts:
        layer.submodules.mlp.submodules.router = partial(TopKRouter, experts)
    return layer
