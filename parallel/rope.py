"""Rotary positions as transformers computes them: frequencies, and what YaRN scales besides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rolemesh.placement.model import ModelShape


def inverse_frequencies(shape: ModelShape) -> Tensor:
    """Radians per position of each rotating pair, fp32 [d / 2], to the bit those of transformers."""
    dim = shape.latent.rope_dim if shape.latent else shape.head_dim
    plain = 1.0 / (shape.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))
    scaling = shape.rope_scaling
    if scaling is None:
        return plain
    if scaling["rope_type"] == "llama3":
        return _llama3(plain, scaling, shape.max_positions)
    return _yarn(plain, scaling, shape)


def rotation_scale(shape: ModelShape) -> float:
    """What cosines and sines are multiplied by: YaRN's attention factor, else 1."""
    scaling = shape.rope_scaling
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)
    factor, of_cos, of_all = _factor(scaling, shape), scaling.get("mscale"), scaling.get("mscale_all_dim")
    if of_cos and of_all:
        return _mscale(factor, of_cos) / _mscale(factor, of_all)
    return _mscale(factor, 1.0)


def softmax_scale(shape: ModelShape) -> float:
    """What query times key is multiplied by: 1 / sqrt(d), with DeepSeek's correction for YaRN."""
    scale = shape.head_dim**-0.5
    scaling = shape.rope_scaling or {}
    if shape.latent and (of_all := scaling.get("mscale_all_dim")):
        scale *= _mscale(scaling["factor"], of_all) ** 2
    return scale


def _llama3(plain: Tensor, scaling: Mapping[str, Any], max_positions: int) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones stay, those between are blended."""
    trained = scaling.get("original_max_position_embeddings", max_positions)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > trained / low, plain / factor, plain)
    blend = (trained / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched / factor + blend * stretched
    between = ~(wavelength < trained / high) * ~(wavelength > trained / low)
    return torch.where(between, blended, stretched)


def _yarn(plain: Tensor, scaling: Mapping[str, Any], shape: ModelShape) -> Tensor:
    """Arxiv 2309.00071: pairs that turn often enough in the trained length stay, the others are stretched."""
    dim, base = 2 * len(plain), shape.rope_theta
    trained = scaling["original_max_position_embeddings"]

    def pair_of(turns: float) -> float:
        return (dim * math.log(trained / (turns * 2 * math.pi))) / (2 * math.log(base))

    low, high = pair_of(scaling.get("beta_fast") or 32), pair_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low), 0, 1)
    kept = 1 - ramp
    turned = shape.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    return 1.0 / (_factor(scaling, shape) * turned) * (1 - kept) + 1.0 / turned * kept


def _factor(scaling: Mapping[str, Any], shape: ModelShape) -> float:
    given = scaling.get("factor")
    if given is None:
        return float(shape.max_positions / scaling["original_max_position_embeddings"])
    return float(given)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
