"""Specs of benchmarks: what they expand to, and what is said of one that is wrong."""

from pathlib import Path

import pytest

from rolemesh.launch.bench_spec import STRATEGIES, Limits, load_spec, merged, parse_spec
from rolemesh.launch.fields import RecipeError

EXAMPLES = Path(__file__).parents[2] / "examples" / "bench"
MODEL = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
BASE = {"algorithm": {"name": "ppo", "kl": {"in": "reward"}}, "rollout": "vllm"}


def spec(**changes):
    tree = {"recipe": BASE, "models": {"small": MODEL}, "clusters": ["1 x h100x8"]} | changes
    return parse_spec(tree, EXAMPLES)


def test_a_matrix_has_a_cell_for_every_combination():
    found = spec(
        models={"small": MODEL, "8b": "llama-3.1-8b"},
        clusters=["1 x h100x8", "2 x h100x8", "2 x a100-80x8"],
        workloads={"short": {"lengths": {"max_response_tokens": 256}}, "long": {"batch": {"prompts": 64}}},
        strategies=["split", "auto"],
    )
    assert found.n_cells == 2 * 3 * 2 * 2
    assert len({(case.model, case.cluster, case.workload) for case in found.cases}) == 12
    case = next(c for c in found.cases if (c.workload, c.cluster) == ("short", "2 x h100x8"))
    assert case.spec.n_devices == 16
    assert case.recipes["split"].lengths.max_response_tokens == 256
    assert {name: recipe.placement.strategy for name, recipe in case.recipes.items()} == {
        "split": "split", "auto": "auto"
    }  # fmt: skip


def test_all_strategies_are_compared_when_none_is_named():
    assert spec().strategies == STRATEGIES


def test_a_model_alone_is_every_roles_and_scorers_get_one_value_as_their_head():
    (case,) = spec().cases
    assert set(case.shapes) == {"actor", "critic", "ref", "reward"}
    assert case.shapes["critic"].n_labels == case.shapes["reward"].n_labels == 1
    assert case.shapes["actor"].n_labels is None
    assert case.shapes["critic"].head_params == 256


def test_a_model_may_be_each_roles_own():
    own = {"actor": MODEL, "critic": {**MODEL, "num_hidden_layers": 2}}
    (case,) = spec(models={"own": own}).cases
    assert [case.shapes[role].n_layers for role in ("actor", "ref", "critic", "reward")] == [4, 4, 2, 4]


def test_grpo_with_a_function_needs_neither_critic_nor_reward_model():
    sections = {"algorithm": {"name": "grpo", "kl": {"in": "loss"}}, "batch": {"samples_per_prompt": 4}}
    (case,) = spec(
        recipe={"rollout": "vllm"}, workloads={"math": {**sections, "reward": "reward.py:score"}}
    ).cases
    assert set(case.shapes) == {"actor", "ref"}


def test_who_scores_is_the_workloads_word_then_the_models_then_the_recipes():
    function, other = {"reward": "recipe.py:score"}, {"own": {"reward": "workload.py:score"}}

    def path(**changes):
        return Path(spec(**changes).cases[0].recipes["auto"].reward.path).name

    assert path() == "config.json"
    assert path(recipe=BASE | function) == "recipe.py:score"
    assert path(recipe=BASE | function, models={"m": {"actor": MODEL, "reward": MODEL}}) == "config.json"
    assert path(recipe=BASE | function, workloads=other) == "workload.py:score"


def test_a_recipe_file_gives_the_rest_its_paths_are_its_own(tmp_path):
    (tmp_path / "deep").mkdir()
    recipe = "actor: {path: mine, dtype: float32}\nplacement: split\ncluster: {nodes: 9}\ndata: a.jsonl\n"
    (tmp_path / "deep" / "r.yaml").write_text(recipe + "reward: mine\ncritic: mine\n")
    tree = {"recipe": "deep/r.yaml", "models": {"small": MODEL}, "clusters": ["h100x8"], "strategies": "auto"}
    (case,) = parse_spec(tree, tmp_path).cases
    assert case.recipes["auto"].data.train_files == (str(tmp_path / "deep" / "a.jsonl"),)
    assert (case.recipes["auto"].actor.dtype, case.spec.n_devices) == ("float32", 8)
    assert case.recipes["auto"].placement.strategy == "auto"


