"""The section `algorithm`: presets by name, own files, and what is refused."""

import re
from pathlib import Path

import pytest

from rolemesh.engine.algorithms import estimator_names, policy_loss_names
from rolemesh.launch import assemble
from rolemesh.launch.algorithm_presets import ESTIMATORS, LOSSES, PRESETS
from rolemesh.launch.algorithm_rules import algorithm_notes
from rolemesh.launch.config import list_defaults, parse_recipe, to_yaml
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.request import graph_of, workload_of
from rolemesh.launch.schema import Recipe

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"
TEXT = """
data: train.parquet
batch: {samples_per_prompt: 4}
lengths: {max_response_tokens: 100}
actor: models/instruct
reward: ./reward.py:compute_score
"""
NAMES = [name for name in PRESETS if name != "ppo"]


def parse(name: str, *overrides: str) -> Recipe:
    critic = "critic: models/rm\n" if name == "ppo" else ""
    return parse_recipe(f"{TEXT}{critic}algorithm: {{name: {name}}}\n", Path("/recipes"), overrides)


def error_of(name: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        parse(name, *overrides)
    return str(caught.value)


def test_the_names_in_the_schema_are_those_that_are_registered():
    assert set(ESTIMATORS) <= set(estimator_names())
    assert set(LOSSES) <= set(policy_loss_names())


def test_the_documents_table_is_that_of_the_presets():
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+)[^|]*\| `(\w+)` \| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE
    )
    assert [row[0] for row in rows] == list(PRESETS)
    for name, _, estimator, loss in rows:
        assert (PRESETS[name]["estimator"], PRESETS[name].get("loss", "vanilla")) == (estimator, loss)


@pytest.mark.parametrize("name", PRESETS)
def test_every_algorithm_is_read_written_and_read_again(name: str):
    recipe = parse(name)
    assert recipe.has_critic == (name == "ppo")
    assert parse_recipe(to_yaml(recipe), Path("/")) == recipe


def test_a_name_sets_estimator_loss_and_numbers():
    dapo = parse("dapo")
    assert (dapo.algorithm.clip_low, dapo.algorithm.clip_high, dapo.algorithm.loss_agg) == (
        0.2,
        0.28,
        "token-mean",
    )
    advantage = assemble.advantage_spec(dapo)
    assert advantage.overlong is not None
    assert (advantage.overlong.max_tokens, advantage.overlong.buffer_tokens) == (100, 20)
    loss = assemble.policy_loss(parse("dr_grpo"))
    assert (loss.loss_agg, loss.norm_tokens) == ("seq-mean-token-sum-norm", 100)
    assert not assemble.advantage_spec(parse("dr_grpo")).norm_adv_by_std
    assert assemble.policy_loss(parse("gspo")).loss_agg == "seq-mean-token-mean"
    assert assemble.policy_loss(parse("cispo")).name == "cispo"
    assert assemble.advantage_spec(parse("grpo")).overlong is None


def test_an_own_step_is_named_by_the_recipe(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / "my_step.py").write_text(
        example.replace("above_greedy", "own_above_greedy").replace("plain_", "own_")
    )
    own = [f"algorithm.file={tmp_path}/my_step.py", "algorithm.loss=reinforce", "algorithm.estimator=remax"]
    recipe = parse("own_above_greedy", *own)
    assert recipe.algorithm.step == "own_above_greedy"
    assert {"generate_baseline", "reward_baseline"} <= {op.name for op in graph_of(recipe).operations}
    assert "needs the column values, which the step of own_above_greedy does not make" in error_of(
        "own_above_greedy", own[0], "algorithm.estimator=gae"
    )


def test_dynamic_sampling_is_on_by_name_and_refused_without_groups():
    assert graph_of(parse("dapo")).refill == ("generate", "reward")
    assert graph_of(parse("dapo", "algorithm.dynamic_sampling=false")).refill == ()
    on = parse("rloo", "algorithm.dynamic_sampling.on=true", "algorithm.dynamic_sampling.expect_tries=2.5")
    assert graph_of(on).refill
    assert workload_of(on).tries == 2.5
    assert workload_of(parse("grpo")).tries == 1
    said = error_of("remax", "algorithm.dynamic_sampling=true")
    assert "remax has the step of remax" in said
    assert "batch.samples_per_prompt is 1" in error_of("dapo", "batch.samples_per_prompt=1")
    assert "expect_tries is 9, more than tries (3)" in error_of(
        "dapo", "algorithm.dynamic_sampling={tries: 3, expect_tries: 9}"
    )


