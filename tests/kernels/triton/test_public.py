"""The public functions, forced to their Triton form, against their plain one."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from golden import match

from rolemesh.kernels import gae
from rolemesh.kernels.forms import record_kernels


def test_gae(kernels: Callable[[str], ModuleType], device: torch.device, monkeypatch: pytest.MonkeyPatch):
    rewards, values = torch.randn(2, 5, 40, device=device)
    mask = torch.rand(5, 40, device=device) < 0.7
    monkeypatch.setenv("ROLEMESH_KERNELS", "triton")
    with record_kernels() as ran:
        found = gae(rewards, values, mask, 0.99, 0.95)
    assert ran == {"gae/triton"}
    monkeypatch.setenv("ROLEMESH_KERNELS", "reference")
    for left, right in zip(found, gae(rewards, values, mask, 0.99, 0.95), strict=True):
        match(left, right, rtol=1e-6, atol=1e-6)
