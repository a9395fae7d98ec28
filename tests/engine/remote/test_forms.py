"""Each form's requests and answers, there and back, and what is refused."""

import contextlib
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolemesh.engine.remote.forms import (
    FormError,
    Sample,
    Score,
    answer,
    read_answer,
    read_request,
    request_body,
)

SAMPLES = [
    Sample("7-0-a", "<bos>1+1=", "2<eos>", {"truth": 2}, (1, 5, 6), (7, 2)),
    Sample("7-1-b", "<bos>2+2=", "5", None, (1, 8), (9,)),
    Sample("7-2-c", "", "", "x", (), ()),
]
IDS = [sample.id for sample in SAMPLES]


def ours(*scores, version=1):
    return {"version": version, "scores": [{"id": name, "score": score} for name, score in scores]}


def test_our_form_brings_back_every_field():
    assert read_request(json.loads(json.dumps(request_body("rolemesh", SAMPLES)))) == ("rolemesh", SAMPLES)


@pytest.mark.parametrize("protocol", ["openrlhf", "rolemesh"])
def test_an_answer_in_another_order_is_matched_by_id(protocol):
    _, asked = read_request(request_body(protocol, SAMPLES))
    scores = [Score(sample.id, float(i), {"acc": i}) for i, sample in enumerate(asked)]
    body = json.loads(json.dumps(answer(protocol, asked[::-1], scores)))
    assert read_answer(protocol, body, SAMPLES) == scores


def test_openrlhfs_versions_are_read():
    plain = Sample("0", "", "<s>ab")
    assert read_request({"query": ["<s>ab"]}) == ("openrlhf", [plain])
    assert read_request({"query": "<s>ab"}) == ("openrlhf", [plain])
    assert read_request({"queries": ["<s>ab"]}) == ("openrlhf", [plain])
    full = {"query": ["<s>ab", "xy"], "prompts": ["a", "q"], "labels": [None, 3]}
    assert read_request(full) == ("openrlhf", [Sample("0", "<s>a", "b"), Sample("1", "", "xy", 3)])
    assert read_request({"query": "ab", "prompts": "a", "labels": 3})[1] == [Sample("0", "a", "b", 3)]


def test_openrlhfs_answers_are_read_by_position():
    scores = [Score(name, float(i)) for i, name in enumerate(IDS)]
    assert read_answer("openrlhf", {"rewards": [0, 1, 2]}, SAMPLES) == scores
    assert read_answer("openrlhf", [0.0, 1.0, 2.0], SAMPLES) == scores
    assert read_answer("openrlhf", {"rewards": 0.5}, SAMPLES[:1]) == [Score(IDS[0], 0.5)]
    logged = {"rewards": [0, 1, 2], "extra_logs": {"acc": [1, 0, 1], "rate": 0.5}}
    assert [score.extra["acc"] for score in read_answer("openrlhf", logged, SAMPLES)] == [1, 0, 1]


def test_openrlhfs_clients_find_what_they_read():
    _, asked = read_request({"query": ["a", "b"]})
    body = answer("openrlhf", asked, [Score("1", 2.0), Score("0", 1.0, {"acc": 1})])
    assert body["rewards"] == body["scores"] == [1.0, 2.0]
    assert body["extra_logs"] == {"acc": [1, None]}


def test_slimes_form_is_one_sample_and_a_number_or_dict():
    body = request_body("slime", SAMPLES[:1])
    assert body == {"prompt": "<bos>1+1=", "response": "2<eos>", "label": {"truth": 2}}
    protocol, asked = read_request(body)
    assert (protocol, asked) == ("slime", [Sample("0", "<bos>1+1=", "2<eos>", {"truth": 2})])
    assert answer("slime", asked, [Score("0", 0.5)]) == 0.5
    assert answer("slime", asked, [Score("0", 0.5, {"acc": 1})]) == {"score": 0.5, "acc": 1}
    assert read_answer("slime", 0.25, SAMPLES[:1]) == [Score(IDS[0], 0.25)]
    with pytest.raises(ValueError, match="one sample per request, not 3"):
        request_body("slime", SAMPLES)


def test_a_dict_needs_the_key_of_its_score():
    body = {"score": 1, "acc": 0}
    with pytest.raises(FormError, match=r"keys \['acc', 'score'\].*set score_key"):
        read_answer("slime", body, SAMPLES[:1])
    with pytest.raises(FormError, match="none is score_key 'reward'"):
        read_answer("slime", body, SAMPLES[:1], score_key="reward")
    assert read_answer("slime", body, SAMPLES[:1], score_key="score") == [Score(IDS[0], 1.0, {"acc": 0})]


