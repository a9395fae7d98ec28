"""Policy losses by name: against other implementations, and cut into micro-batches and over ranks."""

import math
from typing import Any

import pytest
import torch
from gloo import run_ranks
from golden import golden_cases, match, run_case
from torch import Tensor

from rolemesh.engine.algorithms import get_policy_loss_fn, policy_loss_names, register_policy_loss
from rolemesh.kernels import LOSS_AGG_MODES, LossDenominators, aggregate, loss_denominators

NAMES = ("vanilla", "gspo", "cispo")
CASES = [("vanilla", mode) for mode in LOSS_AGG_MODES] + [("gspo", "seq-mean-token-mean")]
CASES += [("cispo", mode) for mode in LOSS_AGG_MODES]


@pytest.mark.parametrize("case", [case for name in NAMES for case in golden_cases("policy_loss", kind=name)])
def test_losses_equal_the_golden_cases(case: dict):
    def call(
        old_logp: Tensor,
        logp: Tensor,
        advantages: Tensor,
        mask: Tensor,
        kind: str,
        agg: str,
        is_weights: Tensor | None = None,
        clip_c: float = 3.0,
    ) -> dict[str, Tensor]:
        agg = "seq-mean-token-mean" if kind == "gspo" else agg  # there gspo overrules what it is given
        loss, stats = get_policy_loss_fn(kind)(
            old_log_prob=old_logp,
            log_prob=logp.requires_grad_(),
            advantages=advantages if is_weights is None else advantages * is_weights,
            mask=mask,
            denominators=loss_denominators(mask, agg),
            loss_agg=agg,
            dual_clip=clip_c,
        )
        return {"loss": loss, "grad": torch.autograd.grad(loss, logp)[0], **stats}

    run_case("policy_loss", case, call)


