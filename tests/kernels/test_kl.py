import pytest
import torch
from golden import golden_cases, match, run_case
from torch import Tensor

from rolemesh.kernels import KL_KINDS, kl


@pytest.mark.parametrize("case", golden_cases("kl_penalty"))
def test_kl_equals_the_golden_cases(case: dict):
    def call(logp: Tensor, ref_logp: Tensor, kind: str) -> dict[str, Tensor]:
        value = kl(logp.requires_grad_(), ref_logp, kind)
        return {"kl": value, "grad": torch.autograd.grad(value.sum(), logp)[0]}

    run_case("kl_penalty", case, call)


@pytest.mark.parametrize(
    ("kind", "expected"), [("k1", [-0.5, 0.5]), ("k2", [0.125, 0.125]), ("k3", [0.148721, 0.106531])]
)
def test_estimates_have_their_textbook_values(kind: str, expected: list[float]):
    value = kl(torch.tensor([-1.0, -0.5]), torch.tensor([-0.5, -1.0]), kind)
    match(value, torch.tensor(expected), rtol=0, atol=1e-6)


def test_k3_is_never_negative():
    log_prob, ref_log_prob = torch.randn(2, 10000) * 1e-3
    assert (kl(log_prob.double(), ref_log_prob.double(), "k3") >= 0).all()


def test_an_unknown_kind_lists_those_that_exist():
    with pytest.raises(ValueError, match="'k4'; there are " + ", ".join(KL_KINDS)):
        kl(torch.zeros(1), torch.zeros(1), "k4")
