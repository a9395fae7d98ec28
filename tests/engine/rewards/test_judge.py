import json
import re

import pytest
import torch
from judged import batch, judge, scores
from ollama_server import Ollama, ollama

from rolemesh.engine.remote.http import BadAnswer
from rolemesh.engine.rewards.failure import FailurePolicy
from rolemesh.engine.rewards.judge import chat_endpoint, read_completion
from rolemesh.engine.rewards.judge_answer import Scale
from rolemesh.engine.rewards.judge_cache import JudgeCache
from rolemesh.engine.rewards.judge_forms import Criterion, Scores
from rolemesh.engine.rewards.judge_template import JudgeError, JudgeTemplate
from rolemesh.engine.rewards.pool import RewardError

ANY_FAILURES = FailurePolicy("value", value=-1.0, stop_above=1.0)
ECHO = JudgeTemplate("{{ response }}")  # the judge answers with what it is asked: the response

# Every judge below is probed by a question that starts so.
ANSWER = """
    def answer(request, text):
        if text.startswith("A test of the connection."):
            return "0"
        return {}
"""
ECHOING = ANSWER.format("text")
HALF = ANSWER.format("""'{"reasoning": "fine", "score": 0.5}'""")


def asked(server: Ollama) -> list[str]:
    """The texts of the questions, without the probe."""
    texts = [request["messages"][-1]["content"] for request in server.requests()]
    return [text for text in texts if not text.startswith("A test of the connection.")]


def test_what_judges_write_is_a_score_or_a_counted_failure(tmp_path):
    answers = ["0.7", "'0.7'", "7", "0.8x", '{"score":', "Score: 0.4/1", " "]
    with (
        ollama(tmp_path, ECHOING) as server,
        judge(server.endpoint, ANY_FAILURES, template=ECHO, retries=0) as reward,
    ):
        result = reward.score(batch(answers))
    assert scores(result) == pytest.approx([0.7, 0.7, -1, -1, -1, 0.4, -1])
    metrics = result.meta_info["metrics"]
    assert metrics["reward/parse_failures"] == 4
    assert metrics["reward/failed"] == metrics["reward/defaulted"] == 4
    assert metrics["reward/parse_retries"] == 0
    assert not result.batch["dropped"].any()


def test_a_small_model_may_write_the_score_as_text_whatever_the_schema_says(tmp_path):
    answers = ['{"reasoning": "ok", "score": "0.75"}', '```json\n{"Score": "0.5/1"}\n```']
    with ollama(tmp_path, ECHOING) as server, judge(server.endpoint, template=ECHO) as reward:
        assert reward.start() == "json_schema"
        assert scores(reward.score(batch(answers))) == [0.75, 0.5]


def test_a_score_off_the_scale_is_clamped_only_when_asked(tmp_path):
    form = Scores(Scale(0, 1, clamp=True))
    with (
        ollama(tmp_path, ECHOING) as server,
        judge(server.endpoint, form=form, template=ECHO) as reward,
    ):
        result = reward.score(batch(["7", "-7", "0.25"]))
    assert scores(result) == [1, 0, 0.25]
    assert result.meta_info["metrics"]["reward/parse_failures"] == 0


def test_the_score_is_at_the_last_response_token(tmp_path):
    with ollama(tmp_path, HALF) as server, judge(server.endpoint) as reward:
        result = reward.score(batch(["abc", "a"]))
    expected = torch.zeros(2, 5)
    expected[0, 2] = expected[1, 0] = 0.5
    assert torch.equal(result.batch["rm_scores"], expected)
    assert result.batch["rm_scores"].dtype == torch.float32


def test_what_cannot_be_read_is_asked_again_with_a_note(tmp_path):
    source = ANSWER.format("'0.5' if 'could not be read' in text else 'well...'")
    with (
        ollama(tmp_path, source) as server,
        judge(server.endpoint, retries=1, sampling={"temperature": 1.0, "seed": 3}) as reward,
    ):
        result = reward.score(batch(["abc"]))
        first, second = server.requests()[1:]
    assert scores(result) == [0.5]
    metrics = result.meta_info["metrics"]
    assert (metrics["reward/parse_retries"], metrics["reward/parse_failures"]) == (1, 0)
    assert (first["seed"], second["seed"]) == (3, 4)
    assert second["messages"][-1]["content"].startswith(first["messages"][-1]["content"])


