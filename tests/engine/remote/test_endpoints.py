import asyncio
import json
import logging
import socket
import time

import pytest
from faulty_server import faulty_server, right_score

from rolemesh.engine.remote import endpoints as module
from rolemesh.engine.remote.endpoints import FAILURES_TO_OPEN, Endpoints, Unavailable
from rolemesh.engine.remote.http import Client, Limits, RemoteError


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def three(open_s: float = 0.05) -> Endpoints:
    urls = [f"http://host-{number}:80/x" for number in range(3)]
    return Endpoints(urls, what="reward", open_s=open_s, open_most_s=0.2)


def fail(endpoints: Endpoints, times: int = FAILURES_TO_OPEN) -> None:
    """All endpoints fail so often."""
    for endpoint in endpoints.all:
        for _ in range(times):
            endpoint.in_flight += 1
            endpoints.release(endpoint, answered=False, fault="reset")


def test_requests_go_where_the_fewest_are_and_not_where_they_failed():
    endpoints = three()
    taken = [endpoints.take() for _ in range(9)]
    assert [endpoint.in_flight for endpoint in endpoints.all] == [3, 3, 3]
    endpoints.release(taken[0], answered=True, fault=None)
    assert endpoints.take() is taken[0]
    for endpoint in taken:
        assert endpoints.take(avoid=endpoint) is not endpoint
    one = Endpoints(["http://a/"], what="reward", open_s=1, open_most_s=1)
    assert one.take(avoid=one.all[0]) is one.all[0]


def test_a_breaker_opens_lets_one_probe_through_and_closes_on_an_answer():
    endpoints = three()
    fail(endpoints, FAILURES_TO_OPEN - 1)
    assert {endpoint.state for endpoint in endpoints.all} == {"closed"}
    fail(endpoints, 1)
    assert {endpoint.state for endpoint in endpoints.all} == {"open"}
    assert endpoints.take() is None
    time.sleep(0.06)
    probes = [endpoints.take() for _ in range(3)]
    assert None not in probes
    assert endpoints.take() is None
    assert probes[0].state == "half-open"
    endpoints.release(probes[0], answered=True, fault=None)
    endpoints.release(probes[1], answered=False, fault="reset again")
    endpoints.release(probes[2], answered=False, fault=None)  # cancelled: another may probe
    assert [endpoint.state for endpoint in probes] == ["closed", "open", "half-open"]
    assert probes[1].open_s == 0.1
    assert "reset again" in endpoints.report()


def test_an_answer_from_before_the_breaker_opened_does_not_close_it():
    endpoints = three(open_s=30)
    early = endpoints.take()
    fail(endpoints)
    endpoints.release(early, answered=True, fault=None)
    assert early.state == "open"


def test_an_answer_between_failures_keeps_the_breaker_closed():
    endpoints = three()
    for _ in range(3):
        fail(endpoints, FAILURES_TO_OPEN - 1)
        for endpoint in endpoints.all:
            endpoint.in_flight += 1
            endpoints.release(endpoint, answered=True, fault=None)
    assert {endpoint.state for endpoint in endpoints.all} == {"closed"}


def test_who_waits_for_an_endpoint_is_told_when_all_probes_failed_and_goes_on_when_one_succeeds():
    async def probe(endpoints: Endpoints, *, answered: bool) -> str:
        async def wait() -> str:
            try:
                await endpoints.admitted()
            except Unavailable as error:
                return str(error)
            return "admitted"

        await endpoints.admitted()
        await asyncio.sleep(0.05)  # the others open at nearly the same time
        probes = [endpoints.take() for _ in range(3)]
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        for one in probes:
            endpoints.release(one, answered=answered, fault=None if answered else "still down")
        return await asyncio.wait_for(waiting, 5)

    for answered, outcome in ((True, "admitted"), (False, "still down")):
        endpoints = three()
        fail(endpoints)
        assert outcome in asyncio.run(probe(endpoints, answered=answered))


def test_paths_replace_or_follow_the_endpoints_own():
    endpoint = Endpoints(["https://h:8000/api/v1?k=1"], what="r", open_s=1, open_most_s=1).all[0]
    assert endpoint.url_of(None) == "https://h:8000/api/v1?k=1"
    assert endpoint.url_of("/v1/score") == "https://h:8000/v1/score?k=1"
    assert endpoint.url_of("chat/completions") == "https://h:8000/api/v1/chat/completions?k=1"
    assert endpoint.address == "h:8000"


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([], "at least one URL"),
        ("http://a", "a list"),
        (["a:5000"], r"reward\.endpoints\[0\] is 'a:5000'; write http://host:port/path"),
        (["http://a", "ftp://b"], r"endpoints\[1\]"),
        (["http://me:pw@a"], "password"),
    ],
)
def test_what_is_no_url_is_an_error(urls, message):
    with pytest.raises(ValueError, match=message):
        Endpoints(urls, what="reward", open_s=1, open_most_s=1)


