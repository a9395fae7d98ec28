"""A served scoring function: every form, who may ask, limits, a full queue, hung calls, the end."""

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
from service_process import served

from rolemesh.engine.remote.forms import Sample, read_answer, request_body
from rolemesh.launch.services.backend import ServeError
from rolemesh.launch.services.run import read_token

pytestmark = [pytest.mark.full, pytest.mark.timeout(580)]
SCORER = f"{Path(__file__).parent / 'scorer.py'}:compute_score"
TOKEN = "s3cret-token"


def slime(response, label=None):
    return {"prompt": "p", "response": response, "label": label}


@pytest.fixture(scope="module")
def server():
    options = ("--max-samples", "8", "--max-waiting", "8", "--max-body-mb", "1", "--limit-s", "3")
    with served("serve-rm", SCORER, *options, "--token-env", "RM_TOKEN", env={"RM_TOKEN": TOKEN}) as server:
        yield server


@pytest.fixture
def client(server):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx2.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield client


def test_each_form_is_answered_in_its_form(client):
    samples = [Sample(name, "p", text, {"ground_truth": 7}) for name, text in (("b", "four"), ("a", ""))]
    for protocol, path in (("openrlhf", "/get_reward"), ("rolemesh", "/v1/score")):
        response = client.post(path, json=request_body(protocol, samples))
        scores = read_answer(protocol, response.json(), samples)
        assert [(one.id, one.score, dict(one.extra)) for one in scores] == [
            ("b", 4.0, {"truth": 7, "prompt": "p"}),
            ("a", 0.0, {"truth": 7, "prompt": "p"}),
        ]
    old = client.post("/get_reward", json={"query": ["abc", "ab"]}).json()
    assert old["rewards"] == old["scores"] == [3.0, 2.0]
    assert client.post("/get_reward", json={"queries": "abc"}).json()["rewards"] == [3.0]
    one = client.post("/get_reward", json=slime("abc", label="x")).json()
    assert one == {"score": 3.0, "truth": "x", "prompt": "p"}


def test_info_and_metrics_tell_what_is_served(client):
    client.post("/get_reward", json=slime("abc"))
    info = client.get("/v1/info").json()
    assert (info["kind"], info["protocol_version"], info["model"]) == ("function", 1, SCORER)
    assert client.get("/readyz").json() == {"status": "ready"}
    text = client.get("/metrics").text
    assert 'rolemesh_requests_total{path="/get_reward",status="200"}' in text
    assert "rolemesh_waiting_samples 0.0" in text


def test_only_the_token_opens_and_it_is_never_printed(server):
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": TOKEN}):
            for method, path in (("GET", "/v1/info"), ("GET", "/metrics"), ("POST", "/get_reward")):
                response = client.request(method, path, headers=headers)
                assert response.status_code == 401
                assert "token" in response.json()["error"]
                assert TOKEN not in response.text
    assert TOKEN not in "".join(server.lines)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 422, "not JSON"),
        (b"[1]", 422, "not an object"),
        (json.dumps({"text": "x"}).encode(), 422, "it needs"),
        (json.dumps({"query": ["x"] * 9}).encode(), 413, "9 samples; at most 8"),
        (b'"' + b"x" * (1 << 20) + b'"', 413, "above 1048576 bytes"),
        (json.dumps(slime("fail")).encode(), 422, "this sample is bad"),
        (json.dumps(slime("nan")).encode(), 422, "returned nan"),
    ],
)
def test_what_cannot_be_scored_is_refused_with_the_reason(client, body, status, says):
    response = client.post("/get_reward", content=body)
    assert (response.status_code, says in response.json()["error"]) == (status, True), response.text


def test_a_body_without_a_length_is_bounded_too(client):
    response = client.post("/get_reward", content=(b"x" * 65536 for _ in range(32)))
    assert response.status_code == 413


def test_a_path_of_the_other_server_is_explained(client):
    response = client.post("/v1/log_probs", json={})
    assert response.status_code == 404
    assert "/get_reward" in response.json()["error"]


def test_a_full_queue_answers_429_at_once_and_the_accepted_ones_are_answered(client):
    with concurrent.futures.ThreadPoolExecutor(24) as threads:
        bodies = [slime(f"sleep {0.5 + n / 100}") for n in range(24)]
        responses = list(threads.map(lambda body: client.post("/get_reward", json=body), bodies))
    by_status = [response.status_code for response in responses]
    assert set(by_status) == {200, 429}
    assert by_status.count(200) >= 8
    for body, response in zip(bodies, responses, strict=True):
        if response.status_code == 429:
            assert response.headers["retry-after"] == "1"
            assert "the queue is full" in response.json()["error"]
        else:
            assert response.json()["score"] == len(body["response"])


