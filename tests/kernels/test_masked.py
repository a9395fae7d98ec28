import math
from collections.abc import Callable

import pytest
import torch
from gloo import run_ranks
from golden import golden_cases, match, run_case
from ops import check_compiles, check_op
from torch import Tensor

from rolemesh.kernels import masked_mean, masked_scale, masked_sum, masked_var, masked_whiten


# Left out on purpose: one valid token is an error there, and none here (test_one_kept_value_is_no_error).
@pytest.mark.parametrize("case", golden_cases("masked_whiten", without=["single_valid_raises"]))
def test_whitening_equals_the_golden_cases(case: dict):
    run_case(
        "masked_whiten", case, lambda values, mask, **kw: {"whitened": masked_whiten(values, mask, **kw)}
    )


def test_what_lies_outside_of_the_mask_never_counts():
    values = torch.tensor([1.0, math.nan, 3.0, math.inf, -math.inf])
    mask = torch.tensor([1, 0, 1, 0, 0])
    for kept in (mask, mask.bool(), mask.float()):
        statistics = [f(values, kept).item() for f in (masked_sum, masked_mean, masked_var)]
        assert statistics == [4, 2, 2]
        torch.testing.assert_close(masked_whiten(values, kept), torch.tensor([-0.70711, 0, 0.70711, 0, 0]))
        torch.testing.assert_close(masked_scale(values, kept), torch.tensor([0.70711, 0, 2.12132, 0, 0]))


def test_padding_is_not_part_of_the_mean():
    assert masked_mean(torch.tensor([0.2, 0.4, 0, 0]), torch.tensor([1, 1, 0, 0])).item() == pytest.approx(
        0.3
    )


def test_the_mean_carries_a_gradient_to_kept_values_only():
    values = torch.tensor([1.0, math.nan, 3.0], requires_grad=True)
    masked_mean(values, torch.tensor([1, 0, 1])).backward()
    assert values.grad.tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize(
    ("mask", "expected"), [([0, 0], [0, 0]), ([1, 0], [0, 0]), ([1, 1], [-0.7071, 0.7071])]
)
def test_one_kept_value_is_no_error(mask: list[int], expected: list[float]):
    whitened = masked_whiten(torch.tensor([3.0, 5.0]), torch.tensor(mask))
    torch.testing.assert_close(whitened, torch.tensor(expected, dtype=torch.float32), atol=1e-4, rtol=0)


def test_one_kept_value_keeps_its_size_where_the_mean_stays():
    values, mask = torch.tensor([3.0, 5.0]), torch.tensor([1, 0])
    assert masked_whiten(values, mask, shift_mean=False).tolist() == [3, 0]
    assert masked_scale(values, mask).tolist() == [3, 0]


def test_scaling_does_not_move_zero():
    scaled = masked_scale(torch.tensor([1.0, 2, 3, 4]), torch.ones(4))
    torch.testing.assert_close(scaled, torch.tensor([0.7746, 1.5492, 2.3238, 3.0984]), atol=1e-4, rtol=0)


def test_a_large_mean_keeps_its_digits():
    values = 1e6 + torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert masked_var(values, torch.ones(4)).item() == pytest.approx(5 / 3)


def test_shapes_that_differ_are_named():
    with pytest.raises(ValueError, match=r"values are \[2, 3\], the mask is \[2, 2\]"):
        masked_mean(torch.zeros(2, 3), torch.ones(2, 2))


