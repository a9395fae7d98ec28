"""Requests and answers of log-probs in both forms; what does not fit is named by sample and position."""

import json

import numpy as np
import pytest

from rolemesh.engine.remote.forms import FormError
from rolemesh.engine.remote.log_probs import (
    JSON_TYPE,
    Tokens,
    log_probs_answer,
    log_probs_request,
    read_log_probs_answer,
    read_log_probs_request,
)

SAMPLES = [
    Tokens("a", np.array([1, 5, 6, 7]), 2),
    Tokens("b", np.array([1, 9]), 0),
    Tokens("c", np.array([1, 9, 4]), 1),
]
LOG_PROBS = [np.array(values, np.float32) for values in ([-0.1, -2.5], [], [-1e-7])]


@pytest.mark.parametrize("binary", [True, False])
def test_a_request_comes_back(binary):
    samples, temperature = read_log_probs_request(*log_probs_request(SAMPLES, 0.7, binary=binary))
    assert temperature == 0.7
    assert [(one.id, one.input_ids.tolist(), one.response_length) for one in samples] == [
        (one.id, one.input_ids.tolist(), one.response_length) for one in SAMPLES
    ]


@pytest.mark.parametrize("binary", [True, False])
def test_an_answer_in_another_order_comes_back_exactly(binary):
    body = log_probs_answer(SAMPLES[::-1], LOG_PROBS[::-1], binary=binary)
    back = read_log_probs_answer(*body, SAMPLES)
    for one, other in zip(back, LOG_PROBS, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, other)


def json_answer(*rows):
    listed = [{"id": name, "log_probs": values} for name, values in rows]
    return json.dumps({"version": 1, "log_probs": listed}).encode()


GOOD = (("a", [-0.1, -0.2]), ("b", []), ("c", [-0.3]))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ((("a", [-0.1, None]), *GOOD[1:]), "sample a: the log-prob at response position 1 is null"),
        ((*GOOD[:2], ("c", [float("nan")])), "sample c: the log-prob at response position 0 is nan"),
        ((*GOOD[:2], ("c", [0.5])), "sample c: the log-prob at response position 0 is 0.5"),
        ((*GOOD[:2], ("c", [-0.1, -0.2])), "sample c: 2 log_probs for 1 response tokens"),
        ((*GOOD[:2], ("c", ["-0.1"])), "position 0 is '-0.1'"),
        (GOOD[:2], "no log_probs for 1 of 3 samples, the first is c"),
        ((*GOOD, ("d", [])), "not asked for, such as d"),
        ((*GOOD, GOOD[0]), "more than once"),
    ],
)
def test_answers_that_do_not_fit_are_named(rows, says):
    with pytest.raises(FormError, match=says):
        read_log_probs_answer(json_answer(*rows), JSON_TYPE, SAMPLES)


@pytest.mark.parametrize("binary", [True, False])
def test_a_server_does_not_send_what_is_not_finite(binary):
    broken = [np.array([-0.1, np.nan], np.float32), *LOG_PROBS[1:]]
    with pytest.raises(FormError, match="sample a: the log-prob at response position 1 is nan"):
        log_probs_answer(SAMPLES, broken, binary=binary)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version is 2"),
        ({"temperature": 0}, "temperature is 0"),
        ({"samples": []}, "no samples"),
        ({"samples": None}, "not a list"),
        ({"samples": [{"id": "a"}]}, r"samples\[0\] needs"),
        ({"samples": [{"id": "a", "input_ids": [1, 2.5], "response_length": 1}]}, r"input_ids\[1\] is 2.5"),
        ({"samples": [{"id": "a", "input_ids": [1, 2], "response_length": 2}]}, "needed before the response"),
        ({"samples": [{"id": "a", "input_ids": [], "response_length": 0}]}, "needed before the response"),
    ],
)
def test_requests_that_do_not_fit_are_refused(change, says):
    body = json.loads(log_probs_request(SAMPLES, binary=False)[0]) | change
    with pytest.raises(FormError, match=says):
        read_log_probs_request(json.dumps(body).encode(), JSON_TYPE)


def test_a_body_that_is_no_json_is_shown():
    with pytest.raises(FormError, match="<html>"):
        read_log_probs_answer(b"<html>busy</html>", "text/html", SAMPLES)
