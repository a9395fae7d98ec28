import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from golden import match
from torch import Tensor

Kernels = Callable[[str], ModuleType]
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
ROUNDING = {torch.float32: 2e-7, torch.float64: 1e-13}
F32, F64 = torch.float32, torch.float64
# Shape, mode, type, and whether there is a clip; the longest row takes several blocks.
CASES = [
    *(((4, 33), mode, F32, True) for mode in MODES),
    ((4, 33), MODES[0], F64, False),
    *((shape, MODES[2], F32, True) for shape in [(3, 1), (1, 1100), (0, 5), (5, 0)]),
]


def batch(shape: tuple[int, int], dtype: torch.dtype, n: int) -> tuple[list[Tensor], Tensor]:
    """n tensors with NaN outside of the mask, whose third row is empty."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    tensors = torch.randn(n, *shape, generator=generator, dtype=dtype)
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[2:3] = False
    return [tensor.masked_fill(~mask, math.nan) for tensor in tensors], mask


def weights(mask: Tensor, mode: str, denominator: float) -> Tensor:
    per_row = mask.sum(1, keepdim=True).clamp(min=1) if mode == "seq-mean-token-mean" else 1
    return mask.double() / per_row / denominator


@pytest.mark.parametrize(("shape", "mode", "dtype", "clipped"), CASES)
def test_policy_loss_and_gradient_equal_float64(
    shape: tuple[int, int],
    mode: str,
    dtype: torch.dtype,
    clipped: bool,
    kernels: Kernels,
    device: torch.device,
):
    dual_clip = 1.5 if clipped else math.inf
    (old, new, advantages), mask = batch(shape, dtype, 3)
    new[:1, :1] += 30.0  # beyond the bound of the log-ratio
    sums, grad = kernels("losses").policy_loss(
        *(tensor.to(device) for tensor in (old, new, advantages, mask)), 0.2, 0.3, dual_clip, mode, 7.0, 9.0
    )
    old, new, advantages = (torch.where(mask, x.double(), 0.0) for x in (old, new, advantages))
    new.requires_grad_()
    log_ratio = (new - old).clamp(-20, 20)
    ratio = log_ratio.exp()
    unlimited, limited = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.3)
    loss = torch.maximum(unlimited, limited)
    bound = torch.where(advantages < 0, -advantages * dual_clip, math.inf)
    lower = loss > bound
    total = (torch.minimum(loss, bound) * weights(mask, mode, 7.0)).sum()
    (expected,) = torch.autograd.grad(total, new)
    means = [(x * mask).sum() / 9.0 for x in ((limited > unlimited).double(), lower.double(), -log_ratio)]
    match(sums.cpu(), torch.stack([total, *means]).detach(), rtol=1e-12, atol=1e-12)
    assert grad.dtype == dtype
    match(grad.cpu(), expected, rtol=ROUNDING[dtype], atol=1e-30)


@pytest.mark.parametrize(("shape", "mode", "dtype", "clipped"), CASES)
def test_value_loss_and_gradient_equal_float64(
    shape: tuple[int, int],
    mode: str,
    dtype: torch.dtype,
    clipped: bool,
    kernels: Kernels,
    device: torch.device,
):
    value_clip = 0.5 if clipped else math.inf
    (values, returns, old_values), mask = batch(shape, dtype, 3)
    sums, grad = kernels("losses").value_loss(
        *(tensor.to(device) for tensor in (values, returns, old_values, mask)), value_clip, mode, 7.0, 9.0
    )
    values, returns, old_values = (torch.where(mask, x.double(), 0.0) for x in (values, returns, old_values))
    values.requires_grad_()
    square = (values - returns).square()
    limited = (values.clamp(old_values - value_clip, old_values + value_clip) - returns).square()
    total = (0.5 * torch.maximum(square, limited) * weights(mask, mode, 7.0)).sum()
    (expected,) = torch.autograd.grad(total, values)
    means = [(x * mask).sum() / 9.0 for x in ((limited > square).double(), values)]
    match(sums.cpu(), torch.stack([total, *means]).detach(), rtol=1e-12, atol=1e-12)
    assert grad.dtype == dtype
    match(grad.cpu(), expected, rtol=ROUNDING[dtype], atol=1e-30)


def test_nan_that_is_kept_stays_visible_in_losses_and_gradients(kernels: Kernels, device: torch.device):
    mask = torch.ones(2, 5, dtype=torch.bool, device=device)
    for position in range(3):
        inputs = [torch.randn(2, 5, device=device) for _ in range(3)]
        inputs[position][1, 2] = math.nan
        sums, grad = kernels("losses").policy_loss(*inputs, mask, 0.2, 0.2, 3.0, "token-mean", 1.0, 1.0)
        assert sums[0].isnan()
        assert grad.isnan().sum() == 1
        sums, grad = kernels("losses").value_loss(*inputs, mask, 0.5, "token-mean", 1.0, 1.0)
        assert sums[0].isnan()
        assert position == 2 or grad.isnan().sum() == 1


def kl_truth(left: Tensor, right: Tensor, kind: str) -> Tensor:
    r = right - left
    if kind == "k3":
        r = r.clamp(-20, 20)
        return (torch.expm1(r) - r).clamp(max=10)
    return {"k1": -r, "abs": r.abs(), "k2": 0.5 * r.square()}[kind]


@pytest.mark.parametrize(
    ("n", "dtype", "ref_dtype", "kind"),
    [
        *((1000, F32, F32, kind) for kind in ("k1", "abs", "k2", "k3")),
        *((7, F64, F64, kind) for kind in ("k1", "abs", "k2", "k3")),
        *((n, F32, F32, "k3") for n in (0, 1)),
        *((7, F32, dtype, "k3") for dtype in (F64, torch.bfloat16)),
        *((7, dtype, dtype, "k3") for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_kl_and_its_gradient_equal_float64(
    n: int, dtype: torch.dtype, ref_dtype: torch.dtype, kind: str, kernels: Kernels, device: torch.device
):
    generator = torch.Generator().manual_seed(n)
    left, right, grad = torch.randn(3, n, generator=generator, dtype=torch.float64)
    right[2:6] = left[2:6] + torch.tensor([25.0, -25.0, 3.0, 0.0])[: max(n - 2, 0)]
    left, grad, right = left.to(dtype), grad.to(dtype), right.to(ref_dtype)
    module = kernels("losses")
    found = module.kl(left.to(device), right.to(device), kind)
    slope = module.kl_backward(grad.to(device), left.to(device), right.to(device), kind)
    assert (found.dtype, slope.dtype) == (torch.promote_types(dtype, ref_dtype), dtype)
    at = left.double().requires_grad_()
    truth = kl_truth(at, right.double(), kind)
    (expected,) = torch.autograd.grad(truth, at, grad.double())
    step = {torch.float64: 1e-14, torch.float32: 1e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}
    match(found.cpu(), truth.detach(), rtol=step[found.dtype], atol=step[found.dtype] * 0.1)
    match(slope.cpu(), expected, rtol=step[dtype], atol=step[dtype] * 0.1)


def test_k3_keeps_its_digits_for_small_differences(kernels: Kernels, device: torch.device):
    left = torch.logspace(-12, 0, 60, dtype=torch.float64)
    left = torch.cat([left, -left])
    right = torch.zeros_like(left)
    found = kernels("losses").kl(left.to(device), right.to(device), "k3")
    r = -left
    series = sum(r**n / float(math.factorial(n)) for n in range(2, 25))
    match(found.cpu(), series, rtol=1e-13, atol=0)
    slope = kernels("losses").kl_backward(right.to(device) + 1, left.to(device), right.to(device), "k3")
    match(slope.cpu(), -torch.expm1(r), rtol=1e-13, atol=0)


def test_ties_have_the_mean_of_both_gradients(kernels: Kernels, device: torch.device):
    one = torch.ones(1, 1, dtype=torch.float64, device=device)
    mask = one.bool()
    # Values 1 and clipped 3 are as far from the target 2.
    _, grad = kernels("losses").value_loss(one, 2 * one, 4 * one, mask, 1.0, "token-mean", 1.0, 1.0)
    assert grad.item() == -0.5
    # A ratio of 1 is within the clip, and at the bound of the dual clip.
    _, grad = kernels("losses").policy_loss(one, one, -one, mask, 0.2, 0.2, 1.0, "token-mean", 1.0, 1.0)
    assert grad.item() == 0.5


def test_a_gradient_of_zero_hides_what_is_masked(kernels: Kernels, device: torch.device):
    nan = torch.full((3,), math.nan, device=device)
    for kind in ("k1", "abs", "k2", "k3"):
        assert not kernels("losses").kl_backward(torch.zeros_like(nan), nan, nan, kind).any()


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_nan_stays_visible_in_kl(kind: str, kernels: Kernels, device: torch.device):
    left, right = torch.randn(2, 6, device=device)
    left[3] = math.nan
    module = kernels("losses")
    assert module.kl(left, right, kind).isnan().tolist() == [i == 3 for i in range(6)]
    slope = module.kl_backward(torch.ones(6, device=device), left, right, kind)
    assert slope.isnan().tolist() == [i == 3 and kind != "k1" for i in range(6)]
