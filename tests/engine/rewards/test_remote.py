import random
import socket
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from faulty_server import Running, faulty_server, right_score
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.remote.http import Client, Limits, RemoteError
from rolemesh.engine.rewards.failure import FailurePolicy
from rolemesh.engine.rewards.pool import RewardError
from rolemesh.engine.rewards.remote import RemoteReward
from rolemesh.engine.rewards.texts import RewardTexts

VOCAB = ["<pad>", "</s>", *"0123456789", "poison", "ask "]
PROTOCOLS = ("openrlhf", "rolemesh", "slime")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with faulty_server() as running:
        yield running


@pytest.fixture(scope="module")
def texts() -> RewardTexts:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCAB)}, unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    return RewardTexts(made)


def samples(n: int, *, poison: int | None = None, **objects) -> DataProto:
    """n rows: prompt "ask ", response the row's number, in one row after the word "poison"."""
    prompts = torch.tensor([[0, VOCAB.index("ask ")]]).repeat(n, 1)
    responses, mask = torch.zeros(n, 8, dtype=torch.long), torch.zeros(n, 10, dtype=torch.long)
    mask[:, 1] = 1
    for row in range(n):
        words = (["poison"] if row == poison else []) + list(str(row))
        responses[row, : len(words)] = torch.tensor([VOCAB.index(word) for word in words])
        mask[row, 2 : 2 + len(words)] = 1
    tensors = {"prompts": prompts, "responses": responses, "attention_mask": mask}
    columns = {"uid": [f"g{row // 4}" for row in range(n)]} | objects
    return DataProto.from_dict(tensors, columns)


def right(n: int, poison: int | None = None) -> torch.Tensor:
    """What the service gives for `samples(n)`: float32 [n]."""
    scores = [right_score(f"ask {'poison' if row == poison else ''}{row}") for row in range(n)]
    return torch.tensor(scores, dtype=torch.float32)


def remote(server, texts, protocol="openrlhf", do="raise", *, limits=None, score_key=None, **policy):
    quick = {"backoff_s": 0.02, "batch": 8, "retries": 2, "connect_s": 60} | (limits or {})
    client = Client([server.url], Limits(**quick))
    return RemoteReward(client, texts, FailurePolicy(do, **policy), protocol=protocol, score_key=score_key)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_scores_are_at_the_last_response_token_of_their_own_rows(server, texts, protocol):
    server.reset()
    with remote(server, texts, protocol) as reward:
        result = reward.score(samples(32))
    scores = result.batch["rm_scores"]
    assert scores.dtype == torch.float32
    assert torch.equal(scores.sum(-1), right(32))
    assert [row.nonzero().tolist() for row in scores[[5, 31]]] == [[[0]], [[1]]]
    assert result.batch["dropped"].tolist() == [False] * 32
    seen = server.seen
    assert seen["samples"] == {f"ask {row}": 1 for row in range(32)}
    assert seen["requests"] == (32 if protocol == "slime" else 4)
    metrics = result.meta_info["metrics"]
    assert metrics["reward/failed"] == metrics["reward/retries"] == 0
    assert metrics["reward/latency_p99_s"] > 0


def test_prompt_response_and_label_are_sent(server, texts):
    truths = [{"ground_truth": np.float64(0.5)}, None, {"ground_truth": np.array(["a", "b"], dtype=object)}]
    for protocol in PROTOCOLS:
        server.reset()
        with remote(server, texts, protocol, limits={"in_flight": 1}) as reward:
            reward.score(samples(3, reward_model=truths))
        bodies = server.seen["bodies"]
        match protocol:
            case "openrlhf":
                sent = list(zip(bodies[0]["query"], bodies[0]["prompts"], bodies[0]["labels"], strict=True))
            case "rolemesh":
                sent = [(s["prompt"] + s["response"], s["prompt"], s["label"]) for s in bodies[0]["samples"]]
            case "slime":
                sent = [(s["prompt"] + s["response"], s["prompt"], s["label"]) for s in bodies]
        labels = [0.5, None, ["a", "b"]]
        assert sent == [(f"ask {row}", "ask ", label) for row, label in enumerate(labels)]


