"""Recipes as users write them: short forms, overrides, and errors that tell what to write instead."""

from pathlib import Path

import pytest

from rolemesh.launch.config import list_defaults, load_recipe, parse_recipe, to_yaml
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.request import graph_of
from rolemesh.launch.schema import Recipe

PPO = """
data: {train_files: [train.parquet], val_files: val.jsonl}
algorithm: {lam: 0.95, kl: {in: reward, kind: k1, coef: 1e-3}}
batch: {prompts: 64, mini_batch_samples: 16}
actor: {path: models/sft, optim: {lr: 1e-6}, layout: {tp: 2}}
critic: {path: models/rm, optim: {lr: 9.0e-6}}
reward: models/rm
placement:
  pools:
    actor_side: {roles: [actor, rollout, ref], share: 1/2}
    critic_side: {roles: [critic, reward], share: 1/2}
"""
GRPO = """
algorithm: grpo
data: train.parquet
batch: {samples_per_prompt: 4}
actor: models/instruct
reward: ./reward.py:compute_score
"""
FOLDER = Path("/recipes")


def parse(text: str, *overrides: str) -> Recipe:
    return parse_recipe(text, FOLDER, overrides)


def error_of(text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        parse(text, *overrides)
    return str(caught.value)


def test_a_bare_value_stands_for_its_sections_main_key():
    recipe = parse(GRPO)
    assert recipe.algorithm.name == "grpo"
    assert recipe.data.train_files == ("/recipes/train.parquet",)
    assert recipe.actor.path == "/recipes/models/instruct"
    assert recipe.placement.strategy == "colocate"


def test_a_path_that_ends_in_a_python_function_is_a_function_reward():
    assert parse(GRPO).reward.kind == "function"
    assert parse(GRPO).reward.path == "/recipes/reward.py:compute_score"
    assert parse(PPO).reward.kind == "model"


def test_roles_follow_from_algorithm_kl_and_reward():
    assert parse(PPO).roles == ("actor", "rollout", "critic", "ref", "reward")
    assert parse(GRPO).roles == ("actor", "rollout")
    assert parse(GRPO, "algorithm.kl.in=loss").roles == ("actor", "rollout", "ref")


def test_numbers_written_as_text_are_numbers():
    recipe = parse(PPO, "batch.prompts=1e3", "actor.optim.eps='1e-7'", "batch.mini_batch_samples=2_0")
    assert recipe.actor.optim.lr == 1e-6
    assert recipe.batch.prompts == 1000
    assert recipe.actor.optim.eps == 1e-7
    assert recipe.batch.mini_batch_samples == 20


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch.prompts=1.5", "batch.prompts is 1.5, but must be a whole number"),
        ("batch.prompts=true", "batch.prompts is True, but must be a whole number"),
        ("batch.prompts=0", "batch.prompts is 0, but must be at least 1"),
        ("actor.optim.lr=fast", "actor.optim.lr is 'fast', but must be a number"),
        ("algorithm.gamma=1.5", "algorithm.gamma is 1.5, but must be at most 1"),
        ("schedule.overlap=3", "schedule.overlap is 3, but must be true or false"),
        ("actor.layout=4", "actor.layout is 4, but must be a mapping of keys"),
        ("actor.dtype=bf16", "must be bfloat16 or float32; did you mean bfloat16?"),
        ("batch.mini_batch_samples=65", "but a step has 64 samples (64 prompts x 1): at most 64"),
        ("algorithm.kl.target=0.1", "algorithm.kl.target and horizon make the weight adaptive together"),
        ("placement.pools.actor_side.share=a/b", "must be a fraction such as 1/2"),
        ("placement.pools.actor_side.devices=4", "give the size once"),
        ("placement.pools.actor_side.roles=[actr]", "placement.pools.actor_side.roles is ['actr']"),
        ("batch.prompts", "has no '='"),
        ("actor.path=null", "actor.path is missing: Hugging Face folder"),
        ("actor.path=${nowhere}", "Interpolation key 'nowhere' not found"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_it_must_be(override: str, message: str):
    assert message in error_of(PPO, override)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("actor.optim.learning_rate", "did you mean actor.optim.lr?"),
        ("actor.optm.lr", "did you mean actor.optim?"),
        ("actr.path", "did you mean actor?"),
        ("batch.lr", "did you mean actor.optim.lr?"),
        ("+actor.dtype", "did you mean actor.dtype?"),
        ("model.actor.path", "did you mean actor.path?"),
        ("placement.pools.actor_side.sharing", "did you mean placement.pools.actor_side.share?"),
        ("data.train_batch_size", "verl's name; here it is batch.prompts"),
        ("actor_rollout_ref.actor.optim.lr", "verl's name; here it is actor.optim.lr"),
        ("critic.megatron.tensor_model_parallel_size", "verl's name; here it is critic.layout.tp"),
    ],
)
def test_an_unknown_key_names_the_one_that_was_meant(key: str, meant: str):
    message = error_of(PPO, f"{key}=1")
    assert message.startswith("unknown key ")
    assert meant in message


