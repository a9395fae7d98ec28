"""Generalised advantage estimation and discounted sums as one parallel scan over time."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512  # of a row, four numbers a thread: a scan in float64 takes many registers


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns [b, R] of `rewards` and `values` [b, R], 0 outside of the bool `mask`."""
    advantages = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    returns = torch.empty_like(advantages)
    _scan(rewards, values.contiguous(), mask, gamma, lam, advantages, returns)
    return advantages, returns


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted sums [b, R] of the kept `rewards` from each position on, 0 outside of the bool `mask`."""
    returns = torch.empty(rewards.shape, dtype=rewards.dtype, device=rewards.device)
    _scan(rewards, None, mask, gamma, 1.0, returns, None)  # advantages over a value that is 0 everywhere
    return returns


def _scan(
    rewards: Tensor,
    values: Tensor | None,
    mask: Tensor,
    gamma: float,
    lam: float,
    advantages: Tensor,
    returns: Tensor | None,
) -> None:
    n_rows, n_steps = rewards.shape
    if n_rows == 0 or n_steps == 0:
        return
    block = min(_BLOCK, max(triton.next_power_of_2(n_steps), 32))
    with torch.cuda.device_of(rewards):
        _scan_kernel[(n_rows,)](
            rewards.contiguous(),
            values,
            mask.contiguous(),
            advantages,
            returns,
            n_steps,
            gamma,
            lam,
            BLOCK=block,
            num_warps=4,
        )


@triton.jit
def _then(first_factor, first_term, factor, term):
    """x -> factor * (first_factor * x + first_term) + term, as one factor and one term."""
    return factor * first_factor, factor * first_term + term


@triton.jit
def _scan_kernel(
    rewards,
    values,
    mask,
    advantages,
    returns,
    n_steps,
    gamma: tl.float64,
    lam: tl.float64,
    BLOCK: tl.constexpr,
):
    """One program a row, from its end in blocks of time, in float64.

    With d_t = r_t - v_t and x_t = v_t + lam * A_t, the recurrence is A_t = d_t + gamma * x_(t+1), where
    x_t = v_t + lam * d_t + gamma * lam * x_(t+1) is one linear scan and t+1 the next kept position; the
    others are the identity. Reading the scan's terms one position later makes it an exclusive one.
    Time runs backwards in the addresses, as a forward scan is Triton's best tested one.
    """
    gamma = tl.full((), gamma, tl.float64)
    lam = tl.full((), lam, tl.float64)
    row = tl.program_id(0).to(tl.int64) * n_steps
    lane = tl.arange(0, BLOCK)
    carry = tl.full((), 0.0, tl.float64)  # x at the first kept position behind the block
    for done in range(0, n_steps, BLOCK):
        t = n_steps - 1 - done - lane
        inside = t >= 0
        here = row + t
        later = inside & (t + 1 < n_steps)
        kept_later = tl.load(mask + here + 1, mask=later, other=False)
        term = tl.load(rewards + here + 1, mask=later, other=0.0).to(tl.float64)
        if values is not None:
            value_later = tl.load(values + here + 1, mask=later, other=0.0).to(tl.float64)
            term = value_later + lam * (term - value_later)
        term = tl.where(kept_later, term, 0.0)
        factor = tl.where(kept_later, gamma * lam, 1.0)
        factor, term = tl.associative_scan((factor, term), 0, _then)
        following = factor * carry + term
        carry = tl.sum(tl.where(lane == BLOCK - 1, following, 0.0))

        kept = tl.load(mask + here, mask=inside, other=False)
        advantage = tl.load(rewards + here, mask=inside, other=0.0).to(tl.float64) + gamma * following
        if values is not None:
            value = tl.load(values + here, mask=inside, other=0.0).to(tl.float64)
            advantage -= value
            total = tl.where(kept, advantage + value, 0.0)
            tl.store(returns + here, total.to(returns.dtype.element_ty), mask=inside)
        advantage = tl.where(kept, advantage, 0.0)
        tl.store(advantages + here, advantage.to(advantages.dtype.element_ty), mask=inside)
