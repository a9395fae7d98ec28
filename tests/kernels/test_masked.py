import math

import pytest
import torch
from gloo import run_ranks
from golden import golden_cases, match, run_case
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