@pytest.mark.parametrize(
    ("text", "override", "reason"),
    [
        (GRPO, "critic.path=models/rm", "algorithm.name is grpo, which has no critic"),
        (GRPO, "algorithm.lam=0.9", "algorithm.name grpo), which has no critic"),
        (GRPO, "algorithm.kl.coef=0.1", "algorithm.kl.in is none"),
        (GRPO, "ref.dtype=float16", "algorithm.kl.in is none"),
        (GRPO, "reward.layout.tp=2", "reward.path is a function"),
        (GRPO, "data.val_prompts=8", "data.val_files is empty"),
        (PPO, "reward.workers=4", "reward.path is a model"),
        (PPO, "algorithm.norm_adv_by_std=false", "algorithm.estimator is gae"),
        (PPO, "actor.optim.min_lr=1e-7", "actor.optim.decay is constant"),
        (PPO, "placement.strategy=split", "placement.pools says which roles go where"),
        (PPO, "ref.stream=true", "reference and rollout take turns on pool actor_side"),
    ],
)
def test_a_key_that_another_makes_useless_is_an_error(text: str, override: str, reason: str):
    message = error_of(text, override)
    assert message.startswith(override.split("=")[0] + " would have no effect: ")
    assert reason in message


def test_a_reference_that_streams_takes_rows():
    pools = "{a: {roles: [actor, rollout], devices: 1}, b: {roles: [ref], devices: 1}}"
    apart = f"{GRPO}placement: {{pools: {pools}}}\n"
    said = ("algorithm.kl.in=loss", "ref.stream=true")
    assert graph_of(parse(apart, *said))["ref_log_prob"].takes == "rows"
    assert graph_of(parse(apart, said[0]))["ref_log_prob"].takes == "batch"
    for other in ("schedule.overlap=false", "algorithm.dynamic_sampling.on=true"):
        assert "ref.stream would have no effect" in error_of(apart, *said, other)


def test_steps_and_epochs_exclude_each_other():
    assert "run.epochs would have no effect" in error_of(PPO, "run.steps=5", "run.epochs=2")


@pytest.mark.parametrize(
    "override",
    [
        "placement.pools.actor_side.python=py",
    ],
)  # fmt: skip
def test_what_comes_in_a_later_version_is_refused_by_name(override: str):
    message = error_of(PPO, override)
    assert override.split("=")[0] in message
    assert "not in this version" in message


def test_a_path_to_resume_from_is_absolute_and_auto_is_a_word():
    assert parse_recipe(PPO, Path("/there"), ["run.resume=auto"]).run.resume == "auto"
    recipe = parse_recipe("run: {resume: a/step_3}" + PPO, Path("/there"))
    assert recipe.run.resume == "/there/a/step_3"


def test_the_best_checkpoint_needs_a_score_of_each_step_that_is_saved():
    saved = ("run.save_every=10", "run.keep_last=1", "run.keep_best=1")
    assert "data.val_files" in error_of(PPO, "data.val_files=[]", *saved)
    message = error_of(PPO, "data.val_files=[a.jsonl]", *saved, "run.validate_every=4")
    assert "run.validate_every to a divisor of run.save_every" in message
    assert "every checkpoint is kept" in error_of(PPO, "run.save_every=10", "run.keep_best=1")
    assert "no checkpoints" in error_of(PPO, "run.save_every=0", "run.keep_last=1")


def test_ppo_without_a_critic_is_an_error_and_no_silent_copy():
    assert "critic.path is missing" in error_of(PPO, "critic=null")


