import math
from typing import Any

import pytest
import torch
from gloo import run_ranks
from golden import golden_cases, match, run_case
from torch import Tensor

from rolemesh.kernels import LOSS_AGG_MODES, aggregate, loss_denominators, policy_loss, value_loss

CLIPS = {"clip_c": "dual_clip"}  # name of an argument in the golden cases: here


@pytest.mark.parametrize("case", golden_cases("policy_loss", without=["vanilla_isweights"], kind="vanilla"))
def test_the_policy_loss_equals_the_golden_cases(case: dict):
    def call(
        old_logp: Tensor, logp: Tensor, advantages: Tensor, mask: Tensor, kind: str, agg: str, **clips: float
    ) -> dict[str, Tensor]:
        loss, stats = policy_loss(
            old_logp,
            logp.requires_grad_(),
            advantages,
            mask,
            denominators=loss_denominators(mask, agg),
            loss_agg=agg,
            **{CLIPS[name]: value for name, value in clips.items()},
        )
        return {"loss": loss, "grad": torch.autograd.grad(loss, logp)[0], **stats}

    run_case("policy_loss", case, call)


def mini_batch() -> dict[str, Tensor]:
    """12 sequences of up to 7 tokens, one of them empty, with NaN outside of the mask."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 8, (12, 1), generator=generator)
    lengths[5] = 0
    mask = torch.arange(7) < lengths
    names = ("old", "new", "advantages", "values", "old_values", "returns")
    columns = torch.randn(6, 12, 7, generator=generator).masked_fill(~mask, math.nan)
    return dict(zip(names, columns, strict=True)) | {"mask": mask}


def losses(rows: Any, denominators: Any, mode: str) -> dict[str, Tensor]:
    """Both losses of some rows, their metrics, and gradients [12, 7] that are 0 for other rows."""
    columns = mini_batch()
    new, values = columns["new"].requires_grad_(), columns["values"].requires_grad_()
    part = {name: column[rows] for name, column in columns.items()}
    actor, actor_stats = policy_loss(
        part["old"],
        part["new"],
        part["advantages"],
        part["mask"],
        denominators=denominators,
        loss_agg=mode,
    )
    critic, critic_stats = value_loss(
        part["values"],
        part["returns"],
        part["old_values"],
        part["mask"],
        denominators=denominators,
        loss_agg=mode,
    )
    grads = torch.autograd.grad(actor + critic, [new, values])
    outputs = {"actor": actor, "critic": critic, "new_grad": grads[0], "values_grad": grads[1]}
    return {name: value.detach() for name, value in (outputs | actor_stats | critic_stats).items()}


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("size", [1, 5])
def test_the_sum_over_micro_batches_is_the_mini_batch(size: int, mode: str):
    denominators = loss_denominators(mini_batch()["mask"], mode)
    whole = losses(slice(0, 12), denominators, mode)
    parts = [losses(slice(start, start + size), denominators, mode) for start in range(0, 12, size)]
    for name, expected in whole.items():
        match(sum(part[name] for part in parts), expected, rtol=1e-5, atol=1e-6, name=name)


@pytest.mark.full
@pytest.mark.parametrize("cut", [4, 0])
def test_the_sum_over_ranks_is_the_mini_batch(cut: int):
    mode = "seq-mean-token-mean"

    def on_rank(rank: int, world: int) -> dict[str, Tensor]:
        rows = [slice(0, cut), slice(cut, 12)][rank]
        mask = mini_batch()["mask"][rows]
        denominators = loss_denominators(mask, mode, torch.distributed.group.WORLD)
        return losses(rows, denominators, mode)

    parts = run_ranks(on_rank, 2)
    for name, expected in losses(slice(0, 12), loss_denominators(mini_batch()["mask"], mode), mode).items():
        match(sum(part[name] for part in parts), expected, rtol=1e-5, atol=1e-6, name=name)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token-mean", 14 / 3), ("seq-mean-token-sum", 7.0), ("seq-mean-token-mean", 5.5)],
)
def test_modes_average_over_what_their_name_says(mode: str, expected: float):
    loss_mat = torch.tensor([[2.0, 4.0], [8.0, 100.0], [100.0, 100.0]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    mean = aggregate(loss_mat, mask, mode, loss_denominators(mask, mode))
    assert mean.item() == pytest.approx(expected)


def test_a_mini_batch_without_tokens_has_loss_zero():
    log_prob = torch.zeros(2, 3, requires_grad=True)
    mask = torch.zeros(2, 3)
    denominators = loss_denominators(mask, "token-mean")
    loss, stats = policy_loss(log_prob.detach(), log_prob, log_prob + 1, mask, denominators=denominators)
    loss.backward()
    assert loss == 0
    assert not log_prob.grad.any()
    assert all(value == 0 for value in stats.values())


def test_the_value_loss_takes_the_larger_of_both_errors():
    values, returns = torch.tensor([[3.0, 0.1]]), torch.tensor([[3.0, 1.0]])
    mask = torch.ones(1, 2)
    loss, stats = value_loss(
        values,
        returns,
        torch.zeros(1, 2),
        mask,
        denominators=loss_denominators(mask, "token-mean"),
        value_clip=0.5,
    )
    assert loss.item() == pytest.approx(0.5 * (2.5**2 + 0.9**2) / 2)
    assert stats["vf_clipfrac"] == 0.5
    assert stats["vpred_mean"].item() == pytest.approx(1.55)


def test_without_dual_clip_the_loss_is_not_bounded():
    old, new, mask = torch.tensor([[0.0]]), torch.tensor([[2.0]]), torch.ones(1, 1)
    denominators = loss_denominators(mask, "token-mean")
    for dual_clip, expected in ((None, math.exp(2)), (3.0, 3.0)):
        loss, stats = policy_loss(old, new, -mask, mask, denominators=denominators, dual_clip=dual_clip)
        assert loss.item() == pytest.approx(expected)
        assert stats["pg_clipfrac_lower"] == (dual_clip is not None)


def test_an_unknown_mode_lists_those_that_exist():
    with pytest.raises(ValueError, match="'mean'; there are token-mean, seq-mean-token-sum, "):
        loss_denominators(torch.ones(1, 1), "mean")
