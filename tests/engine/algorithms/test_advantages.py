import math

import numpy as np
import pytest
import torch
from gloo import run_ranks
from golden import golden_cases, match, run_case
from torch import Tensor

from rolemesh.engine.algorithms import advantage_estimator, gae_advantage_return, grpo_outcome_advantage
from rolemesh.engine.algorithms.estimators import register_estimator


# Left out on purpose: one valid token is an error there (test_a_batch_with_one_token_is_no_error).
@pytest.mark.parametrize("case", golden_cases("gae", without=["single_valid_token_in_batch"]))
def test_gae_equals_the_golden_cases(case: dict):
    def call(rewards: Tensor, values: Tensor, mask: Tensor, **keywords: float) -> dict[str, Tensor]:
        return vars(
            gae_advantage_return(token_level_rewards=rewards, values=values, response_mask=mask, **keywords)
        )

    run_case("gae", case, call)


@pytest.mark.parametrize("case", golden_cases("grpo"))
def test_grpo_equals_the_golden_cases(case: dict):
    def call(
        rewards: Tensor, mask: Tensor, uid: np.ndarray, norm_by_std: bool, epsilon: float
    ) -> dict[str, Tensor]:
        return vars(
            grpo_outcome_advantage(
                token_level_rewards=rewards,
                response_mask=mask,
                index=uid,
                norm_adv_by_std=norm_by_std,
                epsilon=epsilon,
            )
        )

    run_case("grpo", case, call)


def grpo(
    scores: list[float], uid: list[str] | None = None, **keywords: object
) -> tuple[Tensor, dict[str, float]]:
    rewards = torch.tensor(scores)[:, None]
    result = grpo_outcome_advantage(
        token_level_rewards=rewards,
        response_mask=torch.ones_like(rewards),
        index=uid or ["a"] * len(scores),
        **keywords,
    )
    return result.advantages[:, 0], result.metrics


def test_a_group_of_equal_scores_has_no_advantage_and_is_counted():
    advantages, metrics = grpo([1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 5.0], ["a"] * 4 + ["b"] * 2 + ["c"])
    assert advantages[:4].tolist() == [0, 0, 0, 0]
    assert metrics == {"grpo/groups": 3, "grpo/zero_variance_groups": 1, "grpo/single_row_groups": 1}


def test_rounding_of_equal_scores_does_not_become_an_advantage():
    advantages, _ = grpo([0.1] * 7)
    assert (advantages.abs() < 0.02).all()
    advantages, metrics = grpo([1.0] * 7 + [1 + 1e-7])
    assert advantages[-1].item() == pytest.approx(0.1, abs=0.01)
    assert metrics["grpo/zero_variance_groups"] == 0


def test_without_std_the_advantage_is_the_distance_to_the_mean():
    advantages, _ = grpo([0.0, 4.0], norm_adv_by_std=False)
    assert advantages.tolist() == [-2, 2]


def test_rewards_outside_of_the_mask_never_count():
    rewards = torch.tensor([[1.0, math.nan], [0.0, math.inf]])
    mask = torch.tensor([[1, 0], [1, 0]])
    result = grpo_outcome_advantage(token_level_rewards=rewards, response_mask=mask, index=["a", "a"])
    match(result.advantages, torch.tensor([[0.7071, 0], [-0.7071, 0]]), rtol=0, atol=1e-4)


def test_a_batch_with_one_token_is_no_error():
    one, mask = torch.tensor([[3.0, 0.0]]), torch.tensor([[1, 0]])
    result = gae_advantage_return(
        token_level_rewards=one, values=one * 0, response_mask=mask, gamma=1.0, lam=1.0
    )
    assert result.advantages.tolist() == [[0, 0]]
    assert result.returns.tolist() == [[3, 0]]


def test_what_an_estimator_lacks_is_named():
    rewards = torch.zeros(2, 1)
    with pytest.raises(ValueError, match="needs the column 'values'"):
        advantage_estimator("gae")(
            token_level_rewards=rewards, values=None, response_mask=rewards, gamma=1.0, lam=1.0
        )
    with pytest.raises(ValueError, match="for each of 2 rows, got 1"):
        advantage_estimator("grpo")(token_level_rewards=rewards, response_mask=rewards, index=["a"])
    with pytest.raises(ValueError, match="'nope'; there are gae, grpo, "):
        advantage_estimator("nope")
    with pytest.raises(ValueError, match="'gae' is in"):
        register_estimator("gae")(gae_advantage_return)


@pytest.mark.full
@pytest.mark.parametrize("cut", [3, 0, 8], ids=["groups split over ranks", "rank 0 empty", "rank 1 empty"])
@pytest.mark.parametrize("name", ["gae", "grpo"])
def test_a_batch_over_two_ranks_equals_the_whole(name: str, cut: int):
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 8, 5, generator=generator)
    mask = torch.arange(5) < torch.randint(1, 6, (8, 1), generator=generator)
    uid = np.array(list("abcabcab"), dtype=object)

    def estimate(rows: slice, group: object) -> tuple[Tensor, Tensor, dict[str, float]]:
        result = advantage_estimator(name)(
            token_level_rewards=rewards[rows],
            values=values[rows],
            response_mask=mask[rows],
            index=uid[rows],
            gamma=0.9,
            lam=0.8,
            norm_adv_by_std=True,
            group=group,
        )
        return result.advantages, result.returns, result.metrics

    def on_rank(rank: int, world: int) -> tuple[Tensor, Tensor, dict[str, float]]:
        return estimate([slice(0, cut), slice(cut, 8)][rank], torch.distributed.group.WORLD)

    whole, parts = estimate(slice(0, 8), None), run_ranks(on_rank, 2)
    for column in (0, 1):
        match(torch.cat([part[column] for part in parts]), whole[column], rtol=1e-6, atol=1e-6)
    assert parts[0][2] == parts[1][2] == whole[2]


def test_a_group_of_equal_scores_has_no_advantage_to_the_last_bit():
    advantages, metrics = grpo([0.1] * 7)
    assert not advantages.any()
    assert metrics["grpo/zero_variance_groups"] == 1


def test_the_order_of_rows_does_not_change_an_advantage():
    scores, uid = [0.1, 0.7, 1e-3, 0.3, 0.2, 9.0], list("aaabba")
    expected, _ = grpo(scores, uid)
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 5, 3, 1, 4]):
        advantages, _ = grpo([scores[row] for row in order], [uid[row] for row in order])
        assert torch.equal(advantages, expected[order])
