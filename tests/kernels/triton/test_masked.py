import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from golden import match
from torch import Tensor

Kernels = Callable[[str], ModuleType]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CASES = [*((n, torch.float32) for n in (0, 1, 7, 1024, 5001)), *((1000, dtype) for dtype in DTYPES)]


def masked_values(n: int, dtype: torch.dtype, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """NaN and inf outside of the mask."""
    generator = torch.Generator().manual_seed(n)
    values = (torch.randn(n, generator=generator, dtype=torch.float64) + shift).to(dtype)
    mask = torch.rand(n, generator=generator) < 0.6
    values[~mask] = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype).repeat(n)[: int((~mask).sum())]
    return values, mask


@pytest.mark.parametrize(("n", "dtype"), CASES)
def test_moments_equal_two_passes_in_float64(
    n: int, dtype: torch.dtype, kernels: Kernels, device: torch.device
):
    for shift in (0.0, 1e3):
        values, mask = masked_values(n, dtype, shift)
        kept = values[mask].double()
        mean = kept.mean() if len(kept) else torch.tensor(0.0)
        truth = torch.tensor([len(kept), mean, (kept - mean).square().sum()], dtype=torch.float64)
        found = kernels("masked").masked_moments(values.to(device), mask.to(device))
        match(found.cpu(), truth, rtol=1e-11, atol=1e-11)


def test_moments_of_many_parts_and_of_nothing_kept(
    kernels: Kernels, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    module = kernels("masked")
    monkeypatch.setattr(module, "_BLOCK", 128)
    values, mask = masked_values(1500, torch.float32, 1e6)
    mask[300:900] = False  # parts that keep nothing
    kept = values[mask].double()
    truth = torch.stack([torch.tensor(float(len(kept))), kept.mean(), (kept - kept.mean()).square().sum()])
    for most in (1, 3, 1024):
        monkeypatch.setattr(module, "_MAX_PARTS", most)
        found = module.masked_moments(values.to(device), mask.to(device))
        match(found.cpu(), truth, rtol=1e-10, atol=0)  # a part's mean of 1e6 is rounded to 1e-10
        assert torch.equal(found, module.masked_moments(values.to(device), mask.to(device)))
    nothing = module.masked_moments(values.to(device), torch.zeros_like(mask, device=device))
    assert nothing.tolist() == [0, 0, 0]


def test_nan_that_is_kept_stays_visible(kernels: Kernels, device: torch.device):
    values, mask = torch.randn(3000), torch.ones(3000, dtype=torch.bool)
    values[1500] = math.nan
    found = kernels("masked").masked_moments(values.to(device), mask.to(device))
    assert found[0] == 3000
    assert found[1:].isnan().all()


@pytest.mark.parametrize(("n", "dtype"), CASES)
def test_normalize_equals_float64_and_is_0_outside(
    n: int, dtype: torch.dtype, kernels: Kernels, device: torch.device
):
    values, mask = masked_values(n, dtype)
    numbers = torch.tensor([0.3, 1.7, -0.2], dtype=torch.float64)
    found = kernels("masked").masked_normalize(values.to(device), mask.to(device), numbers.to(device))
    assert found.dtype == dtype
    truth = torch.where(mask, (values.double() - 0.3) * 1.7 - 0.2, 0.0)
    step = {torch.float64: 1e-15, torch.float32: 1e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    match(found.cpu(), truth, rtol=step, atol=step * 1e-3)
