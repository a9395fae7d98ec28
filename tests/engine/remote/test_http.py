import asyncio
import json
import time
from collections.abc import Iterator
from email.utils import formatdate

import pytest
from faulty_server import Running, faulty_server, right_score

from rolemesh.engine.remote import http
from rolemesh.engine.remote.http import BadAnswer, Client, Limits, RemoteError, retry_after_s

QUICK = {"backoff_s": 0.05, "connect_s": 60, "read_s": 60, "total_s": 90}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with faulty_server() as running:
        yield running


def body(number: int = 0) -> bytes:
    return json.dumps({"query": [f"text {number}"]}).encode()


def rewards(content: bytes, kind: str) -> list[float]:
    """A reader as callers write them."""
    try:
        return json.loads(content)["rewards"]
    except (ValueError, KeyError) as error:
        raise BadAnswer(f"no rewards: {error!r}") from None


async def ask(client: Client, number: int = 0) -> list[float]:
    return await client.post(body(number), "application/json", rewards)


async def ask_all(client: Client, n: int) -> list[list[float]]:
    return await asyncio.gather(*(ask(client, number) for number in range(n)))


def test_a_request_that_was_refused_and_cut_off_succeeds_at_the_third_try(server):
    server.reset("503,reset,ok")
    with Client([server.url], Limits(**QUICK)) as client:
        start_s = time.monotonic()
        assert client.run(ask(client)) == [right_score("text 0")]
        assert time.monotonic() - start_s >= 0.05 + 0.1
        assert client.counters == {"requests": 1, "retries": 2, "status_5xx": 1, "connection_errors": 1}
    assert server.seen["requests"] == 3


def test_waits_grow_by_twos_up_to_a_limit_with_a_random_part():
    limits = Limits()
    for tries, wait_s in ((1, 1), (2, 2), (3, 4), (4, 8), (6, 30), (5000, 30)):
        waits_s = {limits.wait_s(tries) for _ in range(50)}
        assert wait_s <= min(waits_s) < max(waits_s) <= 1.5 * wait_s


def test_a_client_error_fails_at_once_and_shows_the_body(server):
    server.reset("400")
    with Client([server.url], Limits(**QUICK)) as client:
        with pytest.raises(RemoteError, match=r"after 1 try: status 400.*fault 400") as error:
            client.run(ask(client))
        assert error.value.url == server.url
        assert error.value.of_content
        assert client.counters["retries"] == 0
    assert server.seen["requests"] == 1


@pytest.mark.parametrize(
    ("limits", "fault", "cause"),
    [
        ({"read_s": 0.3, "total_s": 20}, "silence", "no answer within read_s 0.3"),
        ({"read_s": 20, "total_s": 0.5}, "slow-headers", "no whole answer within total_s 0.5"),
        ({"read_s": 20, "total_s": 0.3}, "silence", "no whole answer within total_s 0.3"),
    ],
)
def test_silence_ends_within_the_limits_of_all_tries(server, limits, fault, cause):
    server.reset(fault)
    with Client([server.url], Limits(retries=2, backoff_s=0.05, **limits)) as client:
        with pytest.raises(RemoteError, match=f"{server.url} failed after 3 tries: {cause}") as error:
            client.run(ask(client))
        assert error.value.tries == client.counters["timeouts"] == 3


def test_requests_in_flight_are_capped(server):
    server.reset(delay=0.1)
    with Client([server.url], Limits(in_flight=16, **QUICK)) as client:
        answers = client.run(ask_all(client, 100))
    assert answers == [[right_score(f"text {number}")] for number in range(100)]
    assert 8 < server.seen["most_in_flight"] <= 16


@pytest.mark.full
def test_waiting_for_a_place_does_not_count_as_time_of_a_request(server):
    server.reset(delay=1.0)
    with Client([server.url], Limits(in_flight=1, total_s=4, retries=0)) as client:
        client.run(ask_all(client, 6))
        assert client.counters == {"requests": 6}


