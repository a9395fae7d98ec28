"""A causal model's log-probs of given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from rolemesh.engine.remote.fingerprint import checkpoint_revision, tokenizer_fingerprint
from rolemesh.engine.remote.log_probs import Tokens
from rolemesh.kernels import log_prob_and_entropy
from rolemesh.launch.services.backend import Job, Kind
from rolemesh.launch.services.checkpoint import load_causal_model
from rolemesh.launch.services.reward_model import check_ids, longest, padded

LOGITS_BYTES = 1 << 30  # made at a time


@dataclass(frozen=True)
class _Work:
    tokens: Tokens
    temperature: float


class ReferenceModel:
    """A causal language model.

    Args:
        model: its name, for `/v1/info`; `folder` holds it.
        max_length: tokens of a sample; None: as many as the model's configuration has positions.
    """

    kind: Kind = "reference"
    lanes = 1

    def __init__(
        self,
        model: str,
        folder: Path,
        *,
        dtype: str,
        device: str,
        batch_tokens: int,
        max_length: int | None,
    ) -> None:
        self.model, self.folder, self.batch_tokens = model, folder, batch_tokens
        self.network = load_causal_model(folder, dtype, device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self.vocab_size = int(self.network.config.vocab_size)
        self.max_length = longest(self.network.config, max_length)
        self.plain_head = self._has_plain_head()

    def info(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "revision": checkpoint_revision(self.folder),
            "vocab_size": self.vocab_size,
            "max_length": self.max_length,
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "dtype": str(self.network.dtype).removeprefix("torch."),
        }

    def jobs(self, request: tuple[Sequence[Tokens], float]) -> list[Job]:
        samples, temperature = request
        for one in samples:
            check_ids(one.id, one.input_ids, self.vocab_size, self.max_length)
        return [Job(one.id, len(one.input_ids), _Work(one, temperature)) for one in samples]

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job], lane: int) -> list[Any]:
        """float32 [response_length] of each job: a token's log-prob is read one position before it."""
        works = [job.work for job in jobs]
        ids, mask = padded([work.tokens.input_ids for work in works], self.network.device)
        hidden = self._hidden(ids, mask)
        found = []
        for row, work in enumerate(works):
            end, n = len(work.tokens.input_ids), work.tokens.response_length
            labels = ids[row, end - n : end]
            states = hidden[row, end - n - 1 : end - 1]
            found.append(self._log_probs(states, labels, work.temperature))
        return found

    def close(self) -> None:
        """Nothing runs beside it."""

    def _hidden(self, ids: Tensor, mask: Tensor) -> Tensor:
        """What comes before the output layer, [b, L, hidden]; the logits themselves where it isn't plain."""
        if self.plain_head:
            return self.network.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
        return self.network(input_ids=ids, attention_mask=mask).logits

    def _log_probs(self, states: Tensor, labels: Tensor, temperature: float) -> np.ndarray:
        """Log-probs of `labels` [n] from `states` [n, hidden], float32 [n]."""
        rows = max(1, LOGITS_BYTES // (4 * self.vocab_size))
        parts = []
        for start in range(0, len(labels), rows):
            part = states[start : start + rows]
            logits = self.network.get_output_embeddings()(part) if self.plain_head else part
            log_prob, _ = log_prob_and_entropy(
                logits, labels[start : start + rows], temperature=temperature, entropy=False
            )
            parts.append(log_prob.float().cpu().numpy())
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    @torch.inference_mode()
    def _has_plain_head(self) -> bool:
        """Whether logits are the output layer of the hidden states: some models scale or cap them."""
        ids = torch.arange(min(8, self.vocab_size), device=self.network.device)[None]
        hidden = self.network.base_model(input_ids=ids).last_hidden_state
        logits = self.network(input_ids=ids).logits
        plain = self.network.get_output_embeddings()(hidden)
        return plain.shape == logits.shape and torch.allclose(plain, logits, rtol=1e-3, atol=1e-4)
