import math

import pytest
import torch
from golden import match
from ops import check_compiles, check_op
from torch import Tensor

from rolemesh.kernels import discounted_returns, gae

SHAPES = [(7, 33), (9, 16), (16, 64), (1, 1), (3, 1), (1, 40), (0, 5), (5, 0)]


def batch(n_rows: int, n_steps: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and a mask with holes; the first row is empty, and NaN lies outside of the mask."""
    generator = torch.Generator().manual_seed(n_rows * 1000 + n_steps)
    rewards, values = torch.randn(2, n_rows, n_steps, generator=generator, dtype=dtype)
    mask = torch.rand(n_rows, n_steps, generator=generator) < 0.7
    if n_rows > 1:
        mask[0] = False
    return rewards.masked_fill(~mask, math.nan), values.masked_fill(~mask, math.inf), mask


def truth(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns as float64 sums over the later kept tokens, without a recursion."""
    advantages, returns = torch.zeros(2, *rewards.shape, dtype=torch.float64)
    for row, keep in enumerate(mask):
        r, v = rewards[row, keep].double(), values[row, keep].double()
        deltas = r + gamma * torch.cat([v[1:], v.new_zeros(1)])[: len(v)] - v
        weights = (gamma * lam) ** torch.arange(len(r), dtype=torch.float64)
        sums = torch.tensor([(deltas[t:] * weights[: len(r) - t]).sum() for t in range(len(r))])
        advantages[row, keep] = sums.double()
        returns[row, keep] = sums.double() + v
    return advantages, returns


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_form_equals_sums_over_the_kept_tokens(shape: tuple[int, int], dtype: torch.dtype, form: str):
    rewards, values, mask = batch(*shape, dtype)
    expected = truth(rewards, values, mask, 0.99, 0.9)
    for output, right in zip(gae(rewards, values, mask, 0.99, 0.9), expected, strict=True):
        assert output.dtype == dtype
        assert not output[~mask].any()
        match(output, right, rtol=1e-5, atol=1e-5)
    returns = discounted_returns(rewards, mask, 0.97)
    assert returns.dtype == dtype
    match(returns, truth(rewards, torch.zeros_like(values), mask, 0.97, 1.0)[0], rtol=1e-5, atol=1e-5)


def test_a_long_row_keeps_its_digits(form: str):
    rewards, values = torch.full((2, 3000), 0.1), torch.zeros(2, 3000)
    advantages, _ = gae(rewards, values, torch.ones(2, 3000), 1.0, 1.0)
    match(advantages[:, 0], rewards.double().sum(dim=1), rtol=1e-7, atol=0)


def test_nan_inside_of_the_mask_stays_visible_and_in_its_row(form: str):
    rewards, values = torch.zeros(2, 40), torch.zeros(2, 40)
    rewards[1, 20] = math.nan
    for output in (
        *gae(rewards, values, torch.ones(2, 40), 0.9, 0.9),
        discounted_returns(rewards, rewards + 1, 0.9),
    ):
        assert output[1, :21].isnan().all()
        assert not output[0].any()
        assert not output[1, 21:].any()


def test_the_number_of_threads_changes_nothing():
    rewards, values, mask = batch(67, 600)
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2):
            torch.set_num_threads(n)
            results.append([*gae(rewards, values, mask, 0.99, 0.95), discounted_returns(rewards, mask, 0.9)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_with_lambda_one_returns_are_discounted_sums():
    rewards = torch.tensor([[1.0, 2.0, 4.0]])
    _, returns = gae(rewards, torch.randn(1, 3), torch.ones(1, 3), 0.5, 1.0)
    match(returns, torch.tensor([[3.0, 4.0, 4.0]]), rtol=0, atol=1e-6)
    assert discounted_returns(rewards, torch.ones(1, 3), 0.5).tolist() == [[3, 4, 4]]
    assert discounted_returns(rewards, torch.tensor([[1, 0, 1]]), 0.5).tolist() == [[3, 0, 4]]


def test_any_mask_strides_and_half_precision_give_the_same():
    rewards, values, mask = batch(4, 9)
    expected = gae(rewards, values, mask, 0.9, 0.8)
    for other in (mask.long(), mask.float(), mask.T.contiguous().T):
        assert torch.equal(gae(rewards.T.contiguous().T, values, other, 0.9, 0.8)[0], expected[0])
    half = gae(rewards.bfloat16(), values.bfloat16(), mask, 0.9, 0.8)[0]
    assert half.dtype == torch.float32
    match(half, expected[0], rtol=0, atol=0.1)


def test_no_gradient_flows_to_the_values():
    rewards, values, mask = batch(2, 3)
    assert not gae(rewards, values.requires_grad_(), mask, 1.0, 1.0)[1].requires_grad
    assert not discounted_returns(rewards.requires_grad_(), mask, 1.0).requires_grad


@pytest.mark.full
def test_the_operations_are_known_to_torch():
    rewards, values, mask = batch(3, 20)
    check_op("gae", rewards, values, mask, 0.9, 0.8)
    check_op("discounted_returns", rewards, mask, 0.9)
    check_compiles(lambda r, v, m: torch.stack(gae(r, v, m, 0.9, 0.8)), rewards, values, mask)
    check_compiles(lambda r, m: discounted_returns(r, m, 0.9), rewards, mask)
    assert gae(*(x.to("meta") for x in (rewards, values, mask)), 0.9, 0.8)[0].shape == (3, 20)


def test_arguments_that_do_not_fit_are_named():
    rewards, values, mask = batch(2, 3)
    with pytest.raises(ValueError, match=r"\[2, 3\], \[2, 3\], \[2, 2\]"):
        gae(rewards, values, mask[:, :2], 1.0, 1.0)
    with pytest.raises(ValueError, match=r"gamma is 1.1"):
        gae(rewards, values, mask, 1.1, 1.0)
    with pytest.raises(ValueError, match=r"gamma is -1"):
        discounted_returns(rewards, mask, -1)
