"""A real vLLM server as judge. Its model writes at random: only the constraint makes scores of that."""

import importlib.util

import pytest
from judged import batch, judge, scores
from vllm_server import MODEL, vllm_server

from rolemesh.engine.remote.http import Limits
from rolemesh.engine.rewards.failure import FailurePolicy
from rolemesh.engine.rewards.judge_answer import Scale
from rolemesh.engine.rewards.judge_cache import JudgeCache
from rolemesh.engine.rewards.judge_forms import Criterion, Scores
from rolemesh.engine.rewards.judge_pairs import Pairwise
from rolemesh.engine.rewards.judge_template import JudgeError

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.timeout(580),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
TENTHS = Scale(0, 1, step=0.1)
RESPONSES = ["4", "it is 4", "5", "no idea"]
OPTIONS = {"model": MODEL, "limits": Limits(retries=1, backoff_s=0.1, read_s=120, total_s=120)}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with vllm_server(tmp_path_factory.mktemp("vllm")) as url:
        yield url


def test_a_json_schema_holds_the_judge_to_the_scale(server, tmp_path):
    form = Scores(TENTHS, reasoning=False)
    options = OPTIONS | {"form": form, "cache": JudgeCache(tmp_path), "sampling": {"max_tokens": 60}}
    data = batch(RESPONSES)
    with judge(server, constraint="auto", **options) as reward:
        assert reward.start() == "json_schema"
        first = reward.score(data)
        again = reward.score(data)
    assert all(any(score == pytest.approx(tenth) for tenth in TENTHS.values()) for score in scores(first))
    assert first.meta_info["metrics"]["reward/parse_failures"] == 0
    assert again.meta_info["metrics"]["reward/cache_hits"] == len(RESPONSES)
    assert scores(again) == scores(first)


def test_a_regex_holds_the_judge_to_the_scale(server):
    options = OPTIONS | {"form": Scores(), "sampling": {"max_tokens": 60, "temperature": 1.0}}
    with judge(server, constraint="regex", **options) as reward:
        result = reward.score(batch(RESPONSES))
    assert all(0 <= score <= 1 for score in scores(result))
    assert result.meta_info["metrics"]["reward/parse_failures"] == 0


def test_a_rubric_by_json_schema(server):
    criteria = {"accuracy": Criterion(2, "Is it right?"), "style": Criterion()}
    form = Scores(TENTHS, criteria, reasoning=False)
    with judge(server, form=form, sampling={"max_tokens": 80}, **OPTIONS) as reward:
        result = reward.score(batch(RESPONSES))
    accuracy, style = (result.non_tensor_batch[f"judge_{name}"] for name in criteria)
    assert scores(result) == pytest.approx([(2 * a + s) / 3 for a, s in zip(accuracy, style, strict=True)])


@pytest.mark.parametrize("constraint", ["json_schema", "regex"])
def test_pairs(server, constraint):
    form = Pairwise(reasoning=False)
    options = OPTIONS | {"form": form, "constraint": constraint, "sampling": {"max_tokens": 60}}
    with judge(server, **options) as reward:
        result = reward.score(batch(RESPONSES, uids=["g"] * 4))
    assert sum(scores(result)) == pytest.approx(2)  # six pairs, each shares out one win: 6 / 3
    assert result.meta_info["metrics"]["reward/parse_failures"] == 0


def test_without_a_constraint_a_model_that_writes_at_random_has_no_scores(server):
    policy = FailurePolicy("value", value=0.0, stop_above=1.0)
    options = OPTIONS | {"constraint": "none", "retries": 1, "sampling": {"max_tokens": 20}}
    with judge(server, policy, **options) as reward:
        result = reward.score(batch(RESPONSES))
    metrics = result.meta_info["metrics"]
    assert metrics["reward/parse_failures"] == metrics["reward/failed"] == len(RESPONSES)
    assert metrics["reward/parse_retries"] == len(RESPONSES)


def test_a_model_that_the_server_does_not_have_is_named(server):
    with (
        judge(server, **OPTIONS | {"model": "gpt-99"}) as reward,
        pytest.raises(JudgeError, match=r"404.*gpt-99"),
    ):
        reward.start()


def test_a_question_longer_than_the_model_takes_fails_alone(server):
    policy = FailurePolicy("drop_group", stop_above=0.5)
    options = OPTIONS | {"form": Scores(TENTHS, reasoning=False), "sampling": {"max_tokens": 60}}
    with judge(server, policy, **options) as reward:
        result = reward.score(batch(["4", "5" * 3000], uids=["g", "h"]))
    assert result.batch["dropped"].tolist() == [False, True]
