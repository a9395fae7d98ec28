"""Served models give what Hugging Face gives for one sample alone; heads that are not there are refused."""

import shutil
import subprocess
import sys
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from service_process import served
from tiny import char_tokenizer, tiny_checkpoint
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
)

from rolemesh.engine.remote.fingerprint import checkpoint_revision, differences, tokenizer_fingerprint
from rolemesh.engine.remote.forms import Sample, read_answer, request_body
from rolemesh.engine.remote.log_probs import Tokens, log_probs_request, read_log_probs_answer
from rolemesh.launch.services.backend import ServeError, UnfitError
from rolemesh.launch.services.checkpoint import load_causal_model, load_reward_model
from rolemesh.launch.services.reference_model import ReferenceModel
from rolemesh.launch.services.reward_model import RewardModel

TEXTS = ["a", "hello there", "<bos>with one", "<bos><bos>with two", "x" * 90, "ends <eos>", "1+1=2", "<pad>"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "reward": tiny_checkpoint(root / "reward", head="score"),
        "causal": tiny_checkpoint(root / "causal", "qwen2", tied=True),
    }


def rewritten(folder: Path, out: Path, change) -> Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(folder, out)
    file = out / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return out


def reward_model(folder, **options):
    given = {"head": "score", "dtype": "auto", "device": "cpu", "batch_tokens": 4096, "max_length": None}
    return RewardModel("rm", folder, **{**given, **options})


def reference_model(folder, **options):
    given = {"dtype": "auto", "device": "cpu", "batch_tokens": 4096, "max_length": None}
    return ReferenceModel("ref", folder, **{**given, **options})


def expected_score(folder, ids):
    """Of one sequence, by Hugging Face's own forward of a batch of one."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.pad_token_id = None  # nothing is padded, and an id 0 in the text is a token
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits.item()


def expected_log_probs(folder, ids, response_length, temperature=1.0):
    """By whole log-softmaxes of Hugging Face's logits: token t is read in the row of token t - 1."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double() / temperature
    rows = [torch.log_softmax(logits[t - 1], -1)[ids[t]].item() for t in range(1, len(ids))]
    return rows[len(rows) - response_length :]


def one_bos_ids(text):
    ids = char_tokenizer()(text, add_special_tokens=False)["input_ids"]
    return ids if ids[:1] == [1] else [1, *ids]


def test_scores_do_not_depend_on_the_batch_and_are_hugging_faces(folders):
    model = reward_model(folders["reward"])
    jobs = model.jobs([Sample(f"{i}", "", text) for i, text in enumerate(TEXTS)])
    together = [score for score, _ in model.run(jobs, 0)]
    alone = [model.run([job], 0)[0][0] for job in jobs]
    expected = [expected_score(folders["reward"], one_bos_ids(text)) for text in TEXTS]
    np.testing.assert_allclose(together, alone, atol=1e-5)
    np.testing.assert_allclose(together, expected, atol=1e-5)


def test_text_gets_exactly_one_bos_and_ids_are_taken_as_they_are(folders):
    model = reward_model(folders["reward"])
    texts = [Sample("a", "ab", "c"), Sample("b", "<bos>ab", "c"), Sample("c", "<bos>", "abc")]
    ids = Sample("d", "ignored", "", None, (1, 5), (5, 5))
    works = [job.work.tolist() for job in model.jobs([*texts, ids])]
    assert works[0] == works[1] == works[2]
    assert works[0].count(1) == 1
    assert works[3] == [1, 5, 5, 5]


def test_samples_that_do_not_fit_the_model_are_named(folders):
    model = reward_model(folders["reward"], max_length=10)
    with pytest.raises(UnfitError, match="sample long has 11 tokens; 1 to 10 are served"):
        model.jobs([Sample("long", "", "x" * 10)])
    with pytest.raises(UnfitError, match=r"sample odd: token id 128 at position 1 is outside of .* 128"):
        model.jobs([Sample("odd", "", "", None, (1, 128), ())])
    assert reward_model(folders["reward"]).max_length == 512


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_response_tokens(folders, temperature):
    model, random = reference_model(folders["causal"]), np.random.default_rng(0)
    samples = [
        Tokens(f"{i}", random.integers(3, 100, length), n)
        for i, (length, n) in enumerate([(5, 1), (5, 4), (40, 17), (2, 1), (9, 0), (23, 22)])
    ]
    results = model.run(model.jobs((samples, temperature)), 0)
    for one, result in zip(samples, results, strict=True):
        expected = expected_log_probs(
            folders["causal"], one.input_ids.tolist(), one.response_length, temperature
        )
        assert (result.dtype, result.shape) == (np.float32, (one.response_length,))
        np.testing.assert_allclose(result, expected, atol=1e-5)


