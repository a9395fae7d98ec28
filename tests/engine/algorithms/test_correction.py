"""Weights against the rollout engine's other log-probs."""

import math

import pytest
import torch
from gloo import run_ranks
from golden import match
from torch import Tensor

from rolemesh.engine.algorithms import Correction, correct, correction_metrics


def weights(log_ratios: list[list[float]], correction: Correction, mask: Tensor | None = None) -> Tensor:
    old = torch.tensor(log_ratios)
    return correct(
        old, torch.zeros_like(old), torch.ones_like(old) if mask is None else mask, correction
    ).weights


def test_equal_log_probs_have_weight_1():
    for correction in (
        Correction("token"),
        Correction("sequence", mask=(0.9, 1.1), reject=(0.9, 1.1)),
        Correction("none", mask=(0.5, 5.0)),
        Correction("none", max_weight=0.5, reject=(0.5, 5.0)),
    ):
        assert (weights([[0.0, 0.0], [0.0, 0.0]], correction) == 1).all()


def test_token_weights_are_truncated_and_never_below_their_ratio():
    log = math.log
    found = weights([[log(0.25), log(1.5), log(9)]], Correction("token"))
    match(found, torch.tensor([[0.25, 1.5, 2]]), rtol=1e-6, atol=0)


def test_a_sequence_weight_is_the_product_and_is_cut_and_counted():
    """100 tokens that differ by 0.012: 3.3201, above a cap of 3."""
    old, mask = torch.full((1, 100), 0.012), torch.ones(1, 100)
    correction = Correction("sequence", max_weight=4.0)
    assert weights(old.tolist(), correction)[0, 0].item() == pytest.approx(3.3201, abs=1e-4)
    result = correct(old, old * 0, mask, Correction("sequence", max_weight=3.0))
    assert (result.weights == 3).all()
    assert correction_metrics(old, old * 0, mask, result)["rollout_corr/rollout_is_ratio_fraction_high"] == 1
    rejected = correct(old, old * 0, mask, Correction(reject=(0.0, 3.0)))
    assert not rejected.weights.any()
    metrics = correction_metrics(old, old * 0, mask, rejected)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1
    assert (weights(old.tolist(), Correction(reject=(0.0, 3.0), reject_by="mean")) == 1).all()


def test_icepop_leaves_out_single_tokens():
    log = math.log
    found = weights([[log(0.4), log(0.6), log(4.9), log(5.1)]], Correction(mask=(0.5, 5.0)))
    assert found.tolist() == [[0, 1, 1, 0]]


def test_what_lies_outside_of_the_mask_is_in_no_weight_and_no_metric():
    old = torch.tensor([[0.1, math.nan], [math.inf, 7.0]])
    rollout = torch.tensor([[0.1, 3.0], [0.0, math.nan]])
    mask = torch.tensor([[1, 0], [0, 0]])
    result = correct(old, rollout, mask, Correction("sequence", reject=(0.9, 1.1)))
    assert result.weights.tolist() == [[1, 0], [0, 0]]
    metrics = correction_metrics(old, rollout, mask, result)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["rollout_corr/kl"] == 0
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0


def test_the_metrics_are_those_of_their_names():
    old, rollout = torch.tensor([[-1.0, -0.5]]), torch.tensor([[-0.5, -1.0]])
    metrics = correction_metrics(old, rollout, torch.ones(1, 2), None)
    assert metrics["rollout_corr/kl"] == pytest.approx(0.0)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((0.106531 + 0.148721) / 2, abs=1e-6)
    assert metrics["rollout_corr/training_ppl"] == pytest.approx(math.exp(0.75))
    assert metrics["rollout_corr/chi2_token"] == pytest.approx((math.e + 1 / math.e) / 2 - 1)
    assert metrics["rollout_corr/chi2_seq"] == pytest.approx(0.0)


def test_a_ratio_that_is_no_number_is_left_out_where_bounds_are_given():
    found = correct(
        torch.tensor([[math.nan, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2), Correction(mask=(0.5, 5.0))
    )
    assert found.weights.tolist() == [[0, 1]]


def test_bounds_that_nothing_meets_are_an_error():
    with pytest.raises(ValueError, match=r"mask is \[5.0, 0.5\], must be two numbers, 0 <= low < high"):
        Correction(mask=(5.0, 0.5))
    with pytest.raises(ValueError, match="max_weight is 0"):
        Correction("token", max_weight=0.0)
    assert Correction().is_off
    assert not Correction("token").is_off


@pytest.mark.full
@pytest.mark.parametrize("cuts", [(3, 6), (0, 6), (1, 4, 6)], ids=str)
def test_metrics_are_the_whole_batchs_on_every_rank(cuts: tuple[int, ...]):
    generator = torch.Generator().manual_seed(0)
    old, rollout = torch.randn(2, 6, 4, generator=generator)
    mask = torch.rand(6, 4, generator=generator) < 0.6
    correction = Correction("token", mask=(0.2, 5.0), reject=(0.05, 20.0))

    def metrics(rows: slice, group: object) -> dict[str, float]:
        part = (old[rows], rollout[rows], mask[rows])
        return correction_metrics(*part, correct(*part, correction), group)

    whole = metrics(slice(None), None)
    assert 0 < whole["rollout_corr/rollout_rs_masked_fraction"] < 1
    group = lambda rank, world: metrics(slice((0, *cuts)[rank], cuts[rank]), torch.distributed.group.WORLD)  # noqa: E731
    for found in run_ranks(group, len(cuts)):
        assert found == pytest.approx(whole, rel=1e-6, abs=1e-9)
