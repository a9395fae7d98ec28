"""Weights as a rollout's ranks keep them for their engine: `from kept import keep`."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rolemesh.engine.rollout.kept_weights import WeightKeeper
from rolemesh.parallel.weights.transfer_sides import EngineSide
from rolemesh.placement.model import ModelShape


def engine_side(path: Path, tp: int = 1, dtype: torch.dtype = torch.float32) -> EngineSide:
    """One engine over `tp` ranks for the model of a Hugging Face folder."""
    return EngineSide(ModelShape.from_config(json.loads((path / "config.json").read_text())), dtype, tp)


def keep(side: EngineSide, weights: Mapping[str, Tensor]) -> list[WeightKeeper]:
    """The keeper of each tp rank, filled from whole tensors by Hugging Face name."""
    keepers = []
    for rank in range(side.tp):
        keepers.append(WeightKeeper(side, rank))
        for tensor, part in side.parts(rank):
            own = weights[tensor.name].detach()[part]
            keepers[rank].place(tensor.name, tuple(own.shape), own.dtype).copy_(own)
    return keepers
