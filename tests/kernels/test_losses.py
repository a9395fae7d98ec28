import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gloo import run_ranks
from golden import golden_cases, match, run_case
from ops import check_compiles, check_op
from torch import Tensor

from rolemesh.kernels import (
    LOSS_AGG_MODES,
    LossDenominators,
    aggregate,
    loss_denominators,
    policy_loss,
    value_loss,
)

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


def plain_policy_loss(
    old: Tensor, new: Tensor, advantages: Tensor, mask: Tensor, dual_clip: float | None, mean: Callable
) -> tuple[Tensor, list[Tensor]]:
    """The formula as autograd differentiates it; `mean(values, mode)` is over the mini-batch."""
    log_ratio = torch.where(mask, new - old, 0.0).clamp(-20, 20)
    advantages = torch.where(mask, advantages, 0.0)
    unclipped = -advantages * log_ratio.exp()
    clipped = -advantages * log_ratio.exp().clamp(0.8, 1.3)
    loss = torch.maximum(unclipped, clipped)
    lower = torch.zeros_like(mask)
    if dual_clip is not None:
        lower = (advantages < 0) & (loss > -advantages * dual_clip)
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return loss, [mean(x.double()) for x in (clipped > unclipped, lower, -log_ratio)]


def plain_value_loss(values: Tensor, returns: Tensor, old: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    clipped = torch.clamp(values, old - 0.4, old + 0.4)
    errors = [torch.where(mask, x - returns, 0.0).square() for x in (values, clipped)]
    return 0.5 * torch.maximum(*errors), errors[1] > errors[0]


def hard_batch(dtype: torch.dtype) -> dict[str, Tensor]:
    """[6, 21]: on-policy and far tokens, advantages of 0, equal errors, an empty row, NaN outside."""
    generator = torch.Generator().manual_seed(5)
    old, new, advantages, values, returns, old_values = torch.randn(6, 6, 21, generator=generator).double()
    new[0] = old[0]
    new[1, :4] = old[1, :4] + torch.tensor([25.0, -25.0, 20.0, -20.0])
    advantages[2, ::3] = 0
    values[3], old_values[3], returns[3] = 1.0, 0.2, 0.8  # clipped to 0.6: both errors are 0.2
    mask = torch.rand(6, 21, generator=generator) < 0.8
    mask[5] = False
    columns = [old, new, advantages, values, returns, old_values]
    names = ["old", "new", "advantages", "values", "returns", "old_values"]
    filled = [column.to(dtype).masked_fill(~mask, math.nan) for column in columns]
    return dict(zip(names, filled, strict=True)) | {"mask": mask}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("dual_clip", [3.0, 1.1, None])
def test_the_policy_loss_and_its_gradient_are_those_of_autograd(
    dual_clip: float | None, mode: str, dtype: torch.dtype, form: str
):
    batch = hard_batch(dtype)
    mask, denominators = batch["mask"], loss_denominators(batch["mask"], mode)
    new = batch["new"].requires_grad_()
    loss, stats = policy_loss(
        batch["old"],
        new,
        batch["advantages"],
        mask,
        denominators=denominators,
        clip_high=0.3,
        dual_clip=dual_clip,
        loss_agg=mode,
    )
    wide = {name: batch[name].detach().double() for name in ("old", "new", "advantages")}
    wide_new = wide["new"].requires_grad_()
    expected_mat, expected_stats = plain_policy_loss(
        wide["old"], wide_new, wide["advantages"], mask, dual_clip, lambda x: x.sum() / denominators.tokens
    )
    expected = aggregate(expected_mat, mask, mode, denominators)
    (2 * loss).backward()
    (2 * expected).backward()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    match(loss, expected, rtol=1e-6, atol=0)
    for value, right in zip(stats.values(), expected_stats, strict=True):
        assert not value.requires_grad
        match(value, right, rtol=1e-9, atol=1e-12)
    assert new.grad.dtype == dtype
    match(new.grad[mask], wide_new.grad[mask], rtol=torch.finfo(dtype).eps, atol=1e-14)
    assert not new.grad[~mask].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_value_loss_and_its_gradient_are_those_of_autograd(mode: str, dtype: torch.dtype, form: str):
    batch = hard_batch(dtype)
    mask, denominators = batch["mask"], loss_denominators(batch["mask"], mode)
    values = batch["values"].requires_grad_()
    loss, stats = value_loss(
        values,
        batch["returns"],
        batch["old_values"],
        mask,
        denominators=denominators,
        value_clip=0.4,
        loss_agg=mode,
    )
    wide = values.detach().double().requires_grad_()
    expected_mat, larger = plain_value_loss(
        wide, batch["returns"].double(), batch["old_values"].double(), mask
    )
    expected = aggregate(expected_mat, mask, mode, denominators)
    grads = torch.autograd.grad(loss, values)[0], torch.autograd.grad(expected, wide)[0]
    match(loss, expected, rtol=1e-6, atol=0)
    match(stats["vf_clipfrac"], larger.double().sum() / denominators.tokens, rtol=1e-9, atol=0)
    match(stats["vpred_mean"], wide.detach()[mask].sum() / denominators.tokens, rtol=1e-9, atol=0)
    match(grads[0][mask], grads[1][mask], rtol=torch.finfo(dtype).eps, atol=1e-14)
    assert not grads[0][~mask].any()


def test_equal_errors_share_the_gradient(form: str):
    values = torch.tensor([[1.0]], requires_grad=True)  # clipped to 0.5, which is as far from 0.75
    loss, _ = value_loss(
        values,
        torch.full((1, 1), 0.75),
        torch.zeros(1, 1),
        torch.ones(1, 1),
        denominators=LossDenominators(1, 1),
        value_clip=0.5,
    )
    loss.backward()
    assert values.grad.item() == 0.125


def test_a_first_update_has_the_whole_policy_gradient(form: str):
    advantages = torch.tensor([[2.0, -3.0, 0.0]])
    log_prob = torch.full((1, 3), -1.5, requires_grad=True)
    ones = torch.ones(1, 3)
    loss, stats = policy_loss(
        log_prob.detach(), log_prob, advantages, ones, denominators=LossDenominators(1, 1)
    )
    loss.backward()
    assert torch.equal(log_prob.grad, -advantages)
    assert not any(stats.values())


def test_nan_inside_of_the_mask_is_in_loss_and_gradient(form: str):
    log_prob = torch.tensor([[math.nan, 0.0]], requires_grad=True)
    ones = torch.ones(1, 2)
    loss, _ = policy_loss(ones, log_prob, ones, ones, denominators=LossDenominators(2, 2))
    loss.backward()
    assert loss.isnan()
    assert log_prob.grad.isnan().tolist() == [[True, False]]


def test_the_number_of_threads_changes_nothing():
    columns = torch.randn(3, 70, 600)
    mask = torch.rand(70, 600) < 0.5
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2):
            torch.set_num_threads(n)
            log_prob = columns[1].clone().requires_grad_()
            loss, stats = policy_loss(
                columns[0], log_prob, columns[2], mask, denominators=LossDenominators(1, 1)
            )
            results.append([loss.detach(), torch.autograd.grad(loss, log_prob)[0], *stats.values()])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 1)])
