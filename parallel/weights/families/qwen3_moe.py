"""Qwen3-MoE: Qwen3 with mixtures of experts in all layers but those that the configuration leaves dense."""

from rolemesh.parallel.weights.families.decoder import WeightMap, decoder_map
from rolemesh.parallel.weights.families.mixture import mixture
from rolemesh.parallel.weights.families.qwen3 import head_norms
from rolemesh.placement.model import ModelShape


def weight_map(shape: ModelShape) -> WeightMap:
    """Qwen3-MoE's weight map."""
    return decoder_map(shape, head_norms, experts=mixture())
