"""The public functions, forced to their Triton form, against their plain one."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from golden import match
from torch import Tensor

from rolemesh import kernels as public
from rolemesh.kernels.forms import record_kernels

Kernels = Callable[[str], ModuleType]
DENOMINATORS = public.LossDenominators(loss=7.0, tokens=9.0)


@pytest.fixture
def compare(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Compare results and gradients of `function(*inputs)` as Triton and as plain torch; want those names."""

    def run(form: str, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[set[str], list]:
        monkeypatch.setenv("ROLEMESH_KERNELS", form)
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        with record_kernels() as ran:
            outputs = function(*leaves)
            outputs = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x is not None]
            sum((x * x).sum() for x in outputs if x.requires_grad).backward() if any(
                x.requires_grad for x in leaves
            ) else None
        return ran, [*(x.detach() for x in outputs), *(x.grad for x in leaves if x.requires_grad)]

    def compare(function: Callable[..., Any], *inputs: Tensor, names: set[str], rtol: float = 1e-5) -> None:
        ran, found = run("triton", function, inputs)
        assert {f"{name}/triton" for name in names} <= ran
        assert not [name for name in ran if not name.endswith("/triton")]
        for left, right in zip(found, run("reference", function, inputs)[1], strict=True):
            match(left, right, rtol=rtol, atol=rtol * 0.1)

    return compare


def batch(device: torch.device, n: int) -> list[Tensor]:
    """n float tensors and a mask [2, 21]."""
    generator = torch.Generator().manual_seed(n)
    tensors = torch.randn(n, 2, 21, generator=generator).to(device)
    return [*tensors, (torch.rand(2, 21, generator=generator) < 0.7).to(device)]


def test_log_prob_and_entropy(compare: Callable[..., None], device: torch.device):
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    labels = torch.tensor([0, 49, 7, 7], device=device)
    compare(
        lambda x: public.log_prob_and_entropy(x, labels, temperature=0.7),
        logits,
        names={"log_prob_stats", "log_prob_backward"},
    )


def test_linear_log_prob_and_entropy(compare: Callable[..., None], device: torch.device):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 8, generator=generator).to(device).requires_grad_()
    weight = torch.randn(50, 8, generator=generator).to(device).requires_grad_()
    labels = torch.tensor([0, 49, 7, 7], device=device)
    compare(
        lambda x, w: public.linear_log_prob_and_entropy(x, w, labels),
        hidden,
        weight,
        names={"log_prob_stats", "log_prob_backward"},
    )


def test_gae_and_discounted_returns(compare: Callable[..., None], device: torch.device):
    rewards, values, mask = batch(device, 2)
    compare(lambda r, v: public.gae(r, v, mask, 0.99, 0.95), rewards, values, names={"gae"})
    compare(lambda r: public.discounted_returns(r, mask, 0.99), rewards, names={"discounted_returns"})


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3+"])
def test_kl(kind: str, compare: Callable[..., None], device: torch.device):
    left, right, _ = batch(device, 2)
    compare(lambda x: public.kl(x, right, kind), left.requires_grad_(), names={"kl", "kl_backward"})


def test_losses(compare: Callable[..., None], device: torch.device):
    old, new, other, mask = batch(device, 3)
    for mode in public.LOSS_AGG_MODES:
        options = {"denominators": DENOMINATORS, "loss_agg": mode}
        compare(
            lambda x, options=options: public.policy_loss(old, x, other, mask, **options)[0],
            new.requires_grad_(),
            names={"policy_loss"},
        )
        compare(
            lambda x, options=options: public.value_loss(x, other, old, mask, **options)[0],
            new.requires_grad_(),
            names={"value_loss"},
        )


def test_masked_statistics(compare: Callable[..., None], device: torch.device):
    values, mask = batch(device, 1)
    compare(lambda x: public.masked_var(x, mask), values.requires_grad_(), names={"masked_moments"})
    compare(
        lambda x: public.masked_whiten(x, mask),
        values.requires_grad_(),
        names={"masked_moments", "masked_normalize"},
        rtol=1e-4,
    )


def test_group_statistics(compare: Callable[..., None], device: torch.device):
    scores = torch.randn(8, generator=torch.Generator().manual_seed(0)).to(device)
    index = [0, 1, 0, 2, 1, 0, 2, 3]
    compare(lambda x: public.group_statistics(x, index).mean, scores, names={"group_moments"})