def mini_batch(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """12 sequences of up to 7 tokens with holes, one of them empty, NaN outside of the mask."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(12, 7, generator=generator) < 0.7
    mask[5] = False
    columns = 0.3 * torch.randn(3, 12, 7, generator=generator).masked_fill(~mask, math.nan)
    return dict(zip(("old", "new", "advantages"), columns.to(dtype), strict=True)) | {"mask": mask}


def loss_of(
    name: str, mode: str, rows: Any, denominators: LossDenominators, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The loss of some rows, its metrics, and its gradient [12, 7], which is 0 for other rows."""
    columns = mini_batch(dtype)
    new = columns["new"].requires_grad_()
    loss, stats = get_policy_loss_fn(name)(
        old_log_prob=columns["old"][rows],
        log_prob=new[rows],
        advantages=columns["advantages"][rows],
        mask=columns["mask"][rows],
        denominators=denominators,
        loss_agg=mode,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
    )
    return {"loss": loss.detach(), "grad": torch.autograd.grad(loss, new)[0], **stats}


@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.parametrize("size", [1, 5])
def test_any_micro_batches_in_any_order_sum_to_the_mini_batch(name: str, mode: str, size: int):
    denominators = loss_denominators(mini_batch()["mask"], mode)
    whole = loss_of(name, mode, slice(None), denominators)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    parts = [loss_of(name, mode, rows, denominators) for rows in order.split(size)]
    assert whole["grad"].any()
    for key, expected in whole.items():
        match(sum(part[key] for part in parts), expected, rtol=1e-5, atol=1e-6, name=key)


@pytest.mark.full
@pytest.mark.parametrize("cuts", [(4, 12), (0, 12), (5, 6, 12)], ids=str)
def test_any_number_of_ranks_gives_the_same_loss_and_gradient(cuts: tuple[int, ...]):
    def on_rank(rank: int, world: int) -> list[dict[str, Tensor]]:
        rows = slice((0, *cuts)[rank], cuts[rank])
        mask = mini_batch()["mask"][rows]
        group = torch.distributed.group.WORLD
        return [loss_of(name, mode, rows, loss_denominators(mask, mode, group)) for name, mode in CASES]

    for (name, mode), parts in zip(CASES, zip(*run_ranks(on_rank, len(cuts)), strict=True), strict=True):
        whole = loss_of(name, mode, slice(None), loss_denominators(mini_batch()["mask"], mode))
        for key, expected in whole.items():
            match(sum(part[key] for part in parts), expected, rtol=1e-5, atol=1e-6, name=f"{name} {key}")


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_bf16_is_computed_in_wider_numbers(name: str, mode: str):
    denominators = loss_denominators(mini_batch()["mask"], mode)
    half = loss_of(name, mode, slice(None), denominators, torch.bfloat16)
    whole = loss_of(name, mode, slice(None), denominators)
    assert half["grad"].dtype == torch.bfloat16
    for key in ("loss", "grad", "ppo_kl"):
        match(half[key], whole[key], rtol=2e-2, atol=2e-2, name=key)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("kept", [0, 1])
def test_nothing_to_learn_from_is_a_loss_of_0(name: str, shape: tuple[int, int], kept: int):
    new = torch.zeros(shape, requires_grad=True)
    mask, mode = torch.full(shape, kept), "seq-mean-token-mean"
    loss, stats = get_policy_loss_fn(name)(
        old_log_prob=torch.zeros(shape),
        log_prob=new,
        advantages=torch.full(shape, 0.0 if kept else math.nan),
        mask=mask,
        denominators=loss_denominators(mask, mode),
        loss_agg=mode,
    )
    assert loss.item() == 0
    assert all(value.item() == 0 for value in stats.values())
    assert not torch.autograd.grad(loss, new)[0].any()


@pytest.mark.parametrize("name", NAMES)
def test_on_the_first_update_the_ratio_is_1_and_the_gradient_reinforces(name: str):
    """Each token's gradient is then exactly -advantage over the denominator, with nothing clipped."""
    advantages, mode = torch.tensor([[1.5, -2.0, 0.25], [3.0, 1.0, 0.0]]), "seq-mean-token-mean"
    mask = torch.ones(2, 3)
    log_prob = torch.tensor([[-0.1, -3.7, -20.0], [-1e-7, -0.3, -1.1]], requires_grad=True)
    loss, stats = get_policy_loss_fn(name)(
        old_log_prob=log_prob.detach().clone(),
        log_prob=log_prob,
        advantages=advantages,
        mask=mask,
        denominators=loss_denominators(mask, mode),
        loss_agg=mode,
        clip_low=3e-4,
        clip_high=4e-4,
    )
    assert stats["ppo_kl"].item() == 0
    assert stats["pg_clipfrac"].item() == 0
    match(torch.autograd.grad(loss, log_prob)[0], -advantages / 6, rtol=1e-6, atol=0)


def test_gspo_clips_a_sequence_by_its_mean_log_ratio():
    """100 tokens that differ by 0.012: the product of their ratios is 3.32, their mean 1.012."""
    new = torch.full((1, 100), 0.012, requires_grad=True)
    mask, mode = torch.ones(1, 100), "seq-mean-token-mean"
    keywords = {"old_log_prob": torch.zeros(1, 100), "log_prob": new, "mask": mask, "loss_agg": mode}
    keywords |= {"denominators": loss_denominators(mask, mode), "advantages": torch.ones(1, 100)}
    free, _ = get_policy_loss_fn("gspo")(clip_high=0.02, **keywords)
    assert free.item() == pytest.approx(-math.exp(0.012), rel=1e-5)
    bound, stats = get_policy_loss_fn("gspo")(clip_high=0.01, **keywords)
    assert bound.item() == pytest.approx(-1.01, rel=1e-5)
    assert stats["pg_clipfrac"].item() == 1
    assert not torch.autograd.grad(bound, new)[0].any()
    with pytest.raises(ValueError, match="loss_agg is token-mean, but gspo's loss is a mean over sequences"):
        get_policy_loss_fn("gspo")(**(keywords | {"loss_agg": "token-mean"}))


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    new, mask = torch.tensor([[1.0, -1.0]], requires_grad=True), torch.ones(1, 2)
    loss, stats = get_policy_loss_fn("cispo")(
        old_log_prob=torch.zeros(1, 2),
        log_prob=new,
        advantages=torch.ones(1, 2),
        mask=mask,
        denominators=loss_denominators(mask, "token-mean"),
        clip_low=0.2,
        clip_high=0.28,
    )
    match(torch.autograd.grad(loss, new)[0], torch.tensor([[-0.64, -0.4]]), rtol=1e-6, atol=0)
    assert stats["pg_clipfrac"].item() == 1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_constant_of_dr_grpo_does_not_know_micro_batches(size: int):
    """Sequence sums 3, 1, 2, 2 and a longest length of 8: 1 as a sum over sequences."""
    mode, mask = "seq-mean-token-sum-norm", torch.arange(8) < torch.tensor([[3], [1], [2], [2]])
    for norm_tokens in (None, 8):
        denominators = loss_denominators(mask, mode, norm_tokens=norm_tokens)
        parts = [aggregate(torch.ones(len(part), 8), part, mode, denominators) for part in mask.split(size)]
        assert sum(parts).item() == pytest.approx(1.0)
    assert loss_denominators(mask, mode, norm_tokens=16).loss == 16


def test_names_are_found_and_not_taken_twice():
    assert set(NAMES) <= set(policy_loss_names())
    with pytest.raises(ValueError, match="'nope'; there are cispo, gspo, "):
        get_policy_loss_fn("nope")
    with pytest.raises(ValueError, match="'gspo' is in"):
        register_policy_loss("gspo")(get_policy_loss_fn("gspo"))
