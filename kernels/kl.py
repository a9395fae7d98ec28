"""Per-token estimates of KL(policy || reference) from the log-probabilities of sampled tokens.

With r = ref_log_prob - log_prob (Schulman 2020, "Approximating KL divergence"): k1 = -r is unbiased and may
be negative; k2 = r^2 / 2 has the gradient of the KL itself; k3 = e^r - r - 1 is unbiased and never negative.
As a loss, k1's gradient does not depend on the reference at all: use it in rewards only.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rolemesh.kernels.arrays import wide
from rolemesh.kernels.forms import Kernel
from rolemesh.kernels.library import torch_op

# Every name of an estimate, and the one by which kernels know it.
KL_KINDS: Mapping[str, str] = MappingProxyType(
    {"k1": "k1", "kl": "k1", "abs": "abs", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}
)


def kl(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """KL estimate of each token, in nats, shaped as the inputs and of their promoted dtype.

    Differentiable in both inputs, once. Where the gradient that arrives is 0 so is the one that leaves: a
    mask after this call also keeps NaN outside of it from the gradient. Computed in float64.

    Args:
        kind: `k1` (or `kl`), `abs` (|r|), `k2` (or `mse`), `k3` (or `low_var_kl`; r is clamped to +-20 and
            the result to 10, as in verl), or `k1+`, `k2+`, `k3+`: that estimate's value with the gradient of
            k2. verl documents the last ones and raises NotImplementedError for them.

    Raises:
        ValueError: an unknown kind; the message lists those that exist.
    """
    value_kind = kind.removesuffix("+")
    if value_kind not in KL_KINDS:
        raise ValueError(f"unknown kind of KL {kind!r}; there are {', '.join(KL_KINDS)}, each also with a +")
    value_kind = KL_KINDS[value_kind]
    log_prob, ref_log_prob = torch.broadcast_tensors(log_prob, ref_log_prob)
    return _kl(log_prob, ref_log_prob, value_kind, "k2" if kind.endswith("+") else value_kind)


def _flat(log_prob: Tensor, ref_log_prob: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(log_prob.dtype, ref_log_prob.dtype)
    return log_prob.reshape(-1).to(dtype), ref_log_prob.reshape(-1).to(dtype)


def _empty(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    dtype = torch.promote_types(log_prob.dtype, ref_log_prob.dtype)
    return log_prob.new_empty(log_prob.shape, dtype=dtype)


def _fake_slope(grad: Tensor, log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    return _empty(log_prob, ref_log_prob)


@torch_op(fake=_fake_slope)
def _kl_backward(grad: Tensor, log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    left, right = _flat(log_prob, ref_log_prob)
    return _backward_kernel(grad.reshape(-1).to(left.dtype), left, right, kind).view(log_prob.shape)


def _fake_kl(log_prob: Tensor, ref_log_prob: Tensor, kind: str, slope_kind: str) -> Tensor:
    return _empty(log_prob, ref_log_prob)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, str, str], output: Tensor) -> None:
    log_prob, ref_log_prob, _, ctx.slope_kind = inputs
    ctx.save_for_backward(log_prob, ref_log_prob)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    log_prob, ref_log_prob = ctx.saved_tensors
    slope = _kl_backward(grad, log_prob, ref_log_prob, ctx.slope_kind)
    return slope.to(log_prob.dtype), -slope.to(ref_log_prob.dtype), None, None


@torch_op(fake=_fake_kl, setup=_setup_context, backward=_backward)
def _kl(log_prob: Tensor, ref_log_prob: Tensor, kind: str, slope_kind: str) -> Tensor:
    """The estimate `kind`, with the gradient of `slope_kind`."""
    left, right = _flat(log_prob, ref_log_prob)
    return _kl_kernel(left, right, kind).view(log_prob.shape)


def kl_reference(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """The estimate of each token by plain torch in float64."""
    difference = log_prob.double() - ref_log_prob.double()
    if kind == "abs":
        difference = difference.abs()
    elif kind == "k2":
        difference = 0.5 * difference.square()
    elif kind == "k3":
        difference = _k3(difference.neg().clamp(-20, 20)).clamp(max=10)
    return difference.to(log_prob.dtype)


def kl_backward_reference(grad: Tensor, log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """`grad` times the estimate's derivative in `log_prob`: where k3 is clamped 0, at the bounds not yet."""
    difference = log_prob.double() - ref_log_prob.double()
    if kind == "k1":
        slope = torch.ones_like(difference)
    elif kind == "abs":
        slope = difference.sign() + 0 * difference  # sign(NaN) is 0
    elif kind == "k2":
        slope = difference
    else:
        log_ratio = difference.neg().clamp(-20, 20)
        clamped = (difference.abs() > 20) | (_k3(log_ratio) > 10)
        slope = torch.where(clamped, 0.0, -torch.expm1(log_ratio))
    return torch.where(grad == 0, 0.0, grad.double() * slope).to(log_prob.dtype)


def _k3(log_ratio: Tensor) -> Tensor:
    """e^r - r - 1: near 0 by its series, as the difference loses all digits there."""
    r = log_ratio
    series = 0.5 * r.square() * (1 + r / 3 * (1 + r / 4 * (1 + r / 5)))
    return torch.where(r.abs() < 1e-3, series, torch.expm1(r) - r)


def _kl_cpp(cpu: Any, log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    left, right = wide(log_prob), wide(ref_log_prob)
    out = torch.empty_like(left)
    cpu.kl(left, right, kind, out, torch.get_num_threads())
    return out.to(log_prob.dtype)


def _backward_cpp(cpu: Any, grad: Tensor, log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    left, right = wide(log_prob), wide(ref_log_prob)
    out = torch.empty_like(left)
    cpu.kl_backward(wide(grad), left, right, kind, out, torch.get_num_threads())
    return out.to(log_prob.dtype)


_kl_kernel = Kernel("kl", reference=kl_reference, cpp=_kl_cpp, triton="losses")
_backward_kernel = Kernel("kl_backward", reference=kl_backward_reference, cpp=_backward_cpp, triton="losses")
