from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from golden import match

Kernels = Callable[[str], ModuleType]


@pytest.mark.parametrize(("n", "n_groups"), [(0, 3), (1, 1), (7, 3), (33, 9), (2500, 5), (5, 0)])
def test_moments_of_each_group_equal_float64(n: int, n_groups: int, kernels: Kernels, device: torch.device):
    generator = torch.Generator().manual_seed(n)
    scores = torch.randn(n, generator=generator, dtype=torch.float64) + 1e6
    group = torch.randint(max(n_groups - 1, 1), (n,), generator=generator)  # the last group has no row
    truth = torch.zeros(3, n_groups, dtype=torch.float64)
    for g in range(n_groups):
        of_group = scores[group == g]
        mean = of_group.mean() if len(of_group) else torch.tensor(0.0, dtype=torch.float64)
        truth[:, g] = torch.stack(
            [torch.tensor(float(len(of_group))), mean, (of_group - mean).square().sum()]
        )
    found = kernels("groups").group_moments(scores.to(device), group.to(device), n_groups)
    assert found.dtype == torch.float64
    match(found.cpu(), truth, rtol=1e-9, atol=1e-15)


def test_nan_stays_in_its_group(kernels: Kernels, device: torch.device):
    scores = torch.tensor([1.0, float("nan"), 3.0, 4.0], dtype=torch.float64)
    group = torch.tensor([0, 1, 0, 1])
    found = kernels("groups").group_moments(scores.to(device), group.to(device), 2).cpu()
    assert found[:, 0].tolist() == [2, 2, 2]
    assert found[1:, 1].isnan().all()