def test_ids_are_sent_where_they_are_asked_for(server, texts):
    server.reset()
    with remote(server, texts, "rolemesh") as reward:
        reward.send_ids = True
        reward.score(samples(2))
    assert [s["response_ids"] for s in server.seen["bodies"][0]["samples"]] == [[2], [3]]


FAULTS = {
    "503": "status 503",
    "429": "server is full",
    "reset": "broke the connection off",
    "reset-in-body": "broke the connection off",
    "slow-headers": "no whole answer within total_s",
    "silence": "no answer within read_s",
    "truncated": "not JSON",
    "short": "7 rewards for 8|sample 7-.*7 scores|no score for sample 7",
    "long": "9 rewards for 8|more than one entry for sample 0",
    "doubled": "more than one entry for sample 0",
    "nan": "sample 4.* nan",
    "null": "sample 4.* null",
    "infinite": "sample 4.* inf",
    "text": "sample 4.* '0.8x'",
    "html": "not JSON.*text/html.*502 Bad Gateway",
    "dummy": "1 rewards for 8|more than one entry for sample 0",
}


@pytest.mark.parametrize("protocol", ["openrlhf", "rolemesh"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_costs_nothing_and_one_that_stays_is_named(server, texts, protocol, fault):
    server.reset(f"{fault},ok")
    slow = fault in ("silence", "slow-headers", "429")
    limits = {"read_s": 0.5, "total_s": 0.8, "retries": 2} if slow else {"retries": 3}
    with remote(server, texts, protocol, limits=limits) as reward:
        assert torch.equal(reward.score(samples(8)).batch["rm_scores"].sum(-1), right(8))
        server.reset(fault)
        with pytest.raises(
            RewardError, match=f"(?s)samples 0 to 7 got no score: {server.url}.*{FAULTS[fault]}"
        ):
            reward.score(samples(8))


@pytest.mark.parametrize("protocol", ["openrlhf", "rolemesh"])
def test_an_answer_in_another_order_is_put_in_order_by_its_ids(server, texts, protocol):
    server.reset("shuffled")
    with remote(server, texts, protocol) as reward:
        assert torch.equal(reward.score(samples(20)).batch["rm_scores"].sum(-1), right(20))


@pytest.mark.parametrize("fault", ["nan", "null", "infinite", "text", "short", "html", "truncated"])
def test_faults_of_the_form_with_one_sample_are_named_too(server, texts, fault):
    server.reset(fault)
    with (
        remote(server, texts, "slime", limits={"retries": 0}) as reward,
        pytest.raises(RewardError, match=r"sample 0 got no score.*the answer"),
    ):
        reward.score(samples(1))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_dict_as_score_needs_the_key_that_counts(server, texts, protocol):
    server.reset("dict")
    with (
        remote(server, texts, protocol) as reward,
        pytest.raises(RewardError, match=r"\['acc', 'score'\].*set score_key"),
    ):
        reward.score(samples(2))
    with remote(server, texts, protocol, score_key="score") as reward:
        result = reward.score(samples(2))
    assert torch.equal(result.batch["rm_scores"].sum(-1), right(2))
    assert result.non_tensor_batch["acc"].tolist() == [0, 0]
    assert result.meta_info["metrics"]["reward/acc/mean"] == 0


def test_one_bad_sample_costs_itself_and_its_group_only(server, texts):
    server.reset("poison")
    with remote(server, texts, do="drop_group", limits={"retries": 1}, stop_above=0.1) as reward:
        result = reward.score(samples(16, poison=5))
    dropped = result.batch["dropped"]
    assert dropped.tolist() == [4 <= row < 8 for row in range(16)]
    assert torch.equal(result.batch["rm_scores"].sum(-1), torch.where(dropped, 0, right(16)))
    metrics = result.meta_info["metrics"]
    assert [metrics[f"reward/{name}"] for name in ("failed", "dropped", "dropped_groups")] == [1, 4, 1]
    assert metrics["reward/bad_answers"] == 4


def test_a_value_stands_for_a_bad_sample_and_too_many_stop_the_run(server, texts):
    server.reset("poison")
    with remote(server, texts, do="value", value=-1.0, limits={"retries": 0}, stop_above=0.1) as reward:
        scores = reward.score(samples(16, poison=5)).batch["rm_scores"].sum(-1)
        assert scores[5] == -1
        assert torch.equal(scores[6:], right(16)[6:])
        server.reset("400")
        with pytest.raises(
            RewardError, match=r"(?s)8 of 8 samples got no score, 100\.0%.*status 400.*fault 400"
        ):
            reward.score(samples(8))


def test_a_refused_token_is_not_tried_sample_by_sample(server, texts):
    server.reset("401")
    with remote(server, texts, do="value", value=0.0, stop_above=1.0) as reward:
        reward.score(samples(16))
    assert server.seen["requests"] == 2


def test_with_raise_the_first_failure_ends_all_requests(server, texts):
    server.reset("400,silence")
    with remote(server, texts, limits={"batch": 1, "in_flight": 2}) as reward:
        with pytest.raises(RewardError, match=r"got no score.*status 400"):
            reward.score(samples(100))
        assert server.seen["requests"] <= 3
        server.reset()
        assert torch.equal(reward.score(samples(4)).batch["rm_scores"].sum(-1), right(4))


def test_extras_may_not_take_the_place_of_columns(server, texts):
    server.reset("dict")
    with (
        remote(server, texts, score_key="score") as reward,
        pytest.raises(RewardError, match=r"returns \['acc'\], which are columns"),
    ):
        reward.score(samples(2, acc=[1, 2]))


def test_a_label_that_json_has_not_is_an_error(server, texts):
    server.reset()
    with remote(server, texts) as reward, pytest.raises(RewardError, match=r"a label holds .*set"):
        reward.score(samples(1, reward_model=[{"ground_truth": {1}}]))


def test_a_service_that_is_not_there_is_an_error_at_the_start(texts):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{one.getsockname()[1]}/get_reward"
    with Client([url]) as client, pytest.raises(RemoteError, match=r"reward\.endpoints\[0\].*refused"):
        client.wait_ready()


def test_no_rows_are_no_request(server, texts):
    server.reset()
    with remote(server, texts) as reward:
        assert reward.score(samples(4)[:0]).batch["rm_scores"].shape == (0, 8)
    assert server.seen["requests"] == 0


@pytest.mark.full
@pytest.mark.parametrize("protocol", ["openrlhf", "rolemesh"])
def test_of_ten_thousand_samples_none_is_lost_doubled_or_in_anothers_row(texts, protocol):
    n = 10_000
    # Longer than an answer may ever take here: one that is given up and asked for again is scored twice.
    limits = Limits(in_flight=16, retries=8, backoff_s=0.1, connect_s=60, read_s=10, total_s=15)
    data = samples(n)
    order = list(range(n))
    random.Random(0).shuffle(order)
    data.reorder(order)
    with (
        faulty_server("--share", "0.05", "--seed", "1") as one,
        faulty_server("--share", "0.05", "--seed", "2") as other,
        Client([one.url, other.url], limits) as client,
    ):
        reward = RemoteReward(client, texts, FailurePolicy("raise"), protocol=protocol)
        result = reward.score(data)
        scored = one.seen["samples"], other.seen["samples"]
        faults = [{k: v for k, v in server.seen["faults"].items() if k != "ok"} for server in (one, other)]
    assert torch.equal(result.batch["rm_scores"].sum(-1), right(n)[order])
    times = {name: scored[0].get(name, 0) + scored[1].get(name, 0) for name in scored[0].keys() | scored[1]}
    assert times == {f"ask {row}": 1 for row in range(n)}
    assert sum(sum(found.values()) for found in faults) > 15
    assert len(faults[0].keys() | faults[1]) > 8
    assert result.meta_info["metrics"]["reward/retries"] > 10


def test_a_server_that_died_ends_the_step_once_its_retries_are_used_up(texts):
    with faulty_server() as mortal, remote(mortal, texts) as reward:
        reward.score(samples(8))
        mortal.process.kill()
        mortal.process.wait()
        why = f"{mortal.url} failed after 3 tries: .* refused the connection: nothing listens there"
        with pytest.raises(RewardError, match=f"samples 0 to 7 got no score: {why}"):
            reward.score(samples(8))