def test_after_the_retries_the_failure_policy_decides(tmp_path):
    source = ANSWER.format("'well...' if 'bad' in text else '1'")
    data = batch(["good", "bad", "fine", "okay"], uids=["a", "a", "b", "b"])
    with ollama(tmp_path, source) as server:
        with judge(server.endpoint, FailurePolicy("drop_group", stop_above=0.5)) as reward:
            result = reward.score(data)
        assert result.batch["dropped"].tolist() == [True, True, False, False]
        assert scores(result) == [0, 0, 1, 1]
        metrics = result.meta_info["metrics"]
        assert (metrics["reward/parse_retries"], metrics["reward/parse_failures"]) == (2, 1)
        assert (metrics["reward/failed"], metrics["reward/dropped_groups"]) == (1, 1)
        with (
            judge(server.endpoint, FailurePolicy("drop_group", stop_above=0.2)) as reward,
            pytest.raises(RewardError, match=r"25\.0%.*stop_above(.|\n)*sample 1 \(uid a\).*'well\.\.\.'"),
        ):
            reward.score(data)
        with (
            judge(server.endpoint) as reward,
            pytest.raises(RewardError, match=r"no answer for sample 1 \(uid a\).*no 'score'"),
        ):
            reward.score(data)


def test_an_answer_that_was_cut_is_a_failure_even_if_it_reads_as_a_score(tmp_path):
    source = """
        def answer(request, text):
            body = completion(request["model"], "Score: 0.4")
            body["choices"][0]["finish_reason"] = "length"
            return {"status": 200, "body": body}
    """
    with (
        ollama(tmp_path, source) as server,
        judge(server.endpoint, sampling={"max_tokens": 9}, retries=0) as reward,
        pytest.raises(RewardError, match=r"cut at its longest length, max_tokens 9; it ends 'Score: 0\.4'"),
    ):
        reward.score(batch(["abc"]))


def test_a_model_that_is_not_there_stops_at_the_start_with_the_servers_words(tmp_path):
    with ollama(tmp_path, HALF) as server, judge(server.endpoint, ANY_FAILURES, model="qwen3") as reward:
        with pytest.raises(JudgeError, match=r"'qwen3'.*status 404.*not found, try pulling it"):
            reward.start()
        with pytest.raises(JudgeError, match="try pulling it"):  # and not a value for every sample
            reward.score(batch(["abc"]))