def rewards(content: bytes, kind: str) -> list[float]:
    return json.loads(content)["rewards"]


async def ask_all(client: Client, n: int) -> list[list[float]]:
    def ask(number: int):
        content = json.dumps({"query": [f"text {number}"]}).encode()
        return client.post(content, "application/json", rewards)

    return await asyncio.gather(*(ask(number) for number in range(n)))


def test_where_nothing_listens_is_said_at_the_start_with_the_option():
    port = free_port()
    with Client([f"http://127.0.0.1:{port}/get_reward"]) as client:
        start_s = time.monotonic()
        with pytest.raises(
            RemoteError, match=rf"reward\.endpoints\[0\] = .*127\.0\.0\.1:{port} refused the connection"
        ):
            client.wait_ready()
        assert time.monotonic() - start_s < 5


def test_a_host_that_is_not_known_is_said():
    with (
        Client(["http://no-such-host.invalid:5000/x"], what="ref") as client,
        pytest.raises(RemoteError, match=r"ref\.endpoints\[0\].*no-such-host\.invalid:5000.*not known"),
    ):
        client.wait_ready(1.0)


def test_a_server_that_takes_connections_and_is_silent_is_said():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        with Client([url]) as client, pytest.raises(RemoteError, match="takes connections, but does not"):
            client.wait_ready(1.0)


def test_a_server_that_is_loading_is_waited_for():
    with faulty_server() as server, Client([server.url]) as client:
        server.get("/sick")
        with pytest.raises(RemoteError, match=r"not ready yet: /readyz gives 503.*loading"):
            client.wait_ready(1.0)
        server.get("/well")
        assert client.wait_ready() == {server.url: {}}


def test_failures_on_what_was_asked_do_not_take_the_endpoint_away():
    """A scorer that fails on some samples answers the others still."""
    script = ",".join(["500"] * 3 * FAILURES_TO_OPEN + ["ok"])
    with faulty_server("--script", script) as server, Client([server.url], Limits(retries=0)) as client:
        for _ in range(3 * FAILURES_TO_OPEN):
            with pytest.raises(RemoteError, match="status 500") as failed:
                client.run(ask_all(client, 1))
            assert failed.value.of_content
        assert client.run(ask_all(client, 1)) == [[right_score("text 0")]]
        assert client.endpoints.all[0].state == "closed"


@pytest.mark.full
def test_a_dead_endpoint_costs_retries_and_no_answers(caplog):
    dead = f"http://127.0.0.1:{free_port()}/get_reward"
    with faulty_server("--delay", "0.02") as server:
        limits = Limits(in_flight=8, backoff_s=0.05)
        with Client([dead, server.url], limits) as client:
            answers = client.run(ask_all(client, 200))
            assert answers == [[right_score(f"text {number}")] for number in range(200)]
            assert client.endpoints.all[0].state != "closed"
            assert client.counters["connection_errors"] < 50
            assert f"{dead} gets no requests for a while" in caplog.text
        with Client([dead, server.url], limits) as client:
            with caplog.at_level(logging.WARNING):
                assert list(client.wait_ready()) == [server.url]
            assert "the other endpoints take its requests" in caplog.text
            client.run(ask_all(client, 3))
            assert client.counters["connection_errors"] <= 1


def test_many_requests_to_a_dead_service_end_together_not_one_after_the_other():
    with Client([f"http://127.0.0.1:{free_port()}/x"], Limits(in_flight=4, backoff_s=0.05)) as client:

        async def all_fail() -> list:
            tasks = [asyncio.create_task(ask_all(client, 1)) for _ in range(400)]
            async with asyncio.timeout(60):
                return await asyncio.gather(*tasks, return_exceptions=True)

        errors = client.run(all_fail())
        assert {type(error) for error in errors} == {RemoteError}
        assert {error.tries for error in errors} == {5}
        assert "refused the connection" in str(errors[-1])
        assert client.counters["connection_errors"] < 200


@pytest.mark.full
def test_health_checks_open_and_close_the_breaker(monkeypatch):
    monkeypatch.setattr(module, "HEALTH_EVERY_S", 0.05)
    with (
        faulty_server("--delay", "0.5") as server,
        faulty_server() as other,
        Client([server.url, other.url], Limits(backoff_s=30, backoff_most_s=30)) as client,
    ):
        client.wait_ready()
        sick = client.endpoints.all[0]
        server.get("/sick")
        client.run(ask_all(client, 2))
        assert wait_for(lambda: sick.state == "open")
        assert "/healthz gives status 503" in sick.cause
        before = server.seen["requests"]
        client.run(ask_all(client, 6))
        assert server.seen["requests"] == before
        server.get("/well")
        assert wait_for(lambda: sick.state == "half-open")
        client.run(ask_all(client, 20))
        assert sick.state == "closed"


def wait_for(condition, limit_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return condition()