def test_one_batch_may_hold_several_temperatures(folders):
    model = reference_model(folders["causal"])
    one = Tokens("a", np.array([1, 9, 20, 7]), 3)
    jobs = [job for temperature in (1.0, 2.0) for job in model.jobs(([one], temperature))]
    for result, temperature in zip(model.run(jobs, 0), (1.0, 2.0), strict=True):
        expected = expected_log_probs(folders["causal"], [1, 9, 20, 7], 3, temperature)
        np.testing.assert_allclose(result, expected, atol=1e-5)


def test_a_head_that_caps_its_logits_is_not_left_out(tmp_path):
    config = Gemma2Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=2.0,
    )
    torch.manual_seed(0)
    network = Gemma2ForCausalLM(config)
    network.lm_head.weight.data *= 50  # large enough for the cap to show
    network.save_pretrained(tmp_path)
    char_tokenizer().save_pretrained(tmp_path)
    model = reference_model(tmp_path)
    assert not model.plain_head
    (result,) = model.run(model.jobs(([Tokens("a", np.array([1, 9, 20, 7]), 2)], 1.0)), 0)
    np.testing.assert_allclose(result, expected_log_probs(tmp_path, [1, 9, 20, 7], 2), atol=1e-5)


def test_an_encoder_is_scored_by_its_own_head(tmp_path):
    config = BertConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=1,
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    char_tokenizer().save_pretrained(tmp_path)
    model = reward_model(tmp_path, head="classifier")
    jobs = model.jobs([Sample("a", "", "abc"), Sample("b", "", "longer text")])
    scores = [score for score, _ in model.run(jobs, 0)]
    np.testing.assert_allclose(
        scores, [expected_score(tmp_path, job.work.tolist()) for job in jobs], atol=1e-5
    )


def test_a_head_of_another_name_is_named_and_used(folders, tmp_path):
    other = rewritten(
        folders["reward"],
        tmp_path / "value_head",
        lambda tensors: {name.replace("score.", "value_head."): tensor for name, tensor in tensors.items()},
    )
    with pytest.raises(ServeError, match=r"has no score.weight.*value_head.weight; name theirs with --head"):
        load_reward_model(other, "score", "auto", "cpu")
    ours, theirs = reward_model(folders["reward"]), reward_model(other, head="value_head")
    sample = [Sample("a", "", "text")]
    assert ours.run(ours.jobs(sample), 0) == theirs.run(theirs.jobs(sample), 0)


def test_a_heads_bias_counts(folders, tmp_path):
    biased = rewritten(
        folders["reward"], tmp_path / "biased", lambda tensors: {**tensors, "score.bias": torch.tensor([2.5])}
    )
    plain, model = reward_model(folders["reward"]), reward_model(biased)
    sample = [Sample("a", "", "text")]
    ((one, _),), ((other, _),) = plain.run(plain.jobs(sample), 0), model.run(model.jobs(sample), 0)
    assert other == pytest.approx(one + 2.5, abs=1e-5)


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("score.weight"), "has no score.weight: a reward model without its head"),
        (
            lambda tensors: {**tensors, "score.weight": torch.ones(2, 64)},
            r"score.weight is \[2, 64\].*1 output",
        ),
        (
            without("model.norm.weight", "model.layers.1.mlp.up_proj.weight"),
            "lacks model.layers.1.mlp.up_proj",
        ),
    ],
)
def test_a_reward_checkpoint_that_is_not_whole_is_refused(folders, tmp_path, change, says):
    with pytest.raises(ServeError, match=says):
        load_reward_model(rewritten(folders["reward"], tmp_path / "x", change), "score", "auto", "cpu")


def test_a_language_model_is_no_reward_model_and_the_other_way_round(folders):
    with pytest.raises(ServeError, match=r"has no score.weight"):
        load_reward_model(folders["causal"], "score", "auto", "cpu")
    with pytest.raises(ServeError, match=r"lacks lm_head.weight; they would be random"):
        load_causal_model(folders["reward"], "auto", "cpu")


