import math

import pytest
import torch
from golden import match
from torch import Tensor

from rolemesh.kernels import gae


def batch(n_rows: int, n_steps: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n_rows * 1000 + n_steps)
    rewards, values = torch.randn(2, n_rows, n_steps, generator=generator, dtype=dtype)
    return rewards, values, torch.rand(n_rows, n_steps, generator=generator) < 0.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7, 33), (1, 1), (3, 1), (0, 5), (5, 0)])
def test_the_compiled_form_equals_the_plain_one(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    rewards, values, mask = batch(*shape, dtype)
    compiled = gae(rewards, values, mask, 0.99, 0.95)
    monkeypatch.setenv("ROLEMESH_KERNELS", "reference")
    plain = gae(rewards, values, mask, 0.99, 0.95)
    for left, right in zip(compiled, plain, strict=True):
        assert left.dtype == dtype
        match(left, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("forced", ["", "reference"])
def test_gae_skips_what_is_outside_of_the_mask(forced: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLEMESH_KERNELS", forced)
    rewards, values, mask = batch(6, 20)
    rewards, values = rewards.masked_fill(~mask, math.nan), values.masked_fill(~mask, math.inf)
    advantages, returns = gae(rewards, values, mask, 0.99, 0.9)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()
    for row in range(6):
        keep = mask[row]
        dense = rewards[row, keep], values[row, keep], torch.ones(int(keep.sum()))
        for output, expected in zip(
            (advantages, returns), gae(*(x[None] for x in dense), 0.99, 0.9), strict=True
        ):
            match(output[row, keep], expected[0], rtol=1e-6, atol=1e-6)


def test_with_lambda_one_returns_are_discounted_sums():
    rewards = torch.tensor([[1.0, 2.0, 4.0]])
    _, returns = gae(rewards, torch.randn(1, 3), torch.ones(1, 3), 0.5, 1.0)
    match(returns, torch.tensor([[3.0, 4.0, 4.0]]), rtol=0, atol=1e-6)


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


def test_arguments_that_do_not_fit_are_named():
    rewards, values, mask = batch(2, 3)
    with pytest.raises(ValueError, match=r"\[2, 3\], \[2, 3\], \[2, 2\]"):
        gae(rewards, values, mask[:, :2], 1.0, 1.0)
    with pytest.raises(ValueError, match=r"gamma is 1.1"):
        gae(rewards, values, mask, 1.1, 1.0)
