"""Responses that are begun, on a stand-in for the rollout group: what a checkpoint holds of them."""

import io
from typing import Any

import numpy as np
import torch

from rolemesh.engine.columns import object_column
from rolemesh.engine.partial import PartialRollout, PartialSpec
from rolemesh.engine.protocol import DataProto


def rollout() -> PartialRollout:
    unused: Any = None
    return PartialRollout(PartialSpec(0.5, 4), unused, unused, unused)


def test_a_run_that_resumes_has_the_begun_responses_of_the_one_that_was_saved():
    first = rollout()
    assert first.state() == {}
    first.begun = DataProto.from_dict(
        {"responses": torch.arange(8).view(2, 4), "rollout_log_probs": torch.randn(2, 4)},
        {
            "uid": object_column(["1.0", "1.1"]),
            "reward_model": object_column([{"ground_truth": "7"}, {"ground_truth": None}]),
            "extra_info": object_column([{"tests": np.array([1, 2])}, {"level": np.int64(3)}]),
        },
    )
    file = io.BytesIO()
    torch.save(first.state(), file)
    file.seek(0)
    other = rollout()
    other.restore(torch.load(file, weights_only=True))
    assert other.begun is not None
    for name, column in first.begun.batch.items():
        assert torch.equal(other.begun.batch[name], column)
    others = {name: column.tolist() for name, column in other.begun.non_tensor_batch.items()}
    assert others == {
        "uid": ["1.0", "1.1"],
        "reward_model": [{"ground_truth": "7"}, {"ground_truth": None}],
        "extra_info": [{"tests": [1, 2]}, {"level": 3}],
    }
    other.restore({})
    assert len(other.begun) == 2
