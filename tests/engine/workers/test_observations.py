"""Tokens that the model has read and not written: they stand in the sample and count nowhere else."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny import char_tokenizer

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.response import own_tokens, response_tokens
from rolemesh.engine.rewards.function import at_last_token
from rolemesh.engine.validation import sample_table, validation_metrics
from rolemesh.engine.workers.advantage import AdvantageSpec, AdvantageWorker, without_truncated

END = 2
OWN = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 1, 1, 1, 1, 1]])
THERE = torch.tensor([[1] * 8, [1] * 3 + [0] * 5, [1] * 8])  # row 0 ends with what it could not answer


@pytest.fixture
def worker() -> Iterator[AdvantageWorker]:
    """A worker that is alone and has no model."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = object.__new__(AdvantageWorker)
    made.model = SimpleNamespace(groups=SimpleNamespace(dp=dist.group.WORLD))
    yield made
    dist.destroy_process_group()


def data() -> DataProto:
    generator = torch.Generator().manual_seed(0)
    responses = torch.randint(20, 90, OWN.shape, generator=generator) * THERE
    responses[0, [1, 5]] = responses[1, 2] = END  # row 2 is cut in its second turn
    junk = torch.full(OWN.shape, torch.nan)
    old = torch.where(OWN.bool(), -torch.rand(OWN.shape, generator=generator), junk)
    batch = DataProto.from_dict(
        {
            "prompts": torch.full((3, 2), 30),
            "responses": responses,
            "response_mask": OWN.clone(),
            "attention_mask": torch.cat([torch.ones(3, 2, dtype=torch.int64), THERE], dim=1),
            "old_log_probs": old,
            "rollout_log_probs": torch.where(OWN.bool(), old + 0.1, 0.0),
            "weight_versions": torch.where(OWN.bool(), 3, -1),
            "values": torch.where(OWN.bool(), torch.rand(OWN.shape, generator=generator), junk),
            "num_turns": torch.tensor([2, 1, 2]),
            "tool_s": torch.tensor([0.5, 0.0, 0.25]),
        },
        {"uid": list("aab")},
    )
    batch.batch["rm_scores"] = at_last_token(torch.tensor([1.0, 2.0, 4.0]), own_tokens(batch))
    return batch


def test_the_score_is_on_the_models_last_token_and_no_other():
    scores = data().batch["rm_scores"]
    assert scores.nonzero().tolist() == [[0, 5], [1, 2], [2, 7]]
    assert (scores * OWN).sum(-1).tolist() == [1.0, 2.0, 4.0]


def test_advantages_go_over_the_gap_as_if_it_were_not_there(worker: AdvantageWorker):
    """GAE by hand on the model's tokens alone; what lies in between (NaN) is never read."""
    gamma, lam = 0.9, 0.5
    result = worker.compute_advantage(data(), AdvantageSpec("gae", gamma, lam)).batch
    batch = data().batch
    for row in range(3):
        own = OWN[row].bool()
        values, rewards = batch["values"][row][own].tolist(), batch["rm_scores"][row][own].tolist()
        running, following, expected = 0.0, 0.0, []
        for value, reward in zip(reversed(values), reversed(rewards), strict=True):
            running = reward + gamma * following - value + gamma * lam * running
            following = value
            expected.insert(0, running + value)
        assert result["returns"][row][own].tolist() == pytest.approx(expected, abs=1e-6)
        assert not result["returns"][row][~own].any()
        assert not result["advantages"][row][~own].any()
    whitened = result["advantages"][OWN.bool()]
    assert (whitened.mean().item(), whitened.std().item()) == pytest.approx((0, 1), abs=1e-5)


def test_metrics_count_the_models_tokens_and_lengths_all_of_a_response(worker: AdvantageWorker):
    metrics = worker.compute_advantage(data(), AdvantageSpec("gae"), version=5).meta_info["metrics"]
    assert metrics["training/response_tokens"] == 13
    assert metrics["response_length/mean"] == pytest.approx((8 + 3 + 8) / 3)
    assert metrics["response_length/clip_ratio"] == pytest.approx(2 / 3)
    assert metrics["agent/model_tokens/mean"] == pytest.approx(13 / 3)
    assert metrics["agent/observation_tokens/mean"] == pytest.approx((4 + 0 + 2) / 3)
    assert (metrics["agent/turns/mean"], metrics["agent/turns/max"]) == (pytest.approx(5 / 3), 2)
    assert metrics["agent/tool_s/mean"] == pytest.approx(0.25)
    assert metrics["training/staleness/min"] == metrics["training/staleness/max"] == 2
    assert metrics["training/rollout_probs_diff/max"] < 0.11


def test_a_row_that_is_left_out_is_so_in_every_mask(worker: AdvantageWorker):
    """Row 0 ends with an observation where there was no more room, row 2 within a turn: both are cut."""
    left = without_truncated(data(), (END,))
    assert left.batch["response_mask"].tolist() == [[0] * 8, OWN[1].tolist(), [0] * 8]
    result = worker.compute_advantage(data(), AdvantageSpec("grpo", end_ids=(END,)))
    for name in ("advantages", "returns", "token_level_rewards", "token_level_scores"):
        assert not result.batch[name][[0, 2]].any(), name
    metrics = result.meta_info["metrics"]
    assert metrics["response_length/excluded_rows"] == 2
    assert (metrics["training/response_tokens"], metrics["agent/model_tokens/mean"]) == (3, 3)
    assert metrics["agent/observation_tokens/mean"] == 0


def test_samples_are_shown_whole():
    batch = data()
    (first, *_) = sample_table(batch, char_tokenizer())
    assert (first["response_tokens"], first["turns"], first["score"]) == (8, 2, 1.0)
    assert first["response"] == char_tokenizer().decode(batch.batch["responses"][0].tolist())
    assert validation_metrics(batch)["val/response_length/mean"] == pytest.approx(19 / 3)
    assert np.array_equal(response_tokens(batch).numpy(), THERE.bool().numpy())
