"""The arithmetic of a step, read from a recipe."""

import pytest
import yaml

from rolemesh.placement.lengths import Fixed, LengthsError, log_normal
from rolemesh.placement.workload import Workload, WorkloadError

RECIPE = yaml.safe_load("""
data: {train_files: [train.parquet], prompt_key: prompt, max_prompt_tokens: 1024}
algorithm: {name: grpo, lam: 0.95}
batch: {prompts: 1000, samples_per_prompt: 8, mini_batch_samples: 512, epochs: 2, critic_warmup: 3}
lengths: {max_response_tokens: 4096, expect: {kind: lognormal, mean: 1200, p95: 3500}}
actor: {path: models/70b-sft}
""")


def test_a_recipe_says_what_a_step_does():
    workload = Workload.from_recipe(RECIPE)
    assert workload == Workload(
        prompts=1000,
        prompt_lengths=Fixed(1024),
        response_lengths=log_normal(1200, 3500, 4096),
        algorithm="grpo",
        samples_per_prompt=8,
        mini_batch_samples=512,
        epochs=2,
    )
    assert workload.samples == 8000
    assert workload.updates == 2 * 16  # 8,000 / 512 = 15.6: the last of an epoch is smaller
    assert workload.sequence_tokens == pytest.approx(2224)
    assert workload.tokens == pytest.approx(8000 * 2224)
    assert workload.longest_tokens == 5120


def test_one_update_takes_the_whole_batch_unless_told_otherwise():
    keys = {"algorithm": "ppo", "batch": {"prompts": 64}, "data": {"max_prompt_tokens": 10}}
    workload = Workload.from_recipe({**keys, "lengths": {"max_response_tokens": 20}})
    assert (workload.samples, workload.mini_batch, workload.updates) == (64, 64, 1)
    assert workload.tokens == 64 * 30


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"batch": {"prompts": 0}}, WorkloadError, "prompts must be a whole number of at least 1, got 0"),
        ({"batch": {"prompts": 8, "mini_batch_samples": 9}}, WorkloadError, "a step has 8 samples"),
        ({"batch": {}}, WorkloadError, "needs batch.prompts"),
        ({"data": {}}, WorkloadError, "needs data.max_prompt_tokens"),
        ({"lengths": {"expect": None}}, LengthsError, "lengths lacks max_response_tokens"),
    ],
)
def test_a_step_that_cannot_be_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        Workload.from_recipe({**RECIPE, **change})
