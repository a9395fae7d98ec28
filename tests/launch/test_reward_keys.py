"""Reward services, judges, composites and a remote reference in a recipe: forms, and what is refused."""

from pathlib import Path

import pytest

from rolemesh.engine.rewards import build
from rolemesh.engine.rewards.judge_forms import Scores
from rolemesh.launch import assemble
from rolemesh.launch.check import check_recipe
from rolemesh.launch.config import parse_recipe, to_yaml
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.request import graph_of, request_of
from rolemesh.launch.schema import Recipe
from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.model import ModelShape

BASE = """
algorithm: {name: grpo, kl: {in: loss}}
data: train.jsonl
batch: {prompts: 8, samples_per_prompt: 4}
actor: models/instruct
"""
REMOTE = (
    BASE
    + """
reward:
  kind: remote
  protocol: openrlhf
  endpoints: ["http://rm-0:5000/get_reward"]
  text: {template: raw, special_tokens: keep}
  limits: {in_flight: 64, total_s: 120, retries: 4}
  on_failure: {do: drop_group, stop_above: 0.05}
ref: {kind: remote, endpoints: "http://ref-0:5001", expect_initial_kl: 0.01, speed: {samples_per_s: 16}}
"""
)
JUDGE = (
    BASE
    + """
reward:
  kind: judge
  endpoints: http://judge:8000/v1
  model: qwen
  judge: {form: rubric, criteria: {clear: easy to read, right: {text: true to the facts, weight: 3}}}
  on_failure: {value: 0.5}
ref: {expect_initial_kl: 0.1}
"""
)
COMPOSITE = (
    BASE
    + """
reward:
  kind: composite
  parts:
    format: {path: "reward.py:has_tags", weight: 0.2}
    model: {kind: remote, endpoints: http://rm-0:5000, on_failure: raise}
"""
)
FOLDER = Path("/recipes")


def parse(text: str, *overrides: str) -> Recipe:
    return parse_recipe(text, FOLDER, overrides)


