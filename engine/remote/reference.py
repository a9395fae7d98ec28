"""RemoteReference: log-probs of responses from a reference model behind HTTP. Ids are sent, never text."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.remote.fingerprint import differences, tokenizer_fingerprint
from rolemesh.engine.remote.forms import VERSION, FormError
from rolemesh.engine.remote.http import BadAnswer, Client, Limits
from rolemesh.engine.remote.log_probs import Tokens, log_probs_request, read_log_probs_answer

PATH = "/v1/log_probs"
READY_S = 5.0
ROUNDING = 0.05
"""Half precision depends on a batch's shape."""
PROBE = "The quick brown fox jumps over 13 lazy dogs, déjà vu!\n"


class ReferenceMismatch(RuntimeError):
    """The service does not have the actor's reference: the message lists what differs."""


class RemoteReference:
    """A frozen reference policy at one or several endpoints, each the same model.

    Args:
        temperature: that log-probs are taken at, as the actor's are.

    Raises:
        ValueError: no endpoint, or something that is no URL.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        limits: Limits,
        *,
        token: str | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.endpoints, self.limits, self.token, self.temperature = endpoints, limits, token, temperature
        self.client = Client(endpoints, limits, token=token, what="ref")

    def check(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, longest_tokens: int) -> str:
        """Compare every endpoint with the actor: tokenizer, vocabulary, longest sequence, a probe sequence.

        Args:
            tokenizer, vocab_size: the actor's; the vocabulary as its model has it.
            longest_tokens: prompt and response that will be asked for.

        Returns:
            The reference's model and revision, for messages.

        Raises:
            ReferenceMismatch: something differs, or endpoints have different revisions.
            RemoteError: an endpoint is not ready; all of them are looked at.
        """
        names = {}
        for url in self.endpoints:
            with Client([url], self.limits, token=self.token, what="ref") as client:
                (info,) = client.wait_ready(READY_S).values()
                ours = {"vocab_size": vocab_size, "tokenizer": tokenizer_fingerprint(tokenizer)}
                if wrong := _mismatches(info, ours, longest_tokens):
                    raise ReferenceMismatch(
                        f"ref.endpoints: {url} serves {info.get('model')}, which is no reference for this "
                        "actor:" + "".join(f"\n  {line}" for line in wrong)
                    )
                self._probe(client, tokenizer, vocab_size)
                names[url] = f"{info.get('model')}, revision {info.get('revision')}"
        if len(set(names.values())) > 1:
            listed = "".join(f"\n  {url}: {name}" for url, name in names.items())
            raise ReferenceMismatch(f"ref.endpoints serve different models:{listed}")
        return f"{', '.join(self.endpoints)} ({next(iter(names.values()))})"

    def log_probs(self, data: DataProto) -> Tensor:
        """float32 [b, R]: the log-prob of each response token given all before it, 0 outside the response.

        Args:
            data: `input_ids` and `attention_mask` [b, P + R], `responses` [b, R].

        Raises:
            RemoteError: a request failed for good; the message names the sample and the response position of
                a value that is missing or not finite.
        """
        ids, mask = data.batch["input_ids"], data.batch["attention_mask"].bool()
        width = data.batch["responses"].shape[1]
        in_response = mask[:, mask.shape[1] - width :]
        lengths, call = in_response.sum(-1).tolist(), uuid.uuid4().hex[:12]
        samples = {
            row: Tokens(f"{row}-{call}", ids[row][mask[row]].numpy().astype(np.int64), length)
            for row, length in enumerate(lengths)
            if length
        }
        found = self.client.run(_all(self.client, list(samples.values()), self.temperature))
        out = torch.zeros(in_response.shape, dtype=torch.float32)
        for row, sample in samples.items():
            out[row, in_response[row]] = torch.from_numpy(found[sample.id])
        return out

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def _probe(self, client: Client, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        """Log-probs must belong to their tokens: they do not depend on where the response begins, and another
        last token changes its own log-prob and no other.
        """
        ids = np.array([*tokenizer(PROBE)["input_ids"], tokenizer.eos_token_id or 0], np.int64)
        other = ids.copy()
        other[-1] = (ids[-1] + 1) % min(vocab_size, len(tokenizer))
        n = len(ids) - 1
        asked = [Tokens("whole", ids, n), Tokens("half", ids, n // 2), Tokens("changed", other, n)]
        whole, half, changed = client.run(_all(client, asked, self.temperature)).values()
        if not (
            np.allclose(whole[n - n // 2 :], half, rtol=0, atol=ROUNDING)
            and np.allclose(whole[:-1], changed[:-1], rtol=0, atol=ROUNDING)
            and whole[-1] != changed[-1]
        ):
            raise ReferenceMismatch(
                "ref.endpoints: a probe's log-probs are not those of its tokens: "
                f"{whole}; from the middle {half}; with another last token {changed}"
            )


async def _all(client: Client, samples: Sequence[Tokens], temperature: float) -> dict[str, np.ndarray]:
    """Log-probs by sample id, from requests of samples of similar length."""
    ordered = sorted(samples, key=lambda sample: len(sample.input_ids))
    size = client.limits.batch
    parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    tasks = [asyncio.create_task(_request(client, part, temperature)) for part in parts]
    try:
        answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    found = {name: values for answer in answers for name, values in answer.items()}
    return {sample.id: found[sample.id] for sample in samples}


async def _request(client: Client, samples: Sequence[Tokens], temperature: float) -> dict[str, np.ndarray]:
    def read(body: bytes, content_type: str) -> list[np.ndarray]:
        try:
            return read_log_probs_answer(body, content_type, samples)
        except FormError as error:
            raise BadAnswer(str(error)) from None

    answer = await client.post(*log_probs_request(samples, temperature), read, path=PATH)
    return {sample.id: values for sample, values in zip(samples, answer, strict=True)}


def _mismatches(info: Mapping[str, Any], ours: Mapping[str, Any], longest_tokens: int) -> list[str]:
    """What of `/v1/info` does not suit the actor, a line each."""
    if not isinstance(info.get("tokenizer"), Mapping):
        return ["it does not tell its tokenizer (GET /v1/info): is it `rolemesh serve-ref`?"]
    wrong = []
    if info.get("protocol_version") != VERSION:
        wrong.append(f"protocol version: ours {VERSION}, theirs {info.get('protocol_version')}")
    if info.get("vocab_size") != ours["vocab_size"]:
        wrong.append(f"vocabulary size: ours {ours['vocab_size']}, theirs {info.get('vocab_size')}")
    wrong += [f"tokenizer, {line}" for line in differences(ours["tokenizer"], info["tokenizer"])]
    longest = info.get("max_length")
    if isinstance(longest, int) and longest < longest_tokens:
        wrong.append(f"longest sequence: {longest_tokens} tokens are needed, {longest} are served")
    return wrong
