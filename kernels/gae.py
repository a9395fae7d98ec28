"""Generalised advantage estimation (Schulman et al. 2016)."""

from typing import Any

import torch
from torch import Tensor

from rolemesh.kernels.forms import Kernel


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
    return _gae(token_level_rewards.detach(), values.detach(), response_mask, gamma, lam)


@torch.library.custom_op("rolemesh::gae", mutates_args=())
def _gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    dtype = _result_dtype(rewards, values)
    return _kernel(rewards.to(dtype), values.to(dtype), mask.bool(), gamma, lam)


@_gae.register_fake
def _(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    result = values.new_empty(values.shape, dtype=_result_dtype(rewards, values))
    return result, torch.empty_like(result)


def _result_dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def gae_reference(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [b, R] by a loop over time in float64: the plain form."""
    advantages = torch.zeros_like(values)
    next_value = running = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    for t in reversed(range(values.shape[1])):
        value, keep = values[:, t].double(), mask[:, t]
        delta = rewards[:, t].double() + gamma * next_value - value
        running = torch.where(keep, delta + gamma * lam * running, running)
        next_value = torch.where(keep, value, next_value)
        advantages[:, t] = torch.where(keep, running, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def _cpp(
    cpu: Any, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    advantages, returns = values.new_empty(values.shape), values.new_empty(values.shape)
    cpu.gae(
        rewards.contiguous(),
        values.contiguous(),
        mask.contiguous().view(torch.uint8),
        gamma,
        lam,
        advantages,
        returns,
        torch.get_num_threads(),
    )
    return advantages, returns


_kernel = Kernel("gae", reference=gae_reference, cpp=_cpp, triton="advantages")
