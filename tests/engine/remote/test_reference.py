"""Log-probs of a reference behind HTTP, against the same model here; and what is no reference."""

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from service_process import served
from tiny import char_tokenizer, tiny_checkpoint
from transformers import AutoModelForCausalLM
from worker_runs import batch

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.remote.http import Limits, RemoteError
from rolemesh.engine.remote.reference import ReferenceMismatch, RemoteReference

LIMITS = Limits(batch=3, retries=1, backoff_s=0.01)
pytestmark = [pytest.mark.full, pytest.mark.timeout(580)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    tiny_checkpoint(root / "policy")
    tiny_checkpoint(root / "other", seed=1)
    return root


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with served("serve-ref", str(folder / "policy")) as server:
        yield server.url


@contextlib.contextmanager
def reference(*urls: str, temperature: float = 1.0) -> Iterator[RemoteReference]:
    remote = RemoteReference(urls, LIMITS, temperature=temperature)
    with contextlib.closing(remote):
        yield remote


def local(path: Path, data: DataProto, temperature: float) -> torch.Tensor:
    """The same from the model in this process, a row at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    out = torch.zeros(data.batch["responses"].shape)
    for i, (ids, mask) in enumerate(zip(data.batch["input_ids"], data.batch["attention_mask"], strict=True)):
        row, n = ids[mask.bool()], int(data.batch["response_mask"][i].sum())
        with torch.no_grad():
            log_probs = (model(row[None]).logits[0] / temperature).log_softmax(-1)
        out[i, :n] = log_probs[torch.arange(len(row) - n - 1, len(row) - 1), row[len(row) - n :]]
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_belong_to_the_response_tokens_exactly(folder, url, temperature):
    data = batch(11)
    with reference(url, temperature=temperature) as remote:
        found = remote.log_probs(data)
    truth = local(folder / "policy", data, temperature)
    assert (found - truth).abs().max() < 1e-5
    assert (found[~data.batch["response_mask"].bool()] == 0).all()
    for shift in (1, -1):  # one position off would be seen
        assert (found - truth.roll(shift, 1)).abs().max() > 0.1


def test_a_row_without_a_response_is_not_asked_for(url):
    data = batch(3)
    data.batch["attention_mask"][1, 6:] = 0
    with reference(url) as remote:
        assert (remote.log_probs(data)[1] == 0).all()


def test_the_actors_own_reference_is_accepted_and_named(folder, url):
    with reference(url) as remote:
        name = remote.check(char_tokenizer(), 128, 512)
    assert url in name
    assert str(folder / "policy") in name
    assert "revision" in name


def test_another_tokenizer_vocabulary_or_length_is_refused_with_what_differs(folder, url):
    with reference(url) as remote, pytest.raises(ReferenceMismatch) as caught:
        remote.check(char_tokenizer(60), 60, 1024)
    message = str(caught.value)
    assert "vocabulary size: ours 60, theirs 128" in message
    assert "tokenizer, vocabulary: ours size 60, theirs size 104" in message
    assert "merges" not in message
    assert "longest sequence: 1024 tokens are needed, 512 are served" in message


def test_endpoints_with_different_checkpoints_are_refused(folder, url):
    with served("serve-ref", str(folder / "other")) as other, reference(url, other.url) as remote:
        with pytest.raises(ReferenceMismatch, match="serve different models") as caught:
            remote.check(char_tokenizer(), 128, 512)
        assert other.url in str(caught.value)


def test_an_endpoint_that_is_not_there_is_refused_though_another_is(url):
    with reference(url, "http://127.0.0.1:9") as remote, pytest.raises(RemoteError, match=r"127\.0\.0\.1:9"):
        remote.check(char_tokenizer(), 128, 512)


def test_a_reward_service_is_no_reference(folder, tmp_path):
    scorer = tmp_path / "score.py"
    scorer.write_text("def compute_score(**_):\n    return 0.0\n")
    with (
        served("serve-rm", f"{scorer}:compute_score") as server,
        reference(server.url) as remote,
        pytest.raises(ReferenceMismatch, match="does not tell its tokenizer"),
    ):
        remote.check(char_tokenizer(), 128, 512)


@contextlib.contextmanager
def answering(values: str) -> Iterator[str]:
    """A server whose log-probs are the expression `values` of a response's length `n`."""
    source = textwrap.dedent(f"""
        import json, sys
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
        from rolemesh.engine.remote.log_probs import read_log_probs_request

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                samples, _ = read_log_probs_request(body, self.headers["content-type"])
                rows = [{{"id": s.id, "log_probs": (lambda n: {values})(s.response_length)}} for s in samples]
                content = json.dumps({{"version": 1, "log_probs": rows}}).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        print(server.server_port, flush=True)
        server.serve_forever()
    """)
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("[-0.1] + [None] * (n - 1)", "log-prob at response position 1 is null"),
        ("[-0.1] * (n - 1) + [float('nan')]", r"log-prob at response position \d is nan"),
        ("[0.7] * n", "log-prob at response position 0 is 0.7"),
        ("[-0.1] * (n - 1)", r"\d log_probs for \d response tokens"),
    ],
)
def test_a_log_prob_that_is_none_stops_with_sample_and_position(values, said):
    data = batch(2, seed=3)
    data.batch["attention_mask"][:, 6:] = 1
    with (
        answering(values) as url,
        reference(url) as remote,
        pytest.raises(RemoteError, match=rf"sample [01]-\w+: (the )?{said}"),
    ):
        remote.log_probs(data)
