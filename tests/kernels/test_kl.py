import math
from collections.abc import Callable

import pytest
import torch
from golden import golden_cases, match, run_case
from ops import check_compiles, check_op
from torch import Tensor

from rolemesh.kernels import KL_KINDS, kl

ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {  # of r = ref_log_prob - log_prob, as autograd sees them
    "k1": lambda r: -r,
    "abs": lambda r: r.abs(),
    "k2": lambda r: 0.5 * r.square(),
    "k3": lambda r: (r.clamp(-20, 20).expm1() - r.clamp(-20, 20)).clamp(max=10),
}


@pytest.mark.parametrize("case", golden_cases("kl_penalty"))
def test_kl_equals_the_golden_cases(case: dict):
    def call(logp: Tensor, ref_logp: Tensor, kind: str) -> dict[str, Tensor]:
        value = kl(logp.requires_grad_(), ref_logp, kind)
        return {"kl": value, "grad": torch.autograd.grad(value.sum(), logp)[0]}

    run_case("kl_penalty", case, call)


@pytest.mark.parametrize(
    ("kind", "expected"), [("k1", [-0.5, 0.5]), ("k2", [0.125, 0.125]), ("k3", [0.148721, 0.106531])]
)
def test_estimates_have_their_textbook_values(kind: str, expected: list[float], form: str):
    value = kl(torch.tensor([-1.0, -0.5]), torch.tensor([-0.5, -1.0]), kind)
    match(value, torch.tensor(expected), rtol=0, atol=1e-6)


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Log-probabilities [1003] and the reference's: near, far, equal, and at and beyond k3's bounds."""
    generator = torch.Generator().manual_seed(1)
    log_prob = torch.randn(1003, generator=generator, dtype=torch.float64) - 2
    scale = torch.logspace(-3, 1.3, 1003, dtype=torch.float64)
    ref_log_prob = log_prob + scale * torch.randn(1003, generator=generator, dtype=torch.float64)
    log_prob[:9] = 0
    ref_log_prob[:9] = torch.tensor([0, 20, -20, 21, -21, 2.5, 2.6, -1e4, 1e4])
    return log_prob.to(dtype), ref_log_prob.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ESTIMATES)
def test_values_and_both_gradients_are_those_of_float64_torch(kind: str, dtype: torch.dtype, form: str):
    inputs = [x.requires_grad_() for x in pairs(dtype)]
    weights = torch.linspace(-1, 2, 1003)
    value = kl(*inputs, kind)
    assert value.dtype == dtype
    grads = torch.autograd.grad((value * weights.to(dtype)).sum(), inputs)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = ESTIMATES[kind](wide[1] - wide[0])
    expected_grads = torch.autograd.grad((expected * weights.to(dtype).double()).sum(), wide)
    tolerance = {"rtol": max(torch.finfo(dtype).eps, 1e-9), "atol": 1e-14}
    match(value, expected, **tolerance)
    for grad, right in zip(grads, expected_grads, strict=True):
        assert grad.dtype == dtype
        match(grad, right, **tolerance)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_plus_takes_the_gradient_of_k2(kind: str):
    log_prob, ref_log_prob = (x.requires_grad_() for x in pairs(torch.float64))
    value = kl(log_prob, ref_log_prob, kind + "+")
    assert torch.equal(value, kl(log_prob, ref_log_prob, kind))
    for grad, sign in zip(torch.autograd.grad(value.sum(), [log_prob, ref_log_prob]), (1, -1), strict=True):
        match(grad, sign * (log_prob - ref_log_prob), rtol=1e-12, atol=0)


def test_k3_is_never_negative_and_keeps_its_digits_near_zero(form: str):
    log_prob = torch.logspace(-12, 0, 1000, dtype=torch.float64)
    for x in (log_prob, -log_prob):
        value = kl(x, torch.zeros_like(x), "k3")
        assert (value > 0).all()
        match(value[:600], (x.square() / 2 - x**3 / 6)[:600], rtol=1e-8, atol=0)


@pytest.mark.parametrize("kind", [*KL_KINDS, "k3+"])
def test_what_a_later_mask_drops_is_not_in_the_gradient(kind: str, form: str):
    log_prob = torch.tensor([-1.0, math.nan, -math.inf], requires_grad=True)
    token_kl = kl(log_prob, torch.tensor([-2.0, -1.0, -math.inf]), kind)
    torch.where(torch.tensor([True, False, False]), token_kl, 0.0).sum().backward()
    assert log_prob.grad.isfinite().all()
    assert not log_prob.grad[1:].any()


def test_nan_stays_visible(form: str):
    for kind in KL_KINDS:
        log_prob = torch.full((3,), math.nan, requires_grad=True)
        assert kl(log_prob, torch.zeros(3), kind).isnan().all()


def test_inputs_are_broadcast_and_promoted():
    log_prob = torch.randn(2, 3, requires_grad=True)
    value = kl(log_prob.bfloat16(), torch.zeros(3), "k2")
    assert value.dtype == torch.float32
    match(value, log_prob.bfloat16().float().square() / 2, rtol=1e-6, atol=0)
    value.sum().backward()
    assert log_prob.grad.shape == (2, 3)
    assert kl(torch.zeros(0, 4), torch.zeros(0, 4), "k3").shape == (0, 4)


def test_the_gradient_cannot_be_differentiated_again():
    log_prob = torch.ones(2, requires_grad=True)
    (grad,) = torch.autograd.grad(kl(log_prob, torch.zeros(2), "k2").sum(), log_prob, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


@pytest.mark.full
def test_the_operations_are_known_to_torch():
    log_prob, ref_log_prob = (x.requires_grad_() for x in pairs(torch.float64))
    check_op("kl", log_prob, ref_log_prob, "k3", "k2")
    check_op("kl_backward", log_prob.detach(), log_prob.detach(), ref_log_prob.detach(), "k3")
    check_compiles(lambda left, right: kl(left, right, "low_var_kl"), log_prob, ref_log_prob)
    assert kl(log_prob.to("meta"), ref_log_prob.to("meta"), "k3").shape == (1003,)


def test_an_unknown_kind_lists_those_that_exist():
    with pytest.raises(ValueError, match="'k4'; there are " + ", ".join(KL_KINDS)):
        kl(torch.zeros(1), torch.zeros(1), "k4")
