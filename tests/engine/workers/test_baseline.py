"""The greedy answers of ReMax: one per prompt, generated, scored and copied to the prompt's rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.rollout import SamplingOptions
from rolemesh.engine.rollout.hf import HFRollout
from rolemesh.engine.workers.rollout import RolloutSpec, RolloutWorker
from rolemesh.engine.workers.scorer import ScoreWorker
from tests.tiny import tiny_checkpoint

OPTIONS = SamplingOptions(max_response_tokens=6, eos_ids=(2,), pad_id=0, seed=7)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> RolloutWorker:
    path = tiny_checkpoint(tmp_path_factory.mktemp("actor"), "llama", vocab=32)
    worker = RolloutWorker(RolloutSpec(str(path), "float32", 10**6, OPTIONS))
    worker.engine = HFRollout(path, "cpu", "float32", max_params=10**6)
    worker.engine.load_weights(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    return worker


def samples(worker: RolloutWorker) -> DataProto:
    """Two samples of three prompts of unequal length, as generation leaves them."""
    mask = torch.tensor([[0, 0, 1], [1, 1, 1], [0, 1, 1]]).repeat_interleave(2, 0)
    ids = torch.arange(3, 12).reshape(3, 3).repeat_interleave(2, 0) * mask
    prompts = DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "row_ids": torch.arange(6)})
    made = worker.engine.generate(prompts, OPTIONS)
    made.non_tensor_batch["uid"] = np.array(list("bbaacc"), dtype=object)
    return made


def test_every_sample_gets_its_prompts_likeliest_answer(worker: RolloutWorker):
    drawn = samples(worker)
    columns = drawn.select(["prompts", "attention_mask"], ["uid"])
    baseline = worker.generate_baseline(columns)
    model = worker.engine.model
    for row in range(6):
        prompt = drawn.batch["prompts"][row][drawn.batch["attention_mask"][row, :3].bool()]
        answer = baseline.batch["baseline_responses"][row][
            baseline.batch["baseline_response_mask"][row].bool()
        ]
        said = prompt
        for token in answer:  # one forward pass per token
            assert int(model(said[None]).logits[0, -1].argmax()) == int(token)
            said = torch.cat([said, token[None]])
    assert len(worker.generate_baseline(columns.slice(0, 0))) == 0


def test_each_greedy_answer_is_scored_once(worker: RolloutWorker):
    drawn = samples(worker)
    batch = drawn.select(["prompts", "attention_mask"], ["uid"])
    batch = batch.select(["prompts"]).union(worker.generate_baseline(batch))
    seen = []

    def score(data: DataProto) -> DataProto:
        seen.append(data)
        scores = torch.zeros(data.batch["responses"].shape)
        scores[:, -1] = data.batch["prompts"].sum(1).float()
        return DataProto.from_dict(
            {"rm_scores": scores, "dropped": scores[:, -1] > 20}, {"acc": scores.numpy()}
        )

    scorer = ScoreWorker(SimpleNamespace(), "")  # type: ignore[arg-type]
    scorer.reward = SimpleNamespace(score=score)
    batch.non_tensor_batch["uid"] = drawn.non_tensor_batch["uid"]
    result = scorer.compute_baseline(batch)
    assert [len(data) for data in seen] == [3]
    assert {"input_ids", "attention_mask", "responses", "response_mask", "prompts"} <= set(
        seen[0].batch.keys()
    )
    sums = drawn.batch["prompts"].sum(1)
    assert result.batch["reward_baselines"].tolist() == sums.tolist()
    assert result.batch["baseline_dropped"].tolist() == (sums > 20).tolist()
    assert set(result.columns) == {"reward_baselines", "baseline_dropped"}
