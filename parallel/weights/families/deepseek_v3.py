"""DeepSeek-V3: DeepSeek-V2's layers with a router that has a correction bias for each expert.

Its checkpoints hold layers for multi-token prediction behind the last one, which are passed over as
transformers does.
"""

from rolemesh.parallel.weights.families.decoder import WeightMap, decoder_map
from rolemesh.parallel.weights.families.deepseek_v2 import latent_attention
from rolemesh.parallel.weights.families.mixture import mixture
from rolemesh.placement.model import ModelShape


def weight_map(shape: ModelShape) -> WeightMap:
    """DeepSeek-V3's weight map."""
    rotary = WeightMap.derived
    predicted = rf"model\.layers\.{shape.n_layers}\..*"
    return decoder_map(
        shape,
        attention=latent_attention,
        experts=mixture(),
        derived=f"{rotary}|{predicted}",
    )
