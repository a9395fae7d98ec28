"""Qwen2: the common decoder with biases on query, key and value."""

from collections.abc import Mapping

from rolemesh.parallel.weights.families.decoder import WeightMap, decoder_map, qkv
from rolemesh.parallel.weights.pieces import Rule
from rolemesh.placement.model import ModelShape


def weight_map(shape: ModelShape) -> WeightMap:
    """Qwen2's weight map."""
    return decoder_map(shape, _biases)


def _biases(shape: ModelShape, prefix: str) -> Mapping[str, Rule]:
    return {"self_attention.linear_qkv.bias": qkv(shape, prefix, "bias")}
