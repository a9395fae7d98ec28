"""A reward model: one score per text, read at its last token."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from rolemesh.engine.data.encode import prompt_tokens
from rolemesh.engine.data.files import DataError
from rolemesh.engine.remote.fingerprint import checkpoint_revision, tokenizer_fingerprint
from rolemesh.engine.remote.forms import Sample
from rolemesh.launch.services.backend import Job, Kind, UnfitError
from rolemesh.launch.services.checkpoint import load_reward_model


class RewardModel:
    """A sequence classifier with one output.

    Args:
        model: its name, for `/v1/info`; `folder` holds it.
        max_length: tokens of a sample; None: as many as the model's configuration has positions.
    """

    kind: Kind = "reward"
    lanes = 1

    def __init__(
        self,
        model: str,
        folder: Path,
        *,
        head: str,
        dtype: str,
        device: str,
        batch_tokens: int,
        max_length: int | None,
    ) -> None:
        self.model, self.folder, self.batch_tokens = model, folder, batch_tokens
        self.network = load_reward_model(folder, head, dtype, device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self._tokenizing = threading.Lock()  # it keeps settings from call to call
        self.vocab_size = int(self.network.config.vocab_size)
        self.max_length = longest(self.network.config, max_length)

    def info(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "revision": checkpoint_revision(self.folder),
            "vocab_size": self.vocab_size,
            "max_length": self.max_length,
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "dtype": str(self.network.dtype).removeprefix("torch."),
        }

    def jobs(self, request: Sequence[Sample]) -> list[Job]:
        """Ids as they were sent where they were; else the text's tokens, with one bos."""
        with self._tokenizing:
            return [self._job(sample) for sample in request]

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job], lane: int) -> list[Any]:
        """(score, extra) of each job."""
        ids, mask = padded([job.work for job in jobs], self.network.device)
        head = getattr(self.network, "score", None)
        if head is not None:
            # Found by length, not by looking for the pad token, which may be the text's last one.
            hidden = self.network.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
            outputs = head(hidden[torch.arange(len(jobs), device=ids.device), mask.sum(-1) - 1])
        else:
            outputs = self.network(input_ids=ids, attention_mask=mask).logits
        return [
            (score, {}) if math.isfinite(score) else ArithmeticError(f"sample {job.id}: the score is {score}")
            for job, score in zip(jobs, outputs.flatten().float().tolist(), strict=True)
        ]

    def close(self) -> None:
        """Nothing runs beside it."""

    def _job(self, sample: Sample) -> Job:
        if sample.prompt_ids is not None and sample.response_ids is not None:
            ids = np.array([*sample.prompt_ids, *sample.response_ids], np.int64)
        else:
            try:
                ids = np.array(prompt_tokens(sample.query, self.tokenizer), np.int64)
            except DataError as error:
                raise UnfitError(f"sample {sample.id}: {error}") from error
        check_ids(sample.id, ids, self.vocab_size, self.max_length)
        return Job(sample.id, len(ids), ids)


def longest(config: Any, asked: int | None) -> int:
    """Tokens of the longest sample: what was asked for, within the model's positions."""
    positions = getattr(config, "max_position_embeddings", None) or asked or 4096
    return min(asked or positions, positions)


def check_ids(sample_id: str, ids: np.ndarray, vocab_size: int, max_length: int) -> None:
    """Raise UnfitError for no tokens, too many, or an id that the vocabulary does not have."""
    if not 0 < len(ids) <= max_length:
        raise UnfitError(f"sample {sample_id} has {len(ids)} tokens; 1 to {max_length} are served")
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        at = int(np.argmax(outside))
        raise UnfitError(
            f"sample {sample_id}: token id {ids[at]} at position {at} is outside of the vocabulary of "
            f"{vocab_size}"
        )


def padded(rows: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask, int64 [b, longest]; padding (id 0) is on the right, where it moves no position."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, values in enumerate(rows):
        ids[row, : len(values)] = torch.from_numpy(values)
        mask[row, : len(values)] = 1
    return ids.to(device), mask.to(device)
