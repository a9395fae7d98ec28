"""Mistral: the common decoder; its sliding window is attention's, no weight."""

from rolemesh.parallel.weights.families.decoder import WeightMap, decoder_map
from rolemesh.placement.model import ModelShape


def weight_map(shape: ModelShape) -> WeightMap:
    """Mistral's weight map."""
    return decoder_map(shape)
