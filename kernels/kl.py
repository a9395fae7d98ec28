"""Per-token estimates of KL(policy || reference) from the log-probabilities of sampled tokens.

With r = ref_log_prob - log_prob (Schulman 2020, "Approximating KL divergence"): k1 = -r is unbiased and may
be negative; k2 = r^2 / 2 has the gradient of the KL itself; k3 = e^r - r - 1 is unbiased and never negative.
As a loss, k1's gradient does not depend on the reference at all: use it in rewards only.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor


def kl(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """KL estimate of each token, in nats, shaped as the inputs; differentiable in `log_prob`.

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
    value = KL_KINDS[value_kind](log_prob, ref_log_prob)
    if value_kind == kind:
        return value
    straight = _k2(log_prob, ref_log_prob)
    return straight - straight.detach() + value.detach()


def _k1(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    return log_prob - ref_log_prob


def _abs(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    return (log_prob - ref_log_prob).abs()


def _k2(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    return 0.5 * (log_prob - ref_log_prob).square()


def _k3(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    log_ratio = (ref_log_prob - log_prob).clamp(-20, 20)
    return (torch.exp(log_ratio) - log_ratio - 1).clamp(max=10)


KL_KINDS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"k1": _k1, "kl": _k1, "abs": _abs, "k2": _k2, "mse": _k2, "k3": _k3, "low_var_kl": _k3}
)
