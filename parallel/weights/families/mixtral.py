"""Mixtral: the common decoder whose layers are all mixtures of experts."""

from rolemesh.parallel.weights.families.decoder import WeightMap, decoder_map
from rolemesh.parallel.weights.families.mixture import mixture
from rolemesh.placement.model import ModelShape


def weight_map(shape: ModelShape) -> WeightMap:
    """Mixtral's weight map, by the names in checkpoints (the modules of transformers 5 have others)."""
    return decoder_map(shape, experts=mixture("block_sparse_moe.", ("w1", "w3", "w2")))
