"""Weight maps, one file per family, found by the `model_type` of a Hugging Face configuration.

A family's file holds `weight_map(shape) -> WeightMap`; nothing else has to know of it.
"""

from functools import lru_cache
from importlib import import_module

from rolemesh.parallel.weights.families.decoder import WeightMap
from rolemesh.placement.model import ModelShape

__all__ = ["WeightMap", "family_map"]


@lru_cache(maxsize=8)
def family_map(shape: ModelShape) -> WeightMap:
    """The weight map of the shape's family (`ModelShape` has refused families without one)."""
    return import_module(f"{__name__}.{shape.family}").weight_map(shape)