def test_a_full_server_is_asked_again_when_it_says_and_no_try_is_lost(server):
    server.reset("retry-after,ok")
    with Client([server.url], Limits(retries=0, **QUICK)) as client:
        start_s = time.monotonic()
        client.run(ask(client))
        assert time.monotonic() - start_s >= 1
        assert client.counters == {"requests": 1, "status_429": 1}


def test_a_server_that_stays_full_is_an_error_after_total_s(server):
    server.reset("429")
    with (
        Client([server.url], Limits(backoff_s=0.05, total_s=0.5)) as client,
        pytest.raises(RemoteError, match=r"server is full: status 429, \d+ times.*lower in_flight"),
    ):
        client.run(ask(client))


def test_retry_after_is_seconds_or_a_date():
    assert retry_after_s("2.5") == 2.5
    assert 8 < retry_after_s(formatdate(time.time() + 10, usegmt=True)) <= 10
    assert [retry_after_s(value) for value in (None, "", "soon", "-3", "nan")] == [0.0] * 5


def test_a_wrong_answer_is_asked_for_again_and_shown_when_it_stays(server):
    server.reset("html,truncated,ok")
    with Client([server.url], Limits(**QUICK)) as client:
        assert client.run(ask(client)) == [right_score("text 0")]
        assert client.counters["bad_answers"] == 2
        server.reset("html")
        with pytest.raises(RemoteError, match=r"no rewards.*text/html.*502 Bad Gateway") as error:
            client.run(ask(client))
        assert error.value.of_content


def test_the_token_is_sent_and_never_shown(server):
    server.reset("401")
    with Client([server.url], Limits(**QUICK), token="s3cret") as client:
        with pytest.raises(RemoteError, match="status 401") as error:
            client.run(ask(client))
        assert "s3cret" not in str(error.value)
        assert not error.value.of_content
    assert server.seen["authorization"] == "Bearer s3cret"


def test_a_redirection_is_not_followed_and_named(server):
    server.reset("redirect")
    with (
        Client([server.url], Limits(**QUICK), what="ref") as client,
        pytest.raises(RemoteError, match=r"307; it sends to /elsewhere: name that in ref\.endpoints"),
    ):
        client.run(ask(client))


def test_an_answer_without_end_is_an_error(server, monkeypatch):
    server.reset()
    monkeypatch.setattr(http, "MOST_BYTES", 10)
    with (
        Client([server.url], Limits(**QUICK)) as client,
        pytest.raises(RemoteError, match="the answer is longer than"),
    ):
        client.run(ask(client))


def test_metrics_are_those_since_the_last_time(server):
    server.reset("503,ok")
    with Client([server.url], Limits(**QUICK)) as client:
        client.run(ask_all(client, 1))
        metrics = client.take_metrics("reward")
        assert metrics["reward/requests"] == metrics["reward/retries"] == metrics["reward/status_5xx"] == 1
        assert 0 < metrics["reward/latency_p50_s"] <= metrics["reward/latency_p99_s"] < 90
        later = client.take_metrics("reward")
        assert "reward/latency_p50_s" not in later
        assert set(later.values()) == {0}


def test_an_interrupted_caller_leaves_nothing_in_flight(server):
    server.reset("silence,ok")

    async def give_up(client: Client) -> None:
        async with asyncio.timeout(0.2):
            await ask(client)

    with Client([server.url], Limits(in_flight=1, **QUICK)) as client:
        with pytest.raises(TimeoutError):
            client.run(give_up(client))
        assert client.run(ask(client)) == [right_score("text 0")]
        assert client.endpoints.all[0].in_flight == 0


def test_post_in_another_loop_and_limits_that_cannot_be_met_are_errors(server):
    with Client([server.url]) as client:
        with pytest.raises(RuntimeError, match=r"inside Client\.run"):
            asyncio.run(ask(client))
        client.close()
    for wrong in ({"in_flight": 0}, {"total_s": 0}, {"retries": -1}, {"read_s": float("nan")}):
        with pytest.raises(ValueError, match=rf"limits\.{next(iter(wrong))}"):
            Limits(**wrong)
