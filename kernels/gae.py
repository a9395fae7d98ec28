"""Generalised advantage estimation (Schulman et al. 2016)."""

import os

import torch
from torch import Tensor

from rolemesh.kernels import _cpu  # type: ignore[attr-defined]  # compiled


def gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages, not whitened, and returns = advantages + values, both 0 outside of the mask.

    A position outside of the mask is skipped as if it were not there, after the response as in its middle
    (tool turns), and what lies in it (NaN, inf) is never read.

    Args:
        token_level_rewards, values: [b, R] float. values[:, t] is the value of the state before token t.
        response_mask: [b, R] bool, integer or float; tokens that count.
        gamma, lam: discount and lambda, both in [0, 1].

    Returns:
        advantages and returns [b, R], float64 if an input is, else float32; no gradient flows through them.

    Raises:
        ValueError: shapes differ or are not [b, R], or gamma or lam is out of range.
    """
    shapes = [[*tensor.shape] for tensor in (token_level_rewards, values, response_mask)]
    if values.ndim != 2 or shapes.count(shapes[0]) != 3:
        raise ValueError(f"rewards, values and mask must all be [b, R], got {', '.join(map(str, shapes))}")
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gamma is {gamma} and lam is {lam}, both must lie in [0, 1]")
    dtype = torch.promote_types(torch.float32, torch.promote_types(token_level_rewards.dtype, values.dtype))
    rewards, values = token_level_rewards.detach().to(dtype), values.detach().to(dtype)
    mask = response_mask.bool()
    if values.device.type == "cpu" and os.environ.get("ROLEMESH_KERNELS") != "reference":
        advantages = torch.empty(values.shape, dtype=dtype)
        as_bytes = mask.contiguous().view(torch.uint8)
        _cpu.gae(rewards.contiguous(), values.contiguous(), as_bytes, gamma, lam, advantages)
    else:
        advantages = gae_reference(rewards, values, mask, gamma, lam)
    return advantages, torch.where(mask, advantages + values, 0.0)


def gae_reference(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Advantages [b, R] by a loop over time in float64: the plain form that the others are compared with."""
    advantages = torch.zeros_like(values)
    next_value = running = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    for t in reversed(range(values.shape[1])):
        value, keep = values[:, t].double(), mask[:, t]
        delta = rewards[:, t].double() + gamma * next_value - value
        running = torch.where(keep, delta + gamma * lam * running, running)
        next_value = torch.where(keep, value, next_value)
        advantages[:, t] = torch.where(keep, running, 0.0)
    return advantages
