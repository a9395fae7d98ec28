"""Qwen3: the common decoder with a norm over each query and key head."""

from collections.abc import Mapping

from rolemesh.parallel.weights.families.decoder import WeightMap, decoder_map
from rolemesh.parallel.weights.pieces import HfTensor, Replicated, Rule
from rolemesh.placement.model import ModelShape


def weight_map(shape: ModelShape) -> WeightMap:
    """Qwen3's weight map."""
    return decoder_map(shape, head_norms)


def head_norms(shape: ModelShape, prefix: str) -> Mapping[str, Rule]:
    """Norms of a layer's query and key heads."""
    q_norm = HfTensor(f"{prefix}self_attn.q_norm.weight", (shape.head_dim,))
    k_norm = HfTensor(f"{prefix}self_attn.k_norm.weight", (shape.head_dim,))
    return {
        "self_attention.q_layernorm.weight": Replicated(q_norm),
        "self_attention.k_layernorm.weight": Replicated(k_norm),
    }
