import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from golden import match
from torch import Tensor

Kernels = Callable[[str], ModuleType]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(5, 1), (3, 7), (2, 33), (1, 4096), (1, 32_001), (1, 151_936)]
CASES = [*((shape, torch.float32) for shape in SHAPES), *(((2, 1000), dtype) for dtype in DTYPES)]
INV_T = 0.7
# Rounding of the accumulation type, and of one result in the type of the logits (the interpreter cuts bf16).
SUMS = {torch.float64: 1e-13}
STORED = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def rows_of(n: int, v: int, dtype: torch.dtype, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * n + v)
    logits = (torch.randn(n, v, generator=generator, dtype=torch.float64) * scale).to(dtype)
    return logits, torch.randint(v, (n,), generator=generator)


def new_stats(logits: Tensor) -> Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    stats = torch.zeros(4, len(logits), dtype=dtype, device=logits.device)
    stats[0] = -torch.inf
    return stats


def compare(stats: Tensor, logits: Tensor, labels: Tensor, entropy: bool = True, rtol: float = 5e-6) -> None:
    """Statistics against float64 sums that use the same reference `m`."""
    rtol = SUMS.get(logits.dtype, rtol)
    x, (m, s, t, at_label) = logits.double().cpu(), stats.double().cpu()
    match(m, x.amax(1), rtol=0, atol=0, name="max")
    y = (x - m[:, None]) * INV_T
    match(s, y.exp().sum(1), rtol=rtol, atol=0, name="sum")
    if entropy:
        match(t, (y.exp() * y.clamp(min=-1e300)).sum(1), rtol=rtol, atol=1e-6, name="product")
    labels = labels.cpu()
    here = (labels >= 0) & (labels < x.shape[1])
    found = x.gather(1, labels.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
    match(at_label, torch.where(here, found, 0.0), rtol=0, atol=0, name="label")


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_statistics_equal_float64(
    shape: tuple[int, int], dtype: torch.dtype, kernels: Kernels, device: torch.device
):
    logits, labels = (tensor.to(device) for tensor in rows_of(*shape, dtype))
    for entropy in (True, False):
        stats = new_stats(logits)
        kernels("log_prob").log_prob_stats(logits, labels, stats, INV_T, entropy)
        compare(stats, logits, labels, entropy)
        assert entropy or not stats[2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_offset_loses_no_digit(dtype: torch.dtype, kernels: Kernels, device: torch.device):
    logits, labels = rows_of(2, 5000, dtype, scale=1.0)
    logits = (logits + 1e4).to(device)
    stats = new_stats(logits)
    kernels("log_prob").log_prob_stats(logits, labels.to(device), stats, INV_T, True)
    compare(stats, logits, labels)


def test_spread_logits_of_1e4_are_right(kernels: Kernels, device: torch.device):
    logits, labels = (tensor.to(device) for tensor in rows_of(2, 5000, torch.float32, scale=1e4))
    stats = new_stats(logits)
    kernels("log_prob").log_prob_stats(logits, labels, stats, INV_T, True)
    compare(stats, logits, labels)


@pytest.mark.parametrize(("cut", "dtype"), [(1, torch.float32), (700, torch.float64), (4100, torch.float32)])
def test_two_tiles_in_sequence_equal_one(
    cut: int, dtype: torch.dtype, kernels: Kernels, device: torch.device
):
    logits, labels = (tensor.to(device) for tensor in rows_of(3, 5000, dtype))
    labels[0] = cut  # the first column of the second tile
    logits[1, :cut], logits[2, cut:] = -math.inf, -math.inf  # one tile of nothing, before and after
    stats = new_stats(logits)
    function = kernels("log_prob").log_prob_stats
    function(logits[:, :cut], labels, stats, INV_T, True)
    assert stats[:3, 1].tolist() == [-math.inf, 0, 0]
    function(logits[:, cut:], labels - cut, stats, INV_T, True)
    compare(stats, logits, labels)


def test_columns_of_probability_zero_and_rows_of_nothing(kernels: Kernels, device: torch.device):
    logits, labels = rows_of(4, 4200, torch.float32)
    logits[0, ::2], logits[1, :4097], logits[2] = -math.inf, -math.inf, -math.inf
    logits, labels = logits.to(device), labels.to(device)
    stats = new_stats(logits)
    kernels("log_prob").log_prob_stats(logits, labels, stats, INV_T, True)
    compare(stats[:, [0, 1, 3]], logits[[0, 1, 3]], labels[[0, 1, 3]])
    assert stats[:3, 2].tolist() == [-math.inf, 0, 0]


@pytest.mark.parametrize("column", [0, 4150])
def test_nan_and_plus_infinity_stay_visible(column: int, kernels: Kernels, device: torch.device):
    logits, labels = rows_of(4, 4200, torch.float32)
    logits[0, column], logits[1, column] = math.nan, math.inf
    logits[2] = math.nan
    logits = logits.to(device)
    stats = new_stats(logits)
    kernels("log_prob").log_prob_stats(logits, labels.to(device), stats, INV_T, True)
    assert stats[1:3, :3].isnan().all()
    assert stats[1:3, 3].isfinite().all()
    after = stats.clone()  # a second tile does not hide it
    kernels("log_prob").log_prob_stats(logits[3:].expand(4, -1), labels.to(device), after, INV_T, True)
    assert after[1:3, :3].isnan().all()


def test_labels_outside_of_the_tile_match_nothing(kernels: Kernels, device: torch.device):
    logits, _ = rows_of(5, 40, torch.float32)
    labels = torch.tensor([-1, 40, 2**40, -(2**40), 39])
    stats = new_stats(logits.to(device))
    stats[3] = 5.0
    kernels("log_prob").log_prob_stats(logits.to(device), labels.to(device), stats, INV_T, False)
    assert stats[3].tolist() == [5.0, 5.0, 5.0, 5.0, (5.0 + logits[4, 39]).item()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_rows_and_empty_tensors(dtype: torch.dtype, kernels: Kernels, device: torch.device):
    wide, labels = (tensor.to(device) for tensor in rows_of(3, 77, dtype))
    logits = wide[:, 5:38]
    labels = labels.clamp(max=32)
    stats, out = new_stats(logits), torch.full_like(wide, 7)
    module = kernels("log_prob")
    module.log_prob_stats(logits, labels, stats, INV_T, True)
    compare(stats, logits, labels)
    numbers = numbers_of(logits, labels)
    module.log_prob_backward(logits, labels, numbers, INV_T, True, out[:, 5:38])
    compare_backward(out[:, 5:38], logits, labels, numbers, True)
    assert (out[:, :5] == 7).all()
    assert (out[:, 38:] == 7).all()
    for empty in (logits[:0], logits[:, :0]):
        n = len(empty)
        before = stats[:, :n].clone()
        module.log_prob_stats(empty, labels[:n], stats[:, :n], INV_T, True)
        module.log_prob_backward(empty, labels[:n], numbers[:, :n], INV_T, True, empty)
        assert torch.equal(stats[:, :n], before)


def numbers_of(logits: Tensor, labels: Tensor) -> Tensor:
    x = logits.double().cpu()
    y = (x - x.amax(1, keepdim=True)) * INV_T
    log_p = y - y.logsumexp(1, keepdim=True)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e300)).sum(1)
    generator = torch.Generator().manual_seed(len(labels))
    weights = torch.randn(2, len(labels), generator=generator, dtype=torch.float64)
    numbers = torch.stack([x.amax(1), y.logsumexp(1), entropy, *weights])
    return numbers.to(logits.device, torch.float64 if logits.dtype == torch.float64 else torch.float32)


def compare_backward(out: Tensor, logits: Tensor, labels: Tensor, numbers: Tensor, entropy: bool) -> None:
    """Against autograd in float64 through log-softmax."""
    x = logits.double().cpu().requires_grad_()
    log_p = torch.log_softmax(x * INV_T, 1)
    labels, numbers = labels.cpu(), numbers.double().cpu()
    here = (labels >= 0) & (labels < x.shape[1])
    log_prob = log_p.gather(1, labels.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
    loss = (numbers[3] * torch.where(here, log_prob, 0.0)).sum()
    # A label held by another tile still has the softmax in its gradient here.
    loss = loss - (numbers[3] * torch.where(here, 0.0, (x * INV_T).logsumexp(1))).sum()
    if entropy:
        loss = loss - (numbers[4, :, None] * log_p.exp() * log_p.clamp(min=-1e300)).sum()
    (truth,) = torch.autograd.grad(loss, x)
    step = STORED[logits.dtype]
    match(out.cpu(), truth, rtol=step, atol=step if step < 1e-4 else step * 1e-3)


@pytest.mark.parametrize(
    ("shape", "dtype", "entropy"), [*((*case, True) for case in CASES), ((2, 1000), torch.float32, False)]
)
def test_gradient_equals_autograd(
    shape: tuple[int, int], dtype: torch.dtype, entropy: bool, kernels: Kernels, device: torch.device
):
    logits, labels = (tensor.to(device) for tensor in rows_of(*shape, dtype))
    numbers = numbers_of(logits, labels)
    if not entropy:
        numbers[4], numbers[2] = 0, math.nan
    if shape[0] > 2:
        labels[0], labels[1] = -1, shape[1]
    out = torch.full_like(logits, math.nan)
    function = kernels("log_prob").log_prob_backward
    function(logits, labels, numbers, INV_T, entropy, out)
    compare_backward(out, logits, labels, numbers, entropy)
    in_place = logits.clone()
    function(in_place, labels, numbers, INV_T, entropy, in_place)
    assert torch.equal(in_place, out)


def test_gradient_of_columns_of_probability_zero_is_zero_and_nan_stays(
    kernels: Kernels, device: torch.device
):
    logits, labels = rows_of(2, 300, torch.float32)
    logits[0, :100], labels[0] = -math.inf, 150
    numbers = numbers_of(logits, labels).to(device)
    logits[1, 7] = math.nan
    out = torch.empty_like(logits, device=device)
    kernels("log_prob").log_prob_backward(logits.to(device), labels.to(device), numbers, INV_T, True, out)
    assert not out[0, :100].any()
    assert out[0].isfinite().all()
    assert out[1, 7].isnan()