def test_a_hung_or_dying_call_costs_its_own_request_alone(client):
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        texts = ["loop", "die", "good 1", "good 22", "good 333"]
        responses = list(threads.map(lambda text: client.post("/get_reward", json=slime(text)), texts))
    assert [response.status_code for response in responses] == [500, 500, 200, 200, 200]
    assert "took more than 3 s" in responses[0].json()["error"]
    assert "ended its process" in responses[1].json()["error"]
    assert client.post("/get_reward", json=slime("again")).json()["score"] == 5


def test_a_default_score_marks_the_sample():
    with served("serve-rm", SCORER, "--limit-s", "1", "--default-score", "-1", "--workers", "1") as server:
        samples = [Sample("a", "p", "loop"), Sample("b", "p", "fine")]
        response = httpx2.post(f"{server.url}/v1/score", json=request_body("rolemesh", samples), timeout=60)
    scores = read_answer("rolemesh", response.json(), samples)
    assert [one.score for one in scores] == [-1.0, 4.0]
    assert scores[0].extra == {"scorer_failed": 1}


def wait_for(file):
    """Until the scorer has made the file, which says that its call has begun."""
    limit = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < limit, f"{file} was not made"
        time.sleep(0.02)


def test_sigterm_ends_open_requests_and_refuses_new_ones(tmp_path):
    with (
        served("serve-rm", SCORER, "--workers", "1") as server,
        concurrent.futures.ThreadPoolExecutor(4) as threads,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        text = f"touch {tmp_path / 'begun'}"
        open_one = threads.submit(client.post, "/get_reward", json=slime(text))
        wait_for(tmp_path / "begun")
        server.process.send_signal(signal.SIGTERM)
        while client.get("/readyz").status_code == 200:
            time.sleep(0.02)
        new = client.post("/get_reward", json=slime("late"))
        assert new.status_code == 503
        assert "draining" in new.json()["error"]
        assert open_one.result(60).json()["score"] == len(text)
        assert server.process.wait(30) == 0


def test_a_drain_is_bounded(tmp_path):
    with (
        served("serve-rm", SCORER, "--drain-s", "1") as server,
        concurrent.futures.ThreadPoolExecutor(1) as threads,
    ):
        url = f"{server.url}/get_reward"
        body = slime(f"loop {tmp_path / 'begun'}")
        hung = threads.submit(httpx2.post, url, json=body, timeout=60)
        wait_for(tmp_path / "begun")
        start = time.monotonic()
        assert server.stop() == 1
        assert time.monotonic() - start < 20
        with contextlib.suppress(httpx2.TransportError):
            assert hung.result(30).status_code >= 500
        assert "1 requests had no answer" in "".join(server.lines)


def test_an_answer_has_a_limit():
    with served("serve-rm", SCORER, "--answer-s", "0.5") as server:
        response = httpx2.post(f"{server.url}/get_reward", json=slime("sleep 3"), timeout=60)
    assert response.status_code == 503
    assert "no answer within 0.5 s" in response.json()["error"]


def run(*arguments, **env):
    command = [sys.executable, "-m", "rolemesh.launch", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=280, env={**os.environ, **env}, check=False
    )


def test_a_taken_port_and_a_missing_function_are_said(server):
    port = server.url.rpartition(":")[2]
    done = run("serve-rm", SCORER, "--port", port)
    assert (done.returncode, f"cannot listen on --host 127.0.0.1 --port {port}" in done.stderr) == (1, True)
    done = run("serve-rm", SCORER + "_of_mine", "--port", "0")
    assert (done.returncode, "no function 'compute_score_of_mine'" in done.stderr) == (1, True)


def test_tokens_come_from_one_place_and_are_not_empty(tmp_path, monkeypatch):
    file = tmp_path / "token"
    file.write_text("abc\n")
    monkeypatch.setenv("RM_TOKEN", "def")
    monkeypatch.setenv("EMPTY", " ")
    assert (read_token("", file), read_token("RM_TOKEN", None), read_token("", None)) == ("abc", "def", None)
    for env, path, says in (
        ("RM_TOKEN", file, "not both"),
        ("EMPTY", None, "EMPTY holds no token"),
        ("ABSENT", None, "ABSENT is not set"),
        ("", tmp_path / "none", "--token-file"),
    ):
        with pytest.raises(ServeError, match=says):
            read_token(env, path)
