"""A profile through a plan, a run and back: what a run tells makes the next plan's seconds right."""

from dataclasses import replace

import pytest
from run_folders import split_run
from tiny import tiny_config

from rolemesh.launch.fields import RecipeError
from rolemesh.launch.plan_command import plan_recipe
from rolemesh.launch.report import ReportError, feed_profile, read_report
from rolemesh.placement.hardware import HardwareError

RECIPE = """
run: {device: cpu}
cluster: {nodes: 1, device: cpu, per_node: 4}
data: train.jsonl
algorithm: {name: ppo, kl: {in: reward, kind: k1, coef: 0.01}}
batch: {prompts: 16, micro_batch_tokens: 64}
lengths: {max_response_tokens: 24}
actor: {path: model, dtype: float32}
ref: {dtype: float32}
critic: {path: model, dtype: float32}
reward: {path: model, dtype: float32}
placement: split
"""


@pytest.fixture
def recipe(tmp_path):
    tiny_config().save_pretrained(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1"}\n')
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


@pytest.fixture
def profile(tmp_path):
    file = tmp_path / "cpu.yaml"
    file.write_text("device: cpu\nfigures: {tflops: [{float32: 0.04}, measured]}\n")
    return file


def test_plans_with_a_fed_profile_approach_what_the_run_took(recipe, profile, tmp_path):
    measured = {op.name: op.measured_s.median for op in read_report(split_run(tmp_path / "r")).operations}
    errors = []
    for i in range(12):
        plan, _ = plan_recipe(recipe, [], profiles=[profile])
        run = split_run(tmp_path / f"run{i}", first_s=1000.0 * (i + 1))
        (run / "plan.yaml").write_text(plan.to_yaml())
        predicted = plan.prediction.operations_s
        train = [sum(of[name] for name in ("update_actor", "update_critic")) for of in (predicted, measured)]
        errors.append(abs(train[0] / train[1] - 1))
        feed_profile(read_report(run), profile)
    assert errors[0] > 0.5
    assert errors[-1] < 0.05
    with pytest.raises(HardwareError, match="before"):
        feed_profile(read_report(run), profile)


def test_a_run_without_predictions_or_on_other_devices_feeds_nothing(profile, tmp_path):
    report = read_report(split_run(tmp_path / "run", predicted=False))
    before = profile.read_text()
    with pytest.raises(ReportError, match="no operation on cpu"):
        feed_profile(report, profile)
    other = replace(read_report(split_run(tmp_path / "other")), device_of_pool={"actor_side": "h100-80"})
    with pytest.raises(ReportError, match="no operation on cpu"):
        feed_profile(other, profile)
    assert profile.read_text() == before


def test_a_file_that_is_no_profile_is_refused(recipe, tmp_path):
    (tmp_path / "c.yaml").write_text("nodes: 1\n")
    with pytest.raises(RecipeError, match=r"--profile: .*c\.yaml: no profile"):
        plan_recipe(recipe, [], profiles=[tmp_path / "c.yaml"])
