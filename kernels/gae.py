"""Generalised advantage estimation (Schulman et al. 2016) and discounted returns."""

from typing import Any

import torch
from torch import Tensor

from rolemesh.kernels.arrays import check_rows, mask_bytes, wide_dtype
from rolemesh.kernels.forms import Kernel
from rolemesh.kernels.library import torch_op


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
        They are summed in float64.

    Raises:
        ValueError: shapes differ or are not [b, R], or gamma or lam is out of range.
    """
    check_rows("rewards, values and mask", token_level_rewards, values, response_mask)
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gamma is {gamma} and lam is {lam}, both must lie in [0, 1]")
    return _gae(token_level_rewards.detach(), values.detach(), response_mask, gamma, lam)


def discounted_returns(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """Sum of each token's reward and the later ones, discounted by `gamma` for every token between.

    Positions outside of the mask are skipped as in `gae`: they get 0, are not read and do not discount.
    `token_level_rewards` and `response_mask` are [b, R]; returns [b, R] float64 if the rewards are, else
    float32, without gradient. ValueError when the shapes differ or `gamma` is not in [0, 1].
    """
    check_rows("rewards and mask", token_level_rewards, response_mask)
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}, must lie in [0, 1]")
    return _discounted_returns(token_level_rewards.detach(), response_mask, gamma)


def _fake_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    result = values.new_empty(values.shape, dtype=wide_dtype(rewards, values))
    return result, torch.empty_like(result)


@torch_op(fake=_fake_gae)
def _gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    dtype = wide_dtype(rewards, values)
    return _gae_kernel(rewards.to(dtype), values.to(dtype), mask.bool(), gamma, lam)


def _fake_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    return rewards.new_empty(rewards.shape, dtype=wide_dtype(rewards))


@torch_op(fake=_fake_returns)
def _discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    return _returns_kernel(rewards.to(wide_dtype(rewards)), mask.bool(), gamma)


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


def discounted_returns_reference(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted sums of the kept rewards by a loop over time in float64: the plain form."""
    return gae_reference(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[0]


def _gae_cpp(
    cpu: Any, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    advantages, returns = values.new_empty(values.shape), values.new_empty(values.shape)
    cpu.gae(
        rewards.contiguous(),
        values.contiguous(),
        mask_bytes(mask),
        gamma,
        lam,
        advantages,
        returns,
        torch.get_num_threads(),
    )
    return advantages, returns


def _returns_cpp(cpu: Any, rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    returns = rewards.new_empty(rewards.shape)
    cpu.discounted_returns(rewards.contiguous(), mask_bytes(mask), gamma, returns, torch.get_num_threads())
    return returns


_gae_kernel = Kernel("gae", reference=gae_reference, cpp=_gae_cpp, triton="advantages")
_returns_kernel = Kernel(
    "discounted_returns", reference=discounted_returns_reference, cpp=_returns_cpp, triton="advantages"
)
