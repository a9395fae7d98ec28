"""What does batching a reward server's requests bring, and what does the client cost?

One reward model (random weights), one thread, samples of log-normal length, served twice by
`rolemesh serve-rm`: with batches, and one sample at a time (`--batch-tokens 1`). Callers each send one sample
per request and wait for its answer, the same requests in the same order to both servers, which take turns
round by round so that a busy moment meets both. Printed are requests/s and the p50 and p99 of a request's
time, and the ratio of the requests/s; the medians of the rounds.

The client's overhead is the CPU time that `Client` takes per sample, building bodies and reading answers
included, for requests of 16 samples to a server that answers at once, in a process of its own.

Exits with 1 when a score of one server is not that of the other (1e-4).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import numpy as np

from rolemesh.engine.remote.forms import Sample, Score, answer, read_answer, read_request, request_body
from rolemesh.engine.remote.http import Client, Limits

START_S = 600.0
PER_REQUEST = 16  # samples, of the client's overhead


@dataclass(frozen=True)
class Round:
    """One pass over all samples: each one's score, each request's time, the whole time."""

    scores: np.ndarray
    request_s: np.ndarray
    total_s: float

    @property
    def per_s(self) -> float:
        return len(self.scores) / self.total_s


def make_checkpoint(folder: Path, hidden: int, layers: int) -> None:
    """A Llama with a score head and a tokenizer of characters."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=2048,
        num_labels=1,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokens = {"<unk>": 0, **{chr(32 + n): n + 1 for n in range(95)}}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


def make_samples(n: int, median: float, sigma: float) -> list[Sample]:
    """Texts of log-normal length, at most 1024 characters (tokens)."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(median), sigma, n), 1, 1024).astype(int)
    return [
        Sample(f"{i}", "", "".join(map(chr, random.integers(32, 127, length))))
        for i, length in enumerate(lengths)
    ]


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """The URL of a server in a process of its own, on one thread."""
    command = [sys.executable, "-m", "rolemesh.launch", "serve-rm", str(folder), "--port", "0", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    try:
        for line in process.stdout or ():
            if found := re.match(r"ready: .* at (http://\S+)", line):
                timer.cancel()
                yield found[1]
                return
        raise RuntimeError(f"{' '.join(command)} ended, or was not ready after {START_S:g} s")
    finally:
        timer.cancel()
        process.terminate()
        process.wait(60)


async def send_all(url: str, samples: Sequence[Sample], callers: int) -> Round:
    """Every sample in a request of its own, by so many callers at once."""
    scores, times = np.zeros(len(samples)), np.zeros(len(samples))
    numbers = iter(range(len(samples)))
    limits = httpx2.Limits(max_connections=callers, max_keepalive_connections=callers)
    async with httpx2.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def call() -> None:
            for i in numbers:
                start_s = time.perf_counter()
                response = await client.post("/v1/score", json=request_body("rolemesh", [samples[i]]))
                times[i] = time.perf_counter() - start_s
                scores[i] = read_answer("rolemesh", response.raise_for_status().json(), [samples[i]])[0].score

        start_s = time.perf_counter()
        await asyncio.gather(*(call() for _ in range(callers)))
        return Round(scores, times, time.perf_counter() - start_s)


class _Echo(BaseHTTPRequestHandler):
    """Scores a response by its length."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        protocol, samples = read_request(body)
        scores = [Score(sample.id, float(len(sample.response))) for sample in samples]
        content = json.dumps(answer(protocol, samples, scores)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


def echo_server() -> None:
    """Serve until killed; prints the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    print(server.server_port, flush=True)
    server.serve_forever()


def client_ms(samples: Sequence[Sample], repeats: int) -> float:
    """Median of the client's CPU time per sample, in ms."""
    process = subprocess.Popen([sys.executable, __file__, "--echo-server"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        url = f"http://127.0.0.1:{int(process.stdout.readline())}/v1/score"
        parts = [samples[i : i + PER_REQUEST] for i in range(0, len(samples), PER_REQUEST)]

        async def send(client: Client, part: Sequence[Sample]) -> list[Score]:
            content = json.dumps(request_body("rolemesh", part)).encode()
            read = lambda body, kind: read_answer("rolemesh", json.loads(body), part)  # noqa: E731
            return await client.post(content, "application/json", read)

        async def all_parts(client: Client) -> None:
            await asyncio.gather(*(send(client, part) for part in parts))

        with Client([url], Limits(in_flight=8)) as client:
            taken = []
            for _ in range(repeats + 1):
                start_s = time.process_time()  # of this process: the server's time is not in it
                client.run(all_parts(client))
                taken.append((time.process_time() - start_s) * 1e3 / len(samples))
        return statistics.median(taken[1:])
    finally:
        process.kill()
        process.wait(20)


def report(batched: Sequence[Round], single: Sequence[Round]) -> bool:
    """Print both servers' figures; whether their scores agree."""
    for name, rounds in (("batched", batched), ("one at a time", single)):
        per_s = statistics.median(one.per_s for one in rounds)
        p50, p99 = (
            statistics.median(float(np.percentile(one.request_s, q)) * 1e3 for one in rounds)
            for q in (50, 99)
        )
        print(f"{name:15}{per_s:9.1f} requests/s   p50 {p50:8.1f} ms   p99 {p99:8.1f} ms")
    ratios = [one.per_s / other.per_s for one, other in zip(batched, single, strict=True)]
    print(f"batched over one at a time: {statistics.median(ratios):.2f} times the requests/s")
    difference = max(float(np.abs(one.scores - single[0].scores).max()) for one in (*batched, *single))
    print(f"largest difference of a sample's score: {difference:.1e}")
    return difference < 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--median", type=float, default=48, help="tokens")
    parser.add_argument("--sigma", type=float, default=0.6, help="of the lengths' logarithm")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--echo-server", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.echo_server:
        echo_server()
    samples = make_samples(args.samples, args.median, args.sigma)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), args.hidden, args.layers)
        with serving(Path(folder)) as one, serving(Path(folder), "--batch-tokens", "1") as other:
            rounds = [
                [asyncio.run(send_all(url, samples, args.callers)) for url in (one, other)]
                for _ in range(args.repeats + 1)
            ][1:]
    good = report(*zip(*rounds, strict=True))
    print(f"client: {client_ms(samples, args.repeats):.3f} ms of CPU time per sample")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