def batch(n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Values far from 0, with NaN outside of the mask."""
    generator = torch.Generator().manual_seed(n)
    mask = torch.rand(n, generator=generator) < 0.6
    values = 1000 + torch.randn(n, generator=generator, dtype=torch.float64)
    return values.to(dtype).masked_fill(~mask, math.nan), mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [0, 1, 2, 7, 4099, 70001])
def test_each_form_equals_float64(n: int, dtype: torch.dtype, form: str):
    values, mask = batch(n, dtype)
    kept = values[mask].double()
    mean = kept.mean() if len(kept) else torch.zeros(())
    var = kept.var() if len(kept) > 1 else torch.zeros(())
    match(masked_sum(values, mask), kept.sum(), rtol=1e-12, atol=0)
    match(masked_mean(values, mask), mean, rtol=1e-12, atol=0)
    match(masked_var(values, mask), var, rtol=1e-9, atol=0)
    whitened, scaled = masked_whiten(values, mask), masked_scale(values, mask)
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-9}
    match(whitened[mask], (kept - mean) / (var + 1e-8).sqrt() if len(kept) > 1 else kept - mean, **tolerance)
    match(scaled[mask], kept / (var + 1e-8).sqrt() if len(kept) > 1 else kept, **tolerance)
    for output in (whitened, scaled):
        assert output.dtype == dtype
        assert not output[~mask].any()


def test_the_number_of_threads_changes_nothing():
    values, mask = batch(300_001)
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2):
            torch.set_num_threads(n)
            results.append((masked_mean(values, mask), masked_var(values, mask), masked_whiten(values, mask)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_a_sum_of_whole_numbers_is_whole():
    assert masked_sum(torch.eye(49)[0], torch.ones(49)).item() == 1
    assert masked_sum(torch.tensor([3, 5]), torch.tensor([1, 0])).item() == 3


def test_nan_inside_of_the_mask_stays_visible(form: str):
    values, mask = torch.tensor([1.0, math.nan, 3.0]), torch.tensor([1, 1, 0])
    for output in (masked_sum(values, mask), masked_mean(values, mask), masked_var(values, mask)):
        assert output.isnan()
    assert masked_whiten(values, mask).isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_var, masked_whiten, masked_scale])
def test_gradients_are_those_of_finite_differences(function: Callable[..., Tensor], form: str):
    values = torch.tensor([[1.0, math.nan, 3.5], [0.25, 7.0, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    kept = values[mask.bool()].requires_grad_()

    def of_kept(kept: Tensor) -> Tensor:
        return function(values.masked_scatter(mask.bool(), kept), mask)

    assert torch.autograd.gradcheck(of_kept, kept)
    whole = values.clone().requires_grad_()
    function(whole, mask).square().sum().backward()
    assert not whole.grad[mask == 0].any()


@pytest.mark.full
def test_the_operations_are_known_to_torch():
    values, mask = batch(9, torch.float64)
    values, numbers = values.nan_to_num().requires_grad_(), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    check_op("masked_moments", values, mask)
    check_op("masked_normalize", values, mask, numbers.requires_grad_())
    functions = (masked_sum, masked_mean, masked_var, masked_whiten, masked_scale)

    def all_functions(values: Tensor, mask: Tensor) -> Tensor:
        return torch.cat([function(values, mask).reshape(-1) for function in functions])

    check_compiles(all_functions, values.detach(), mask)
    assert all(function(values.to("meta"), mask.to("meta")).is_meta for function in functions)


@pytest.mark.full
def test_statistics_are_over_all_ranks_and_carry_no_gradient():
    values, mask = batch(11)
    rows = [slice(0, 4), slice(4, 4), slice(4, 11)]

    def on_rank(rank: int, world: int) -> list[Tensor]:
        group = torch.distributed.group.WORLD
        own = values[rows[rank]].requires_grad_()
        functions = (masked_sum, masked_mean, masked_var, masked_whiten, masked_scale)
        outputs = [function(own, mask[rows[rank]], group=group) for function in functions]
        compiled = torch.compile(masked_whiten, fullgraph=True, backend="aot_eager")
        outputs.append(compiled(own, mask[rows[rank]], group=group))
        assert not any(output.requires_grad for output in outputs)
        return outputs

    parts = run_ranks(on_rank, 3)
    for position, function in enumerate((masked_sum, masked_mean, masked_var)):
        assert len({part[position].item() for part in parts}) == 1
        match(parts[0][position], function(values, mask), rtol=1e-12, atol=0)
    for position, function in ((3, masked_whiten), (4, masked_scale), (5, masked_whiten)):
        whole = torch.cat([part[position] for part in parts])
        match(whole, function(values, mask), rtol=1e-6, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        ([[1.0, 2.0], [3.0, 10.0]], [[-0.7348, -0.4899], [-0.2449, 1.4697]]),
        ([[1.0, 2.0, 6.0], []], [[-0.7559, -0.3780, 1.1339], []]),
    ],
)
def test_whitening_is_over_all_ranks_also_those_with_nothing(
    shards: list[list[float]], expected: list[list[float]]
):
    def whiten(rank: int, world: int) -> Tensor:
        values = torch.tensor(shards[rank])
        return masked_whiten(values, torch.ones_like(values), group=torch.distributed.group.WORLD)

    for whitened, truth in zip(run_ranks(whiten, 2), expected, strict=True):
        match(whitened, torch.tensor(truth), atol=1e-4, rtol=0)