@pytest.mark.parametrize("n", [0, 1, 2, 4])
def test_a_wrong_number_of_scores_is_refused_and_not_broadcast(n):
    with pytest.raises(FormError, match=f"holds {n} rewards for 3 samples"):
        read_answer("openrlhf", {"rewards": [0.5] * n}, SAMPLES)


@pytest.mark.parametrize(
    "bad",
    [
        None,
        math.nan,
        math.inf,
        -math.inf,
        pytest.param(10**400, id="huge"),
        1e39,
        "1.0",
        True,
        [1.0],
        {"a": 1},
    ],
)
@pytest.mark.parametrize("protocol", ["openrlhf", "slime", "rolemesh"])
def test_a_score_that_is_no_finite_number_is_named(protocol, bad):
    body = {
        "openrlhf": {"rewards": [0.0, bad, 0.0]},
        "slime": bad,
        "rolemesh": ours((IDS[0], 0.0), (IDS[1], bad), (IDS[2], 0.0)),
    }[protocol]
    with pytest.raises(FormError, match="the answer" if protocol == "slime" else IDS[1]):
        read_answer(protocol, body, SAMPLES[:1] if protocol == "slime" else SAMPLES)


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        ([(IDS[0], 0), (IDS[1], 1)], "no score for sample 7-2-c: 2 scores came back for 3"),
        ([(IDS[0], 0), (IDS[1], 1), (IDS[1], 1)], "more than one entry for sample 7-1-b"),
        ([(name, 0) for name in [*IDS, "9"]], "scores for sample 9, which were not asked for"),
        ([(IDS[0], 0), (None, 1)], "id is null"),
    ],
)
def test_ids_that_do_not_fit_are_named(scores, says):
    with pytest.raises(FormError, match=says):
        read_answer("rolemesh", ours(*scores), SAMPLES)


@pytest.mark.parametrize(
    ("protocol", "body", "says"),
    [
        ("rolemesh", ours((IDS[0], 0), version=2), "version is 2; this side speaks version 1"),
        ("rolemesh", {"version": 1}, "scores is null, not a list"),
        ("rolemesh", {"version": 1, "scores": [{"id": IDS[0]}]}, "has no score"),
        ("rolemesh", "<html>", "not an object"),
        ("openrlhf", {"error": "busy"}, r"no `rewards`; it has the keys \['error'\]"),
        ("openrlhf", {"rewards": [0, 0, 0], "extra_logs": {"acc": [1]}}, "acc has 1 entries for 3"),
        ("openrlhf", {"rewards": [0, 0, 0], "ids": ["a"]}, "ids has 1 entries"),
    ],
)
def test_other_answers_are_refused(protocol, body, says):
    with pytest.raises(FormError, match=says):
        read_answer(protocol, body, SAMPLES)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ([1], "the body is"),
        ({"text": "x"}, r"keys \['text'\]; it needs"),
        ({"query": []}, "no samples"),
        ({"query": ["a"], "prompts": ["a", "b"]}, "prompts has 2 entries for 1"),
        ({"query": [3]}, r"query\[0\] is 3, not a string"),
        ({"version": 3, "samples": []}, "version is 3"),
        ({"version": 1, "samples": [{"id": "a", "prompt": ""}]}, r"samples\[0\] lacks response"),
        ({"version": 1, "samples": [{"id": "a", "prompt": "", "response": ""}] * 2}, "more than one entry"),
        (
            {"version": 1, "samples": [{"id": "a", "prompt": "", "response": "", "prompt_ids": [1]}]},
            "only one of prompt_ids",
        ),
        (
            {
                "version": 1,
                "samples": [
                    {"id": "a", "prompt": "", "response": "", "prompt_ids": [1, -1], "response_ids": []}
                ],
            },
            r"prompt_ids\[1\] is -1, not a token id",
        ),
    ],
)
def test_other_requests_are_refused(body, says):
    with pytest.raises(FormError, match=says):
        read_request(body)


def test_two_samples_with_one_id_are_not_sent():
    with pytest.raises(ValueError, match="more than one entry for sample 7-0-a"):
        request_body("openrlhf", [SAMPLES[0], SAMPLES[0]])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["version", "scores", "id", "score", "rewards", "samples", "query", "prompts", "ids"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(json_values, st.sampled_from(["openrlhf", "slime", "rolemesh"]))
def test_any_json_is_read_or_refused(body, protocol):
    for read in (read_request, lambda body: read_answer(protocol, body, SAMPLES[:2])):
        with contextlib.suppress(FormError):  # any other exception fails the test
            read(body)
