import math
import threading

import numpy as np
import pytest
import torch
from judged import TOKENIZER, batch, judge, scores
from ollama_server import ollama

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.response import response_tokens
from rolemesh.engine.rewards.composite import CompositeReward, Part
from rolemesh.engine.rewards.failure import FailurePolicy
from rolemesh.engine.rewards.function import FunctionReward, at_last_token
from rolemesh.engine.rewards.pool import RewardError


class Fixed:
    """Gives scores that were set; waits at `barrier`, if any, for the others."""

    def __init__(self, values, *, dropped=None, extras=None, metrics=None, barrier=None) -> None:
        self.values, self.dropped, self.extras = values, dropped, extras or {}
        self.metrics, self.barrier, self.closed = metrics or {}, barrier, False

    def score(self, data: DataProto) -> DataProto:
        if self.barrier:
            self.barrier.wait(timeout=20)
        if isinstance(self.values, Exception):
            raise self.values
        tensors = {"rm_scores": at_last_token(torch.tensor(self.values), response_tokens(data))}
        if self.dropped:
            tensors["dropped"] = torch.tensor(self.dropped)
        return DataProto.from_dict(tensors, self.extras, {"metrics": self.metrics})

    def close(self) -> None:
        self.closed = True


def test_the_sum_is_weighted_and_at_the_last_response_token():
    with CompositeReward({"a": Part(Fixed([1.0, 2.0])), "b": Part(Fixed([0.5, -1.0]), -2.0)}) as reward:
        result = reward.score(batch(["abc", "d"]))
    expected = torch.zeros(2, 5)
    expected[1, 0] = 4.0  # the first: 1 - 2 * 0.5
    assert torch.equal(result.batch["rm_scores"], expected)
    assert result.batch["rm_scores"].dtype == torch.float32
    metrics = result.meta_info["metrics"]
    assert (metrics["reward/a/mean"], metrics["reward/b/mean"]) == (1.5, -0.25)
    assert result.non_tensor_batch["b_score"].tolist() == [0.5, -1.0]


def test_a_row_that_one_part_drops_is_dropped_and_counts_in_no_mean():
    parts = {
        "a": Part(Fixed([1.0, 2.0, 3.0], dropped=[True, False, False])),
        "b": Part(Fixed([5.0, 6.0, 7.0], dropped=[False, False, True])),
        "c": Part(Fixed([1.0, 8.0, 1.0])),
    }
    with CompositeReward(parts) as reward:
        result = reward.score(batch(["a", "b", "c"]))
    assert result.batch["dropped"].tolist() == [True, False, True]
    assert scores(result) == [0, 16, 0]
    metrics = result.meta_info["metrics"]
    assert [metrics[f"reward/{name}/mean"] for name in "abc"] == [2, 6, 8]
    assert metrics["reward/dropped"] == 2
    assert result.non_tensor_batch["a_score"].tolist() == [None, 2.0, None]


def test_when_every_row_is_dropped_means_are_nan():
    with CompositeReward({"a": Part(Fixed([1.0], dropped=[True]))}) as reward:
        assert math.isnan(reward.score(batch(["a"])).meta_info["metrics"]["reward/a/mean"])


def test_extras_and_metrics_carry_their_parts_name():
    extras = {"acc": np.array([1, 0], dtype=object)}
    parts = {
        "a": Part(Fixed([1.0, 2.0], extras=extras, metrics={"reward/failed": 1.0, "reward/acc/mean": 0.5})),
        "b": Part(Fixed([1.0, 2.0], extras=extras, metrics={"reward/failed": 2.0})),
    }
    with CompositeReward(parts) as reward:
        result = reward.score(batch(["a", "b"]))
    assert {*result.non_tensor_batch} == {"a_score", "a_acc", "b_score", "b_acc"}
    metrics = result.meta_info["metrics"]
    assert metrics["reward/a/acc/mean"] == 0.5
    assert (metrics["reward/a/failed"], metrics["reward/failed"]) == (1, 3)


def test_parts_run_at_the_same_time():
    barrier = threading.Barrier(3)  # one after the other, none would pass it
    parts = {name: Part(Fixed([1.0], barrier=barrier)) for name in "abc"}
    with CompositeReward(parts) as reward:
        assert scores(reward.score(batch(["x"]))) == [3]


def test_a_part_that_fails_is_named():
    parts = {"good": Part(Fixed([1.0])), "style": Part(Fixed(RewardError("the judge is gone")))}
    with (
        CompositeReward(parts) as reward,
        pytest.raises(RewardError, match="part 'style' failed: the judge is gone"),
    ):
        reward.score(batch(["x"]))


@pytest.mark.parametrize(
    ("value", "why"), [([math.nan, 1.0], "sample 0 is not finite"), ([1.0, math.inf], "sample 1")]
)
def test_a_part_whose_score_is_not_finite_is_named(value, why):
    with (
        CompositeReward({"a": Part(Fixed(value))}) as reward,
        pytest.raises(RewardError, match=f"'a'.*{why}"),
    ):
        reward.score(batch(["a", "b"]))


def test_a_part_with_scores_of_another_shape_is_named():
    class Short(Fixed):
        def score(self, data: DataProto) -> DataProto:
            return DataProto.from_dict({"rm_scores": torch.zeros(1, 5)})

    with (
        CompositeReward({"a": Part(Short([]))}) as reward,
        pytest.raises(RewardError, match=r"\[1, 5\].*\[2, 5\]"),
    ):
        reward.score(batch(["abc", "b"]))


@pytest.mark.parametrize("parts", [{}, {"a": Part(Fixed([1.0]), math.nan)}])
def test_parts_that_cannot_be_summed_are_refused(parts):
    with pytest.raises(RewardError, match="parts"):
        CompositeReward(parts)


def test_closing_closes_every_part():
    parts = {name: Part(Fixed([1.0])) for name in "ab"}
    CompositeReward(parts).close()
    assert all(part.reward.closed for part in parts.values())


def test_a_function_and_a_judge_together(tmp_path):
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': float(len(solution_str)), 'short': len(solution_str) < 3}\n"
    )
    source = 'def answer(request, text): return "?" if "bad" in text else "0.5"'
    policy = FailurePolicy("drop_group", stop_above=0.5)
    data = batch(["ab", "bad", "abcd"], uids=["g", "h", "i"])
    function = FunctionReward(f"{tmp_path}/reward.py:compute_score", TOKENIZER, workers=1)
    with (
        ollama(tmp_path / "server", source) as server,
        judge(server.endpoint, policy, retries=0) as judged,
        CompositeReward({"length": Part(function, 0.1), "judge": Part(judged)}) as reward,
    ):
        result = reward.score(data)
    assert scores(result) == pytest.approx([0.7, 0, 0.9])
    assert result.batch["dropped"].tolist() == [False, True, False]
    metrics = result.meta_info["metrics"]
    assert metrics["reward/length/mean"] == 3
    assert metrics["reward/judge/mean"] == 0.5
    assert metrics["reward/judge/parse_failures"] == 1
    assert metrics["reward/dropped_groups"] == 1
    assert result.non_tensor_batch["length_short"].tolist() == [True, False, False]
