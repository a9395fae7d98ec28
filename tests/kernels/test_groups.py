import math
from itertools import permutations

import numpy as np
import pytest
import torch
from gloo import run_ranks
from golden import golden_cases, match, run_case
from ops import check_op
from torch import Tensor

from rolemesh.kernels import GroupStatistics, group_statistics


@pytest.mark.parametrize("case", golden_cases("rloo"))
def test_scores_less_the_mean_of_the_others_equal_the_golden_rloo_cases(case: dict, form: str):
    def call(rewards: Tensor, mask: Tensor, uid: np.ndarray) -> dict[str, Tensor]:
        scores = torch.where(mask.bool(), rewards, 0.0).double().sum(dim=1)
        advantages = scores - group_statistics(scores, uid).leave_one_out_mean
        column = torch.where(mask.bool(), advantages[:, None], 0.0).to(rewards.dtype)
        return {"advantages": column, "returns": column}

    run_case("rloo", case, call)


def columns(statistics: GroupStatistics) -> list[Tensor]:
    return [statistics.count, statistics.mean, statistics.var, statistics.std, statistics.leave_one_out_mean]


def test_each_row_has_its_groups_statistics(form: str):
    scores = torch.tensor([1.0, 5.0, 2.0, 7.0, 6.0])
    statistics = group_statistics(scores, ["a", "b", "a", "c", "a"])
    expected = [
        [3, 1, 3, 1, 3],
        [3, 5, 3, 7, 3],
        [7, 0, 7, 0, 7],
        [7**0.5, 0, 7**0.5, 0, 7**0.5],
        [4, 0, 3.5, 0, 1.5],
    ]
    for column, right in zip(columns(statistics), expected, strict=True):
        assert column.dtype == torch.float64
        match(column, torch.tensor(right), rtol=1e-7, atol=0)
    assert (statistics.n_groups, statistics.n_constant, statistics.n_single) == (3, 0, 2)


@pytest.mark.parametrize(
    "index",
    [torch.tensor([7, -1, 7]), np.array(["x", "y", "x"]), np.array([7, 1, 7]), [("p", 1), None, ("p", 1)]],
)
def test_keys_are_whatever_a_dict_takes(index: object):
    assert group_statistics(torch.tensor([1.0, 2.0, 3.0]), index).mean.tolist() == [2, 2, 2]


def test_equal_scores_have_no_variance_at_all(form: str):
    statistics = group_statistics(torch.full((7,), 0.1), ["a"] * 7)
    assert statistics.mean.tolist() == [torch.tensor(0.1).item()] * 7
    assert not statistics.var.any()
    assert statistics.n_constant == 1


def test_a_large_mean_keeps_the_digits(form: str):
    scores = 1e9 + torch.tensor([0.0, 1, 2, 3], dtype=torch.float64)
    match(group_statistics(scores, ["a"] * 4).var, torch.full((4,), 5 / 3), rtol=1e-7, atol=0)


def test_nan_stays_in_its_group(form: str):
    statistics = group_statistics(torch.tensor([math.nan, 1.0, 2.0, 4.0]), ["a", "a", "b", "b"])
    assert statistics.mean.isnan().tolist() == [True, True, False, False]
    assert statistics.var.tolist()[2:] == [2, 2]


def test_the_order_of_rows_does_not_change_a_bit(form: str):
    scores, keys = torch.tensor([0.1, 0.7, 1e-9, 0.3, 0.2, 1e8], dtype=torch.float64), list("aaabba")
    expected = columns(group_statistics(scores, keys))
    for order in list(permutations(range(6)))[::7]:
        outputs = columns(group_statistics(scores[list(order)], [keys[row] for row in order]))
        for output, right in zip(outputs, expected, strict=True):
            assert torch.equal(output, right[list(order)])


@pytest.mark.full
def test_how_rows_lie_on_ranks_does_not_change_a_bit():
    generator = torch.Generator().manual_seed(2)
    scores, keys = torch.randn(17, generator=generator), [f"prompt {row % 4}" for row in range(17)]
    order = torch.randperm(17, generator=generator).tolist()
    cuts = [[order[:5], [], order[5:]], [order[3:], order[1:3], order[:1]]]

    def on_rank(rank: int, world: int) -> list[list[Tensor]]:
        group = torch.distributed.group.WORLD
        return [
            columns(group_statistics(scores[cut[rank]], [keys[row] for row in cut[rank]], group=group))
            for cut in cuts
        ]

    expected, parts = columns(group_statistics(scores, keys)), run_ranks(on_rank, 3)
    for way, cut in enumerate(cuts):
        for position, right in enumerate(expected):
            for rank, rows in enumerate(cut):
                assert torch.equal(parts[rank][way][position], right[rows])


def test_no_rows_are_no_error(form: str):
    statistics = group_statistics(torch.zeros(0), [])
    assert all(len(column) == 0 for column in columns(statistics))
    assert (statistics.n_groups, statistics.n_constant, statistics.n_single) == (0, 0, 0)


def test_a_key_for_each_score_is_asked_for():
    with pytest.raises(ValueError, match=r"scores are \[2\], keys 1"):
        group_statistics(torch.zeros(2), ["a"])


@pytest.mark.full
def test_the_operation_is_known_to_torch():
    check_op("group_moments", torch.randn(5).double(), torch.tensor([0, 2, 0, 1, 2]), 3)
