import math
from typing import Any

import pytest

from rolemesh.parallel.optim import OptimConfig, lr_at


def test_warm_up_rises_linearly_and_its_first_update_already_moves():
    config = OptimConfig(lr=8.0, warmup_steps=4)
    assert [lr_at(config, step) for step in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_linear_and_cosine_fall_to_min_lr_at_total_steps_and_stay():
    for schedule, half in (("linear", 6.0), ("cosine", 6.0)):
        config = OptimConfig(lr=10.0, min_lr=2.0, schedule=schedule, warmup_steps=2, total_steps=12)
        assert lr_at(config, 1) == lr_at(config, 2) == 10.0
        assert lr_at(config, 7) == pytest.approx(half)
        assert lr_at(config, 12) == lr_at(config, 50) == pytest.approx(2.0)
    assert lr_at(config, 3) == pytest.approx(2.0 + 8.0 * (1 + math.cos(math.pi / 10)) / 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 1e-3, "min_lr": 1e-2}, "min_lr=0.01, lr=0.001"),
        ({"schedule": "step"}, "constant, linear or cosine"),
        ({"schedule": "cosine"}, "needs total_steps above warmup_steps=0, got None"),
        ({"schedule": "linear", "warmup_steps": 5, "total_steps": 5}, "above warmup_steps=5, got 5"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"clip_grad": 0.0}, "clip_grad is 0.0"),
    ],
)
def test_values_out_of_bounds_are_named(values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        OptimConfig(**values)
