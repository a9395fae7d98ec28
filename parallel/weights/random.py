"""Weights for a run that only measures: none are read, and no activation overflows."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

STD = 0.02  # of the usual initialisation


@torch.no_grad()
def fill_random(parameters: Mapping[str, Tensor]) -> None:
    """Fill parameters, by megatron-core's names, in place: matrices with noise, scales with 1, others 0.

    What a parameter gets follows from its name and shape, so replicas have the same.
    """
    for name, parameter in parameters.items():
        if parameter.dim() > 1:
            seed = zlib.crc32(name.encode())
            parameter.normal_(0.0, STD, generator=torch.Generator(parameter.device).manual_seed(seed))
        else:
            is_scale = "norm" in name.lower() and name.endswith("weight")
            parameter.fill_(1.0 if is_scale else 0.0)
