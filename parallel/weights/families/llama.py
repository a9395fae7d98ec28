"""Llama: the common decoder as it is."""

from rolemesh.parallel.weights.families.decoder import WeightMap, decoder_map
from rolemesh.placement.model import ModelShape


def weight_map(shape: ModelShape) -> WeightMap:
    """Llama's weight map."""
    return decoder_map(shape)