def test_overrides_reach_into_the_spec():
    changes = ["limits.cell_s=3", "recipe.batch.prompts=512", "clusters=[h100x8]"]
    found = load_spec(EXAMPLES / "quick.yaml", changes)
    assert found.limits.cell_s == 3
    assert [case.cluster for case in found.cases] == ["h100x8"]
    assert found.cases[0].recipes["auto"].batch.prompts == 512
    assert found.cases[0].recipes["auto"].batch.mini_batch_samples == 256


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"modles": []}, "the spec has no key 'modles'.*did you mean models?"),
        ({"models": None}, "the spec needs models"),
        ({"clusters": ["16 y h100x8"]}, "clusters: 16 y h100x8: .*is no preset"),
        ({"clusters": ["1 x h10x8"]}, "clusters: 1 x h10x8: .*did you mean"),
        ({"strategies": ["splot"]}, "neither a strategy nor a plan file; did you mean split?"),
        ({"strategies": ["split", "split"]}, "strategies has split twice"),
        ({"models": ["llama-3.1-8"]}, "did you mean llama-3.1-8b?"),
        ({"models": [MODEL]}, "write models as a mapping of names"),
        ({"models": {"x": {"critic": MODEL}}}, "models.x needs actor"),
        ({"models": {"x": {"actr": MODEL}}}, "models.x has no key 'actr'.*did you mean actor?"),
        ({"models": {"x": {**MODEL, "model_type": "bert"}}}, "models: actor: model_type 'bert'"),
        ({"workloads": {"w": {"btch": {}}}}, "workloads.w has no key 'btch'.*did you mean batch?"),
        ({"workloads": {"w": {"batch": {"prompt": 2}}}}, "small, colocate: .*did you mean batch.prompts?"),
        ({"recipe": {**BASE, "placement": "split"}}, "recipe.placement and recipe.cluster are axes"),
        ({"recipe": "nowhere.yaml"}, "recipe: no file"),
        ({"limits": {"cells": 3}}, "limits has no key 'cells'.*did you mean cell_s?"),
        ({"limits": {"steps": 0}}, "limits.steps must be a number of at least 1, got 0"),
        ({"run": "yes please"}, "run is 'yes please', but must be true"),
        ({"profiles": ["none.yaml"]}, "profiles: "),
        ({"run": True, "clusters": ["1 x h100x8 + 1 x a100-80x8"]}, "equal nodes of one device type"),
    ],
)
def test_what_is_wrong_is_said_with_the_nearest_right(changes, said):
    with pytest.raises(RecipeError, match=said):
        spec(**changes)


def test_a_missing_or_unreadable_file_is_said(tmp_path):
    with pytest.raises(RecipeError, match="no spec at"):
        load_spec(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("models: [")
    with pytest.raises(RecipeError, match="not readable as YAML"):
        load_spec(tmp_path / "bad.yaml")
    with pytest.raises(RecipeError, match="has no '='"):
        load_spec(EXAMPLES / "quick.yaml", ["limits.cell_s"])


@pytest.mark.parametrize("name", ["quick", "h100", "mixed"])
def test_the_ready_specs_can_be_read(name):
    assert load_spec(EXAMPLES / f"{name}.yaml").n_cells >= 8


def test_published_models_have_their_published_size():
    found = load_spec(EXAMPLES / "h100.yaml", ["clusters=[1 x h100x8]", "strategies=[auto]"])
    sizes = {case.model: case.shapes["actor"].n_params / 1e9 for case in found.cases}
    stated = {"qwen2.5-7b": 7.61, "qwen2.5-32b": 32.5, "llama-3.1-70b": 70.6, "llama-3.1-405b": 405.0}
    for name, billions in {**stated, "qwen3-235b-a22b": 235.0}.items():
        assert sizes[name] == pytest.approx(billions, rel=0.01)


def test_limits_have_bounds():
    with pytest.raises(RecipeError, match="cell_s"):
        Limits(cell_s=0)


def test_merging_goes_into_mappings_and_replaces_the_rest():
    assert merged({"a": {"b": 1, "c": [1]}, "d": 1}, {"a": {"c": [2]}, "d": {"e": 2}}) == {
        "a": {"b": 1, "c": [2]}, "d": {"e": 2}
    }  # fmt: skip