def test_the_server_is_asked_for_a_constrained_answer(tmp_path):
    with ollama(tmp_path, HALF) as server, judge(server.endpoint) as reward:
        assert reward.start() == "json_schema"
        reward.score(batch(["abc"]))
        probe, request = server.requests()
    schema = request["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["score"] == {"type": "number", "minimum": 0, "maximum": 1}
    assert request["max_tokens"] == 512
    assert request["temperature"] == 0
    assert probe["max_tokens"] == 16


@pytest.mark.parametrize(
    ("refused", "taken"),
    [
        (["response_format"], "regex"),
        (["response_format", "structured_outputs"], "none"),
    ],
)
def test_a_constraint_that_the_server_refuses_is_not_used(tmp_path, refused, taken):
    source = f"""
        def answer(request, text):
            for key in {refused}:
                if key in request:
                    body = error(key + " is not supported", "invalid_request_error")
                    return {{"status": 400, "body": body}}
            return "0.5"
    """
    with ollama(tmp_path, source) as server, judge(server.endpoint) as reward:
        result = reward.score(batch(["abc"]))
        last = server.requests()[-1]
    assert scores(result) == [0.5]
    assert ("structured_outputs" in last) == (taken == "regex")
    assert "response_format" not in last
    wanted = "the number only" if taken == "regex" else "JSON only"
    assert wanted in last["messages"][-1]["content"]


def test_a_server_that_refuses_every_question_says_why(tmp_path):
    source = """
        def answer(request, text):
            return {"status": 400, "body": error("temperature is not supported", "invalid_request_error")}
    """
    with (
        ollama(tmp_path, source) as server,
        judge(server.endpoint) as reward,
        pytest.raises(JudgeError, match=r"json_schema:(.|\n)*regex:(.|\n)*none: .*temperature is not"),
    ):
        reward.start()


def test_a_question_that_the_server_refuses_fails_its_sample_alone(tmp_path):
    source = ANSWER.format(
        """{"status": 400, "body": error("too long", "invalid_request_error")} if "xx" in text else "1" """
    )
    with ollama(tmp_path, source) as server, judge(server.endpoint, ANY_FAILURES) as reward:
        result = reward.score(batch(["ab", "xx"]))
    assert scores(result) == [1, -1]
    assert result.meta_info["metrics"]["reward/parse_failures"] == 0
    assert result.meta_info["metrics"]["reward/failed"] == 1


def test_equal_questions_are_asked_once(tmp_path):
    with ollama(tmp_path, HALF) as server, judge(server.endpoint) as reward:
        result = reward.score(batch(["same", "same", "other"]))
        assert len(asked(server)) == 2
    assert scores(result) == [0.5, 0.5, 0.5]
    assert result.meta_info["metrics"]["reward/questions"] == 2


def test_answers_are_kept_between_runs_by_all_that_was_asked(tmp_path):
    def run(**options) -> dict[str, float]:
        with judge(server.endpoint, cache=JudgeCache(tmp_path / "cache"), **options) as reward:
            result = reward.score(batch(["abc", "def"]))
        assert scores(result) == [0.5, 0.5]
        return result.meta_info["metrics"]

    with ollama(tmp_path / "server", HALF) as server:
        assert run()["reward/cache_hits"] == 0
        assert run()["reward/cache_hits"] == 2
        assert len(asked(server)) == 2
        assert run(template=JudgeTemplate("How good is {{ response }}?"))["reward/cache_hits"] == 0
        assert run(sampling={"temperature": 0.5})["reward/cache_hits"] == 0
        assert run(system="Be strict.")["reward/cache_hits"] == 0
        assert run()["reward/cache_hits"] == 2


def test_answers_that_cannot_be_read_are_not_kept(tmp_path):
    cache = JudgeCache(tmp_path / "cache")
    for text, value in (("well...", -1), ("0.5", 0.5)):
        with (
            ollama(tmp_path / f"server{value}", ANSWER.format(repr(text))) as server,
            judge(server.endpoint, ANY_FAILURES, cache=cache, retries=0) as reward,
        ):
            assert scores(reward.score(batch(["abc"]))) == [value]


def test_a_cache_that_cannot_be_written_costs_no_reward(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JudgeCache, "put", full)
    with (
        ollama(tmp_path / "server", HALF) as server,
        judge(server.endpoint, cache=JudgeCache(tmp_path / "cache")) as reward,
    ):
        assert scores(reward.score(batch(["abc", "d"]))) == [0.5, 0.5]


def test_a_rubric_is_the_weighted_mean_of_its_criteria(tmp_path):
    source = ANSWER.format("""'{"accuracy": 1, "style": "0.25"}'""")
    form = Scores(criteria={"accuracy": Criterion(2, "Is it right?"), "style": Criterion(1)})
    with ollama(tmp_path, source) as server, judge(server.endpoint, form=form) as reward:
        result = reward.score(batch(["abc", "de"]))
        request = server.requests()[-1]
    assert scores(result) == pytest.approx([0.75, 0.75])
    assert result.non_tensor_batch["judge_style"].tolist() == [0.25, 0.25]
    assert result.meta_info["metrics"]["reward/judge_accuracy/mean"] == 1
    assert "- accuracy: Is it right?\n- style\n" in request["messages"][-1]["content"]
    schema = request["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["reasoning", "accuracy", "style"]


def test_a_rubric_with_a_criterion_missing_is_a_failure(tmp_path):
    form = Scores(criteria={"accuracy": Criterion(), "style": Criterion()})
    with (
        ollama(tmp_path, ANSWER.format("""'{"accuracy": 1}'""")) as server,
        judge(server.endpoint, form=form, retries=0) as reward,
        pytest.raises(RewardError, match=r"has no \['style'\]"),
    ):
        reward.score(batch(["abc"]))


@pytest.mark.parametrize(
    "criteria", [{"a": Criterion(0)}, {"a": Criterion(float("inf"))}, {"reasoning": Criterion()}]
)
def test_criteria_that_cannot_be_weighed_are_refused(criteria):
    with pytest.raises(JudgeError, match="judge criteria"):
        Scores(criteria=criteria)


def test_the_template_gets_prompt_response_and_label(tmp_path):
    template = JudgeTemplate("{{ prompt }}|{{ response }}|{{ label }}|{{ low }}..{{ high }}")
    with ollama(tmp_path, HALF) as server, judge(server.endpoint, template=template) as reward:
        reward.score(batch(["{{ 7 * 7 }}"], labels=["4"]))
        assert asked(server) == ["2+2?|{{ 7 * 7 }}|4|0..1"]  # what the policy wrote is never a template


def test_a_label_that_a_sample_does_not_have_is_never_shown_as_none(tmp_path):
    with ollama(tmp_path, HALF) as server:
        with judge(server.endpoint) as reward:
            reward.score(batch(["abc"]))
        with (
            judge(server.endpoint, template=JudgeTemplate("{{ response }} {{ label }}")) as reward,
            pytest.raises(JudgeError, match=r"for sample 0: 'label' is undefined .*no label"),
        ):
            reward.score(batch(["abc"]))
        assert "None" not in asked(server)[0]
        assert "<reference>" not in asked(server)[0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{{ response }} {{ answer }}", r"uses \['answer'\]; it can use prompt, response, label"),
        ("{{ prompt }}", "does not show response: nothing to judge"),
        ("{{ response }}\n{% if %}", "line 2"),
    ],
)
def test_a_template_that_cannot_work_is_refused_at_once(tmp_path, text, why):
    with pytest.raises(JudgeError, match=why):
        JudgeTemplate(text)
    (tmp_path / "mine.j2").write_text(text)
    with pytest.raises(JudgeError, match=f"{tmp_path}/mine.j2"):
        JudgeTemplate.load(tmp_path / "mine.j2")


@pytest.mark.parametrize(
    "text", ["{{ response.__class__.__mro__ }}", "{{ response }}{% for i in range(10**9) %}{% endfor %}"]
)
def test_a_template_runs_in_a_sandbox(text):
    with pytest.raises(JudgeError, match="for sample 0"):
        JudgeTemplate(text).render({"response": "a"}, "sample 0")


def test_a_template_names_what_a_label_lacks():
    template = JudgeTemplate("{{ response }} {{ label.answer }}")
    assert template.render({"response": "a", "label": {"answer": 4}}, "sample 0") == "a 4"
    with pytest.raises(JudgeError, match=r"sample 0.*no attribute 'answer'"):
        template.render({"response": "a", "label": {"truth": 4}}, "sample 0")


def test_a_template_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(JudgeError, match=r"absent\.j2 cannot be read"):
        JudgeTemplate.load(tmp_path / "absent.j2")


def test_sampling_does_not_replace_what_the_judge_sets():
    with (
        pytest.raises(JudgeError, match=r"\['n', 'stream'\]"),
        judge("http://h", sampling={"n": 2, "stream": True}),
    ):
        pass


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://h:8000", "http://h:8000/v1/chat/completions"),
        ("http://h:8000/", "http://h:8000/v1/chat/completions"),
        ("http://h:8000/v1", "http://h:8000/v1/chat/completions"),
        ("http://h/openai/v1/", "http://h/openai/v1/chat/completions"),
        ("http://h/v1/chat/completions", "http://h/v1/chat/completions"),
        ("https://h/d/m?api-version=1", "https://h/d/m/chat/completions?api-version=1"),
    ],
)
def test_an_endpoint_is_written_in_any_of_the_usual_ways(given, url):
    assert chat_endpoint(given) == url


@pytest.mark.parametrize(
    ("content", "text"),
    [("a", "a"), (None, ""), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab")],
)
def test_forms_of_a_messages_content(content, text):
    body = {"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}
    assert read_completion(json.dumps(body).encode(), "application/json") == (text, "stop")


@pytest.mark.parametrize(
    "body", [b"<html>", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"text": "a"}]}', b"null", b"\xff"]
)
def test_what_is_no_chat_completion_is_a_bad_answer(body):
    with pytest.raises(BadAnswer):
        read_completion(body, "application/json")


@pytest.mark.parametrize(
    ("scale", "fits", "not_"),
    [
        (Scale(0, 1), ["0", "1", "0.25"], ["7", "1.5", "0.1234"]),
        (Scale(1, 5), ["1", "4.5", "5"], ["0", "5.5", "6"]),
        (Scale(0, 1, 0.5), ["0", "0.5", "1"], ["0.25"]),
        (Scale(-1, 1), ["-1", "-0.5", "0.25"], ["10", "a"]),
    ],
)
def test_the_regex_of_a_scale(scale, fits, not_):
    pattern = Scores(scale).regex()
    assert all(re.fullmatch(pattern, text) for text in fits)
    assert not any(re.fullmatch(pattern, text) for text in not_)
