import math

import pytest
import torch
from gloo import run_ranks
from golden import golden_cases, match, run_case
from torch import Tensor

from rolemesh.engine.algorithms import AdaptiveKLController, FixedKLController, apply_kl_penalty


@pytest.mark.parametrize("case", golden_cases("token_rewards"))
def test_rewards_equal_the_golden_cases(case: dict):
    def call(scores: Tensor, logp: Tensor, ref_logp: Tensor, beta: float) -> dict[str, Tensor]:
        rewards, _ = apply_kl_penalty(scores, logp, ref_logp, torch.ones_like(scores), kl_coef=beta)
        return {"rewards": rewards}

    run_case("token_rewards", case, call)


@pytest.mark.parametrize("case", golden_cases("adaptive_kl"))
def test_the_adaptive_weight_equals_the_golden_cases(case: dict):
    def call(kls: Tensor, init: float, target: float, horizon: float, n_steps: int) -> dict[str, Tensor]:
        controller, values = AdaptiveKLController(init, target, horizon), []
        for current_kl in kls.tolist():
            controller = controller.update(current_kl, n_steps)
            values.append(controller.value)
        return {"values": torch.tensor(values, dtype=torch.float64)}

    run_case("adaptive_kl", case, call)


def test_a_fixed_weight_stays():
    assert FixedKLController(0.1).update(100.0, 256).value == 0.1


def test_a_target_that_cannot_be_reached_is_an_error():
    with pytest.raises(ValueError, match="target is 0"):
        AdaptiveKLController(0.1, 0.0, 10000)


def test_the_mean_kl_leaves_out_padding_and_empty_sequences():
    kl = torch.tensor([[0.2, 0.4, 0.0, math.nan], [5.0, math.inf, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])
    scores = torch.tensor([[0.0, 1.0, math.nan, 0.0], [1.0, 1.0, 1.0, 1.0]])
    rewards, mean = apply_kl_penalty(scores, kl, torch.zeros_like(kl), mask, kl_coef=0.5)
    assert mean == pytest.approx(0.3)
    match(rewards, torch.tensor([[-0.1, 0.8, 0, 0], [0, 0, 0, 0]]), rtol=0, atol=1e-6)


@pytest.mark.full
def test_the_mean_kl_is_over_all_ranks():
    def on_rank(rank: int, world: int) -> float:
        kl = torch.tensor([[1.0], [2.0], [6.0]])[: 3 * rank]
        group = torch.distributed.group.WORLD
        return apply_kl_penalty(kl, kl, kl * 0, torch.ones_like(kl), kl_coef=1.0, group=group)[1]

    assert run_ranks(on_rank, 2) == [3.0, 3.0]