def test_batches_of_any_shape_work(shape: tuple[int, int], form: str):
    ones = torch.ones(shape, requires_grad=True)
    for loss, _ in (
        policy_loss(ones, ones, ones, ones, denominators=LossDenominators(2, 2)),
        value_loss(ones, ones, ones, ones, denominators=LossDenominators(2, 2)),
    ):
        (grad,) = torch.autograd.grad(loss, ones)
        assert grad.shape == shape
        assert grad.isfinite().all()


def test_a_loss_cannot_be_differentiated_twice():
    ones = torch.ones(1, 2, requires_grad=True)
    loss, _ = value_loss(ones, ones * 2, ones * 0, ones, denominators=LossDenominators(1, 1))
    (grad,) = torch.autograd.grad(loss, ones, create_graph=True)
    with pytest.raises(RuntimeError, match="once only"):
        grad.sum().backward()


def test_shapes_that_differ_are_named():
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"\[2, 3\], \[2, 3\], \[2, 3\], \[2, 2\]"):
        policy_loss(ones, ones, ones, ones[:, :2], denominators=LossDenominators(1, 1))


@pytest.mark.full
def test_the_operations_are_known_to_torch():
    batch = {name: column.nan_to_num() for name, column in hard_batch(torch.float64).items()}
    mask, denominators = batch["mask"].bool(), LossDenominators(3.0, 7.0)
    policy = batch["old"], batch["new"], batch["advantages"], mask
    value = batch["values"], batch["returns"], batch["old_values"], mask
    check_op("policy_loss", *policy, 0.2, 0.3, math.inf, "seq-mean-token-mean", 3.0, 7.0)
    check_op("value_loss", *value, 0.5, "token-mean", 3.0, 7.0)

    def both(old: Tensor, new: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        actor, _ = policy_loss(old, new, advantages, mask, denominators=denominators, dual_clip=None)
        critic, _ = value_loss(new, advantages, old, mask, denominators=denominators)
        return actor + critic

    check_compiles(both, *policy)
    loss, _ = policy_loss(*(x.to("meta") for x in policy), denominators=denominators)
    assert loss.is_meta