def test_a_revision_is_that_of_the_weights(folders, tmp_path):
    copy = shutil.copytree(folders["reward"], tmp_path / "copy")
    changed = rewritten(
        folders["reward"],
        tmp_path / "changed",
        lambda tensors: {**tensors, "score.weight": tensors["score.weight"] + 1},
    )
    assert checkpoint_revision(copy) == checkpoint_revision(folders["reward"]) != checkpoint_revision(changed)


@pytest.mark.full
@pytest.mark.timeout(580)
def test_a_served_reward_model_answers_each_form(folders):
    samples = [Sample(f"s{i}", "<bos>", text) for i, text in enumerate(TEXTS[:3] + TEXTS[4:])]
    expected = [expected_score(folders["reward"], one_bos_ids(sample.query)) for sample in samples]
    with (
        served("serve-rm", folders["reward"], "--max-length", "100") as server,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        for protocol, path in (("openrlhf", "/get_reward"), ("rolemesh", "/v1/score")):
            body = client.post(path, json=request_body(protocol, samples)).json()
            scores = [one.score for one in read_answer(protocol, body, samples)]
            np.testing.assert_allclose(scores, expected, atol=1e-5)
        one = client.post("/get_reward", json=request_body("slime", samples[:1])).json()
        assert one == pytest.approx(expected[0], abs=1e-5)
        long = client.post("/get_reward", json={"query": ["x" * 100]})
        assert (long.status_code, long.json()["error"]) == (
            422,
            "sample 0 has 101 tokens; 1 to 100 are served",
        )
        info = client.get("/v1/info").json()
        assert (info["kind"], info["vocab_size"], info["max_length"]) == ("reward", 128, 100)
        assert info["revision"] == checkpoint_revision(folders["reward"])
        assert differences(tokenizer_fingerprint(char_tokenizer()), info["tokenizer"]) == []
        assert server.stop() == 0


@pytest.mark.full
@pytest.mark.timeout(580)
def test_a_served_reference_answers_in_json_and_binary(folders):
    random = np.random.default_rng(1)
    samples = [Tokens(f"{n}", random.integers(3, 100, n + 4), n) for n in range(12)]
    with (
        served("serve-ref", folders["causal"]) as server,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        for binary in (True, False):
            content, kind = log_probs_request(samples, 0.8, binary=binary)
            response = client.post("/v1/log_probs", content=content, headers={"Content-Type": kind})
            assert response.headers["content-type"] == kind
            found = read_log_probs_answer(response.content, kind, samples)
            for one, values in zip(samples, found, strict=True):
                expected = expected_log_probs(
                    folders["causal"], one.input_ids.tolist(), one.response_length, 0.8
                )
                np.testing.assert_allclose(values, expected, atol=1e-5)
        outside, kind = log_probs_request([Tokens("odd", np.array([1, 500, 2]), 1)])
        response = client.post("/v1/log_probs", content=outside, headers={"Content-Type": kind})
        assert response.status_code == 422
        assert "sample odd: token id 500 at position 1" in response.json()["error"]
        cut = client.post("/v1/log_probs", content=content[:-9], headers={"Content-Type": kind})
        assert cut.status_code == 422
        assert client.get("/v1/info").json()["kind"] == "reference"


@pytest.mark.full
@pytest.mark.timeout(580)
def test_a_broken_model_answers_with_an_error_that_names_the_sample(folders, tmp_path):
    broken = rewritten(
        folders["causal"],
        tmp_path / "nan",
        lambda tensors: {**tensors, "model.norm.weight": tensors["model.norm.weight"] * float("nan")},
    )
    content, kind = log_probs_request([Tokens("s7", np.array([1, 5, 2]), 1)])
    with served("serve-ref", broken) as server:
        response = httpx2.post(
            f"{server.url}/v1/log_probs", content=content, headers={"Content-Type": kind}, timeout=60
        )
    assert response.status_code == 500
    assert "sample s7: the log-prob at response position 0 is nan" in response.json()["error"]


@pytest.mark.full
@pytest.mark.timeout(580)
def test_the_command_ends_when_the_checkpoint_is_refused(folders):
    command = [sys.executable, "-m", "rolemesh.launch", "serve-rm", str(folders["causal"]), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 1
    assert "has no score.weight" in done.stderr
    assert "ready" not in done.stdout