def test_generating_ahead_needs_overlap_and_prompts_that_no_score_decides():
    assert parse_recipe(GRPO, Path("/there"), ["schedule.staleness=2"]).schedule.staleness == 2
    message = error_of(GRPO, "schedule.staleness=1", "schedule.overlap=false")
    assert "schedule.overlap is false: leave overlap true, or staleness 0" in message
    message = error_of(GRPO, "schedule.staleness=1", "algorithm.dynamic_sampling=true")
    assert "draws a step's prompts by the scores of those before: use staleness 0" in message
    assert "must be at least 0" in error_of(GRPO, "schedule.staleness=-1")


def test_samples_older_than_the_weights_are_weighted_unless_said_otherwise():
    def weights(*overrides: str) -> str | None:
        return parse_recipe(GRPO, Path("/there"), overrides).algorithm.rollout_correction.weights

    assert weights() == "none"
    assert weights("schedule.staleness=1") == "token"
    assert weights("schedule.staleness=1", "algorithm.rollout_correction.weights=none") == "none"


def test_grpo_needs_samples_to_compare():
    assert "batch.samples_per_prompt is 1" in error_of(GRPO, "batch.samples_per_prompt=1")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("placement.pools.critic_side.roles=[critic]", "'reward' is in no pool"),
        ("placement.pools.critic_side.roles=[critic, reward, ref]", "'ref' is in several pools"),
        ("placement.pools.critic_side.share=2/3", "sum to 7/6, more than the whole cluster"),
    ],
)
def test_pools_hold_each_role_once_and_no_more_than_the_cluster(override: str, message: str):
    assert message in error_of(PPO, override)


def test_the_built_in_rollout_is_not_cut():
    assert "rollout.layout.tp is 2" in error_of(PPO, "rollout.layout.tp=2")


def test_overrides_win_and_keep_what_they_do_not_name():
    recipe = parse(PPO, "actor.layout.tp=4", "actor=other", "algorithm.kl.coef=0.5")
    assert (recipe.actor.layout.tp, recipe.actor.optim.lr) == (4, 1e-6)
    assert (recipe.algorithm.kl.coef, recipe.algorithm.lam) == (0.5, 0.95)


def test_paths_are_relative_to_the_recipe_and_in_overrides_to_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "ppo.yaml").write_text(PPO)
    recipe = load_recipe("sub/ppo.yaml", ["critic.path=models/new", "data.val_files=[a.jsonl, /b.jsonl]"])
    assert recipe.actor.path == str(tmp_path / "sub/models/sft")
    assert recipe.critic.path == str(tmp_path / "models/new")
    assert recipe.data.val_files == (str(tmp_path / "a.jsonl"), "/b.jsonl")
    assert recipe.run.dir == str(tmp_path / "runs/ppo")
    assert recipe.source == "sub/ppo.yaml"


def test_interpolation_takes_other_keys_and_the_environment(monkeypatch):
    monkeypatch.setenv("MODELS", "/models")
    recipe = parse(
        PPO, "critic.path=${oc.env:MODELS}/rm", "critic.optim=${actor.optim}", "reward.path=${critic.path}"
    )
    assert recipe.critic.path == recipe.reward.path == "/models/rm"
    assert recipe.critic.optim == recipe.actor.optim


def test_defaults_that_follow_from_other_keys_are_filled_in():
    recipe = parse(PPO, "batch.micro_batch_tokens=777", "reward.micro_batch_tokens=9")
    assert recipe.ref.path == recipe.actor.path
    assert (recipe.actor.micro_batch_tokens, recipe.reward.micro_batch_tokens) == (777, 9)


@pytest.mark.parametrize(
    "text", [PPO, GRPO, GRPO + "lengths: {expect: {mean: 20, p95: 90}}\nrun: {steps: 3}"]
)
def test_the_written_recipe_loads_to_an_equal_one_from_anywhere(text: str):
    recipe = parse(text)
    again = parse_recipe(to_yaml(recipe), Path("/elsewhere"))
    assert again == recipe
    assert to_yaml(again) == to_yaml(recipe)


def test_defaults_are_listed_without_the_keys_that_count_for_nothing():
    text = "\n".join(list_defaults(parse(GRPO)))
    assert "default: rollout: engine = hf, temperature = 1.0" in text
    assert "critic" not in text
    assert "lam = " not in text
    assert "samples_per_prompt" not in text


@pytest.mark.parametrize("text", ["- a\n- b", "actor: [", "3", ""])
def test_what_is_no_recipe_is_a_recipe_error(text: str):
    assert error_of(text)


def test_a_missing_recipe_file_is_a_recipe_error(tmp_path):
    with pytest.raises(RecipeError, match="no recipe at"):
        load_recipe(tmp_path / "none.yaml")