def test_what_is_written_goes_before_the_name():
    assert parse("dapo", "algorithm.clip_high=0.5").algorithm.clip_high == 0.5
    assert assemble.advantage_spec(parse("dapo", "algorithm.overlong.buffer_tokens=0")).overlong is None
    mixed = parse("rloo", "algorithm.loss=gspo").algorithm
    assert (mixed.estimator, mixed.loss, mixed.clip_high) == ("rloo", "gspo", 4e-4)


def test_defaults_are_told_as_they_count_for_this_name():
    text = "\n".join(list_defaults(parse("dapo")))
    assert "clip_high = 0.28" in text
    assert "estimator = grpo" in text


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("grop", "run.steps=1", "algorithm.name is 'grop', but must be one of"),
        ("grop", "run.steps=1", "did you mean grpo?"),
        ("grpo", "algorithm.estimator=rlo", "did you mean rloo?"),
        ("grpo", "algorithm.loss=ppo", "algorithm.loss is 'ppo', but must be one of vanilla, gspo, cispo"),
        ("grpo", "algorithm.estimator=gae", "needs the column values, which the step of grpo does not make"),
        ("ppo", "algorithm.estimator=grpo", "does not read the column values"),
        ("grpo", "algorithm.estimator=remax", "use algorithm.name remax"),
        ("rloo", "batch.samples_per_prompt=1", "rloo compares the samples of a prompt: at least 2"),
        ("dapo", "algorithm.overlong.buffer_tokens=101", "more than lengths.max_response_tokens (100)"),
        ("grpo", "algorithm.rollout_correction.mask=[5, 1]", "mask is [5.0, 1.0], but must be [low, high]"),
        ("grpo", "algorithm.file=none.py", "algorithm.file: no file"),
    ],
)
def test_what_cannot_run_is_refused(name: str, override: str, message: str):
    assert message in error_of(name, override)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("rloo", "algorithm.norm_adv_by_std=false"),
        ("rloo", "algorithm.gamma=0.9"),
        ("reinforce_plus_plus", "algorithm.lam=0.9"),
        ("gspo", "algorithm.loss_agg=token-mean"),
        ("gspo", "algorithm.dual_clip=2.0"),
        ("cispo", "algorithm.dual_clip=2.0"),
        ("grpo", "algorithm.norm_tokens=10"),
        ("grpo", "algorithm.overlong.penalty=2"),
        ("grpo", "algorithm.value_clip=0.1"),
        ("grpo", "algorithm.rollout_correction.max_weight=3"),
        ("grpo", "algorithm.rollout_correction.reject_by=mean"),
    ],
)
def test_a_key_that_counts_for_nothing_is_refused(name: str, key: str):
    assert f"{key.partition('=')[0]} would have no effect" in error_of(name, key)


def test_gamma_counts_for_reinforce_plus_plus():
    assert assemble.advantage_spec(parse("reinforce_plus_plus", "algorithm.gamma=0.9")).gamma == 0.9


def test_the_correction_reaches_the_workers():
    keys = ("weights=sequence", "max_weight=3", "mask=[0.5, 5]", "reject=[0, 4]", "reject_by=mean")
    overrides = [f"algorithm.rollout_correction.{key}" for key in keys]
    found = assemble.advantage_spec(parse("grpo", *overrides)).correction
    assert found is not None
    assert (found.weights, found.max_weight, found.mask) == ("sequence", 3, (0.5, 5))
    assert (found.reject, found.reject_by) == ((0, 4), "mean")
    assert assemble.advantage_spec(parse("grpo")).correction is None


def test_k1_in_the_loss_is_warned_of_and_is_not_the_default_there():
    assert parse("grpo", "algorithm.kl.in=loss").algorithm.kl.kind == "k3"
    assert parse("grpo", "algorithm.kl.in=reward").algorithm.kl.kind == "k1"
    assert not list(algorithm_notes(parse("grpo", "algorithm.kl.in=loss")))
    (note,) = algorithm_notes(parse("grpo", "algorithm.kl.in=loss", "algorithm.kl.kind=k1"))
    assert "ignores the reference" in note


def test_a_files_names_can_be_used_and_read_every_number(tmp_path: Path):
    file = tmp_path / "my_algo.py"
    file.write_text(
        "from rolemesh.engine.algorithms import register_estimator, register_policy_loss\n"
        "@register_estimator('keys_mine')\ndef estimator(**_): ...\n"
        "@register_policy_loss('keys_my_loss')\ndef loss(**_): ...\n"
    )
    overrides = [f"algorithm.file={file}", "algorithm.estimator=keys_mine", "algorithm.loss=keys_my_loss"]
    recipe = parse("grpo", *overrides, "algorithm.gamma=0.5", "algorithm.dual_clip=2")
    assert (assemble.advantage_spec(recipe).file, assemble.policy_loss(recipe).file) == (str(file), str(file))
    assert assemble.advantage_spec(recipe).gamma == 0.5