def error_of(text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        parse(text, *overrides)
    return str(caught.value)


def test_services_are_in_no_pool():
    assert parse(REMOTE).roles == ("actor", "rollout")
    assert parse(JUDGE).roles == ("actor", "rollout", "ref")
    assert "holds role 'ref', which needs no devices" in error_of(
        REMOTE, "placement.pools.all={roles: [actor, rollout, ref], share: 1}"
    )


def test_a_remote_reward_becomes_a_client_with_its_limits_and_policy():
    scorer = assemble.scorer(parse(REMOTE))
    assert isinstance(scorer, build.Remote)
    service = scorer.service
    assert (scorer.protocol, scorer.special_tokens, service.section) == ("openrlhf", "keep", "reward")
    assert (service.on_failure, service.value, service.stop_above) == ("drop_group", None, 0.05)
    assert (service.limits.in_flight, service.limits.total_s, service.limits.retries) == (64, 120.0, 4)
    assert service.policy().window == 32  # parts of a step count as the whole step


def test_a_bare_value_is_the_policy_value():
    scorer = assemble.scorer(parse(JUDGE))
    assert isinstance(scorer, build.Judge)
    assert (scorer.service.on_failure, scorer.service.value) == ("value", 0.5)
    assert isinstance(scorer.form, Scores)
    weights = {name: one.weight for name, one in scorer.form.criteria.items()}
    assert weights == {"clear": 1.0, "right": 3.0}


def test_a_composites_parts_have_weights_and_kinds_of_their_own():
    scorer = assemble.scorer(parse(COMPOSITE))
    assert isinstance(scorer, build.Composite)
    (first, part), (second, service) = scorer.parts.values()
    assert (first, second) == (0.2, 1.0)
    assert isinstance(part, build.Function)
    assert part.path == "/recipes/reward.py:has_tags"
    assert isinstance(service, build.Remote)
    assert service.service.section == "reward.parts.model"


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (REMOTE, ["reward.on_failure=null"], "reward.on_failure is missing"),
        (REMOTE, ["reward.on_failure=null"], "there is no default"),
        (REMOTE, ["reward.on_failure=drop"], "must be raise or drop_group or value"),
        (REMOTE, ["reward.on_failure.do=null"], "reward.on_failure.do is missing"),
        (REMOTE, ["reward.on_failure={do: value}"], "which score does a failed sample get?"),
        (REMOTE, ["reward.on_failure.value=1"], "reward.on_failure.do is drop_group"),
        (REMOTE, ["reward.endpoints=null"], "reward.endpoints is missing: where does the service"),
        (REMOTE, ["reward.endpoints=[rm-0:5000]"], "'rm-0:5000', but must be URLs such as http://"),
        (REMOTE, ["reward.path=models/rm"], "reward.path would have no effect: reward.kind is remote"),
        (REMOTE, ["reward.layout.tp=2"], "reward.layout.tp would have no effect: reward.kind is remote"),
        (REMOTE, ["reward.judge.retries=3"], "reward.judge.retries would have no effect"),
        (REMOTE, ["reward.text.template=chat"], "reward.text.tokenizer is missing"),
        (REMOTE, ["reward.send_ids=true"], "protocol is openrlhf, which has no place for ids"),
        (REMOTE, ["reward.text.tokenizer=x"], "reward.text.tokenizer would have no effect"),
        (REMOTE, ["reward.limits.backoff_s=60"], "reward.limits.backoff_s is 60, above the longest wait 30"),
        (REMOTE, ["ref.endpoints=null"], "ref.endpoints is missing"),
        (REMOTE, ["ref.path=models/sft"], "ref.path would have no effect: ref.kind is remote"),
        (REMOTE, ["ref.layout.tp=2"], "ref.layout.tp would have no effect: ref.kind is remote"),
        (JUDGE, ["ref.endpoints=http://r:1"], "ref.endpoints would have no effect: ref.kind is model"),
        (JUDGE, ["reward.model=null"], "reward.model is missing"),
        (JUDGE, ["reward.judge.criteria=null"], "a rubric needs at least one"),
        (JUDGE, ["reward.judge.scale=[1, 0]"], "but must be [lowest, highest]"),
        (JUDGE, ["reward.judge.step=0.3"], "step 0.3 does not cut [0.0, 1.0]"),
        (JUDGE, ["reward.judge.against=label"], "reward.judge.form is rubric"),
        (JUDGE, ["reward.text.template=chat"], "reward.text.template would have no effect: a judge gets"),
        (JUDGE, ["reward.limits.batch=4"], "reward.limits.batch would have no effect: a judge gets one"),
        (JUDGE, ["reward.protocol=slime"], "reward.protocol would have no effect: reward.kind is judge"),
        (
            JUDGE,
            ["reward.judge.form=pairwise", "reward.judge.criteria=null", "data.val_files=[v.jsonl]"],
            "validation takes one sample for each prompt",
        ),
        (COMPOSITE, ["reward.parts=null"], "reward.parts is missing"),
        (COMPOSITE, ["reward.parts.model.on_failure=null"], "reward.parts.model.on_failure is missing"),
        (COMPOSITE, ["reward.parts.format.endpoints=http://a:1"], "reward.parts.format.kind is function"),
        (COMPOSITE, ["reward.parts.model.kind=model"], "serve it (`rolemesh serve-rm`)"),
        (COMPOSITE, ["reward.parts.other={weight: 1}"], "reward.parts.other.kind is missing"),
        (COMPOSITE, ["reward.parts.model.wieght=1"], "did you mean reward.parts.model.weight?"),
        (COMPOSITE, ["reward.workers=3"], "reward.workers would have no effect: reward.kind is composite"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_key(text: str, overrides: list[str], message: str):
    assert message in error_of(text, *overrides)


@pytest.mark.parametrize(
    ("override", "key", "reason"),
    [
        ("reward.on_failure.do=raise", "reward.on_failure.stop_above", "reward.on_failure.do is raise"),
        ("algorithm.kl.in=none", "ref.endpoints", "algorithm.kl.in is none"),
    ],
)
def test_what_an_override_leaves_without_effect_is_set_aside_with_the_reason(override, key, reason):
    recipe = parse(REMOTE, override)
    assert reason in recipe.set_aside[key]
    assert key not in recipe.given
    assert to_yaml(recipe) == to_yaml(parse_recipe(to_yaml(recipe), Path("/")))


@pytest.mark.parametrize("text", [REMOTE, JUDGE, COMPOSITE])
def test_the_written_recipe_loads_to_an_equal_one(text: str):
    recipe = parse(text)
    again = parse_recipe(to_yaml(recipe), Path("/elsewhere"))
    assert again == recipe
    assert to_yaml(again) == to_yaml(recipe)


def test_services_may_leave_rows_out_and_a_function_may_not():
    graph = graph_of(parse(REMOTE))
    assert "dropped" in graph["reward"].writes
    assert {"dropped", "uid"} <= graph["advantage"].reads
    assert graph["reward"].takes == "groups"
    valued = parse(REMOTE, "reward.on_failure.do=value", "reward.on_failure.value=0")
    assert graph_of(valued)["reward"].takes == "rows"
    graph = graph_of(parse(BASE + "reward: reward.py:compute_score"))
    assert "dropped" not in graph["reward"].writes | graph["advantage"].reads


def test_the_planner_takes_services_as_fast_as_the_recipe_states():
    shape = ModelShape.from_config(
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 128,
            "max_position_embeddings": 512,
        }
    )
    recipe = parse(REMOTE, "reward.speed={latency_s: 0.5, samples_per_s: 64}", "ref.speed.latency_s=1")
    request = request_of(recipe, ClusterSpec.uniform(1, 4, device_kind="cpu"), {"actor": shape})
    assert request.seconds == {"reward": 0.5 + 32 / 64, "ref_log_prob": 1 + 32 / 16}
    assert not any("no time" in note for note in request.notes())
    request = request_of(parse(COMPOSITE), ClusterSpec.uniform(1, 4), {"actor": shape, "ref": shape})
    assert request.seconds == {"reward": 0.0}
    assert any("reward runs on no devices and is counted as taking no time" in n for n in request.notes())


@pytest.mark.parametrize(
    ("url", "protocol", "sent_to"),
    [
        ("http://rm-0:5000", "rolemesh", "http://rm-0:5000/v1/score"),
        ("http://rm-0:5000/", "openrlhf", "http://rm-0:5000/get_reward"),
        ("http://rm-0:5000", "slime", "http://rm-0:5000/get_reward"),
        ("http://rm-0:5000/math/score", "rolemesh", "http://rm-0:5000/math/score"),
    ],
)
def test_an_endpoint_without_a_path_gets_that_of_its_protocol(url, protocol, sent_to):
    assert build.score_endpoint(url, protocol) == sent_to


def test_a_token_is_read_from_the_environment_and_never_printed(monkeypatch):
    recipe = parse(REMOTE, "reward.token_env=RM_TOKEN")
    monkeypatch.delenv("RM_TOKEN", raising=False)
    missing = "reward.token_env: the environment variable RM_TOKEN is not set"
    assert missing in check_recipe(recipe, offline=True).problems
    with pytest.raises(RecipeError, match=missing):
        assemble.scorer(recipe)
    monkeypatch.setenv("RM_TOKEN", "s3cret")
    scorer = assemble.scorer(recipe)
    assert isinstance(scorer, build.Remote)
    assert scorer.service.token == "s3cret"
    assert "s3cret" not in repr(scorer)
    assert "s3cret" not in to_yaml(recipe)
