"""Estimators without a critic, and what holds for every one of them."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from gloo import run_ranks
from golden import golden_cases, match, run_case
from torch import Tensor

from rolemesh.engine.algorithms import (
    Advantages,
    advantage_estimator,
    estimator_names,
    remax_outcome_advantage,
    rloo_outcome_advantage,
)

NAMES = ("gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax")


def estimate(name: str, rewards: Tensor, mask: Tensor, uid: Any = None, **keywords: Any) -> Advantages:
    """An estimator as the worker calls it: with everything that there is."""
    given = {"gamma": 1.0, "lam": 1.0, "norm_adv_by_std": True, "group": None} | keywords
    given.setdefault("values", torch.zeros_like(rewards))
    given.setdefault("reward_baselines", torch.zeros(len(rewards)))
    index = ["a"] * len(rewards) if uid is None else uid
    return advantage_estimator(name)(token_level_rewards=rewards, response_mask=mask, index=index, **given)


def test_every_estimator_has_a_case_here():
    assert set(NAMES) <= set(estimator_names())


@pytest.mark.parametrize("case", golden_cases("rloo"))
def test_rloo_equals_the_golden_cases(case: dict):
    def call(rewards: Tensor, mask: Tensor, uid: np.ndarray) -> dict[str, Tensor]:
        return vars(rloo_outcome_advantage(token_level_rewards=rewards, response_mask=mask, index=uid))

    run_case("rloo", case, call)


def test_rloo_compares_with_the_mean_of_the_others():
    result = estimate("rloo", torch.tensor([[1.0], [2.0], [6.0], [5.0]]), torch.ones(4, 1), list("aaab"))
    assert result.advantages[:, 0].tolist() == [-3, -1.5, 4.5, 5]
    assert result.metrics["rloo/single_row_groups"] == 1


def test_reinforce_plus_plus_whitens_discounted_returns():
    rewards, mask = torch.tensor([[0.0, 0, 4], [0, 1, 9]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    result = estimate("reinforce_plus_plus", rewards, mask, gamma=0.5)
    returns = torch.tensor([[1.0, 2, 4], [0.5, 1, 0]])
    match(result.returns, returns, rtol=1e-6, atol=0)
    kept = torch.tensor([1.0, 2, 4, 0.5, 1])
    expected = torch.zeros(2, 3).masked_scatter(mask.bool(), (kept - kept.mean()) / kept.std())
    match(result.advantages, expected, rtol=1e-5, atol=1e-6)


def test_tool_turns_are_skipped_and_not_a_new_start():
    result = estimate(
        "reinforce_plus_plus", torch.tensor([[0.0, 7, 1]]), torch.tensor([[1, 0, 1]]), gamma=0.5
    )
    assert result.returns.tolist() == [[0.5, 0, 1]]


def test_the_baseline_form_whitens_distances_to_the_group_mean_by_tokens():
    rewards, mask = torch.tensor([[1.0, 0], [0, 3], [5, 0]]), torch.tensor([[1, 0], [1, 1], [1, 0]])
    result = estimate("reinforce_plus_plus_baseline", rewards, mask, list("aab"))
    kept = torch.tensor([-1.0, 1, 1, 5])
    expected = torch.zeros(3, 2).masked_scatter(mask.bool(), (kept - kept.mean()) / kept.std())
    match(result.advantages, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(result.advantages, result.returns)


def test_remax_takes_the_greedy_answers_reward_away():
    rewards, mask = torch.tensor([[0.5, 0, 2], [0, 1, 9]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    result = estimate("remax", rewards, mask, reward_baselines=torch.tensor([1.0, 3.0]))
    assert result.returns.tolist() == [[2.5, 2, 2], [1, 1, 0]]
    assert result.advantages.tolist() == [[1.5, 1, 1], [-2, -2, 0]]
    with pytest.raises(ValueError, match="needs the column 'reward_baselines'"):
        remax_outcome_advantage(token_level_rewards=rewards, response_mask=mask, reward_baselines=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_awkward_batches_give_finite_numbers_and_zeros_outside(name: str, dtype: torch.dtype):
    """Empty responses, rows that are masked throughout, a group of one, junk outside of the mask."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 6, 4, generator=generator).to(dtype)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]])
    junk = rewards.masked_fill(mask == 0, math.nan)
    uid = list("aaabbc")
    result = estimate(name, junk, mask, uid, values=values.masked_fill(mask == 0, math.inf))
    clean = estimate(name, rewards.float(), mask, uid, values=values.float())
    for column in ("advantages", "returns"):
        found = getattr(result, column)
        assert torch.isfinite(found).all()
        assert not found[mask == 0].any()
        atol = 1e-6 if dtype == torch.float32 else 3e-2
        match(found, getattr(clean, column), rtol=atol, atol=atol)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (1, 1), (3, 1)], ids=str)
def test_no_rows_no_tokens_and_one_token(name: str, shape: tuple[int, int]):
    rewards = torch.arange(float(math.prod(shape))).view(shape)
    result = estimate(name, rewards, torch.ones(shape))
    assert result.advantages.shape == shape
    assert torch.isfinite(result.advantages).all()


def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 9, 5, generator=generator)
    lengths = torch.randint(0, 6, (9, 1), generator=generator)
    baselines = torch.randn(9, generator=generator)
    uid = np.array(list("abcabcabd"), dtype=object)
    columns = {"rewards": rewards, "mask": torch.arange(5) < lengths, "uid": uid}
    return columns | {"values": values, "reward_baselines": baselines}


def of_rows(name: str, rows: Any, group: Any = None) -> Advantages:
    part = {key: column[rows] for key, column in batch().items()}
    return estimate(name, **part, gamma=0.9, lam=0.8, group=group)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_rows_changes_nothing(name: str):
    whole, order = of_rows(name, slice(None)), [4, 8, 0, 7, 2, 6, 1, 3, 5]
    result = of_rows(name, order)
    match(result.advantages, whole.advantages[order], rtol=1e-6, atol=1e-6)
    assert result.metrics == whole.metrics


@pytest.mark.full
@pytest.mark.parametrize("cuts", [(4, 9), (0, 9), (2, 5, 9), (3, 3, 9)], ids=str)
def test_groups_and_statistics_do_not_depend_on_the_ranks(cuts: tuple[int, ...]):
    """dp 2 and 3, groups split over ranks, ranks without rows; against dp 1."""

    def on_rank(rank: int, world: int) -> list[tuple[Tensor, Tensor, dict[str, float]]]:
        rows = slice((0, *cuts)[rank], cuts[rank])
        results = [of_rows(name, rows, torch.distributed.group.WORLD) for name in NAMES]
        return [(r.advantages, r.returns, r.metrics) for r in results]

    ranks = run_ranks(on_rank, len(cuts))
    for name, parts in zip(NAMES, zip(*ranks, strict=True), strict=True):
        whole = of_rows(name, slice(None))
        match(torch.cat([part[0] for part in parts]), whole.advantages, rtol=1e-6, atol=1e-6, name=name)
        match(torch.cat([part[1] for part in parts]), whole.returns, rtol=1e-6, atol=1e-6, name=name)
        assert all(part[2] == whole.metrics for part in parts), name
