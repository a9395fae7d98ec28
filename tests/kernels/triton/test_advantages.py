import math
import os
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from golden import match
from torch import Tensor

from rolemesh.kernels.gae import gae_reference

Kernels = Callable[[str], ModuleType]
F32, F64 = torch.float32, torch.float64
# A row of several blocks; the interpreter takes a millisecond for each step of a scan.
LONG = 100 if os.environ.get("TRITON_INTERPRET") == "1" else 5000
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.fixture(autouse=True)
def short_blocks(kernels: Kernels, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(kernels("advantages"), "_BLOCK", 32)


def batch(n_rows: int, n_steps: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """With holes in the mask, one row without any token where there are three or more, and NaN outside."""
    generator = torch.Generator().manual_seed(n_rows * 1000 + n_steps)
    rewards, values = torch.randn(2, n_rows, n_steps, generator=generator, dtype=dtype)
    mask = torch.rand(n_rows, n_steps, generator=generator) < 0.7
    mask[2:3] = False
    return rewards.masked_fill(~mask, math.nan), values.masked_fill(~mask, math.inf), mask


@pytest.mark.parametrize(
    ("shape", "discount", "dtype"),
    [
        *((shape, (0.99, 0.95), F32) for shape in [(3, 20), (3, 1), (1, 32), (0, 5), (5, 0), (1, LONG)]),
        *(((2, 20), discount, F64) for discount in [(0.99, 0.95), (1.0, 1.0), (1.0, 0.0), (0.0, 0.9)]),
    ],
)
def test_gae_equals_a_loop_over_time(
    shape: tuple[int, int],
    discount: tuple[float, float],
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device,
):
    rewards, values, mask = batch(*shape, dtype)
    truth = gae_reference(rewards.double(), values.double(), mask, *discount)
    found = kernels("advantages").gae(rewards.to(device), values.to(device), mask.to(device), *discount)
    for output, expected in zip(found, truth, strict=True):
        assert output.dtype == dtype
        match(output.cpu(), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 20), F32), ((3, 1), F32), ((0, 5), F32), ((5, 0), F32), ((1, LONG), F64)]
)
def test_discounted_returns_equal_a_loop_over_time(
    shape: tuple[int, int], dtype: torch.dtype, kernels: Kernels, device: torch.device
):
    rewards, _, mask = batch(*shape, dtype)
    truth, running = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape[0], dtype=torch.float64)
    for t in reversed(range(shape[1])):
        running = torch.where(mask[:, t], rewards[:, t].double() + 0.97 * running, running)
        truth[:, t] = torch.where(mask[:, t], running, 0.0)
    found = kernels("advantages").discounted_returns(rewards.to(device), mask.to(device), 0.97)
    assert found.dtype == dtype
    match(found.cpu(), truth, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


def test_nan_in_a_kept_token_reaches_it_and_those_before(kernels: Kernels, device: torch.device):
    rewards, values = torch.randn(2, 1, 9, generator=torch.Generator().manual_seed(0))
    rewards[0, 4] = math.nan
    mask = torch.ones(1, 9, dtype=torch.bool)
    advantages, returns = kernels("advantages").gae(
        rewards.to(device), values.to(device), mask.to(device), 0.9, 0.9
    )
    expected = [True] * 5 + [False] * 4
    assert advantages.isnan()[0].tolist() == returns.isnan()[0].tolist() == expected


def test_rows_of_any_stride_give_the_same(kernels: Kernels, device: torch.device):
    rewards, values, mask = (tensor.to(device) for tensor in batch(2, 9, torch.float32))
    turned = [tensor.T.contiguous().T for tensor in (rewards, values, mask)]
    module = kernels("advantages")
    for left, right in zip(
        module.gae(*turned, 0.9, 0.8), module.gae(rewards, values, mask, 0.9, 0.8), strict=True
    ):
        assert torch.equal(left, right)
