"""Rows of a batch as requests to a generation engine, and its samples as columns again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.rollout.sampling import SamplingOptions, row_seed

NO_VERSION = -1
"""In `weight_versions`, where the model has written nothing."""


@dataclass(frozen=True)
class Request:
    """A response to write for a row: after `token_ids` (its prompt, and what is there of its response), at
    most `max_tokens` more. Without a `seed` the likeliest tokens.
    """

    row: int
    token_ids: np.ndarray  # int64 [n]
    max_tokens: int
    seed: int | None


@dataclass(frozen=True)
class Sample:
    """What an engine wrote for a request, all of it under one version of the weights.

    `finished` is False where it was stopped before an end token or the limit. `n_cached` prompt tokens were
    not computed: another request with the same beginning had been.
    """

    row: int
    tokens: np.ndarray  # int64 [n]
    log_probs: np.ndarray  # fp32 [n]
    version: int
    finished: bool
    n_cached: int = 0


class Rows:
    """The rows that one call works on.

    Args:
        batch: `input_ids`, `attention_mask` [b, P] left-padded; when sampling also `row_ids` [b] int64. With
            `responses`, `response_mask`, `rollout_log_probs` and `weight_versions` [b, R], responses that
            are begun are continued; the columns of an earlier result will do.
        options: how responses are drawn and padded.

    `n_prompt` tokens were asked to be continued so far, `n_cached` of them were not computed for it.
    """

    def __init__(self, batch: DataProto, options: SamplingOptions) -> None:
        self.options, columns = options, batch.batch
        is_begun = "responses" in columns
        self.prompts = columns["prompts" if "prompts" in columns else "input_ids"]  # [b, P]
        self.prompt_mask = columns["attention_mask"][:, : self.prompts.shape[1]]
        size = (len(batch), options.max_response_tokens)
        self.responses = torch.full(size, options.pad_id, dtype=self.prompts.dtype)
        self.mask = torch.zeros(size, dtype=self.prompt_mask.dtype)  # what the model wrote
        self.filled = torch.zeros_like(self.mask)  # that, and what it observed
        self.log_probs = torch.zeros(size)
        self.versions = torch.full(size, NO_VERSION, dtype=torch.int64)
        if is_begun:
            self.mask = columns["response_mask"].clone()
            in_response = columns["attention_mask"][:, self.prompts.shape[1] :]
            self.filled = in_response.clone() if in_response.shape[1] else self.mask.clone()
            self.responses = torch.where(self.filled.bool(), columns["responses"], options.pad_id)
            self.log_probs = columns["rollout_log_probs"].clone()
            self.versions = columns["weight_versions"].clone()
        self.prompt_lengths: list[int] = self.prompt_mask.sum(1).tolist()
        self.lengths: list[int] = self.filled.sum(1).tolist()
        self.n_prompt = self.n_cached = 0
        self.finished = [self._is_whole(row) for row in range(len(batch))]
        self._seeded = [int(i) for i in columns["row_ids"].tolist()] if options.do_sample else None

    def requests(self) -> list[Request]:
        """One for each row whose response is not finished."""
        return [self.request(row) for row, finished in enumerate(self.finished) if not finished]

    def add(self, sample: Sample) -> None:
        """Append what was written for a row."""
        row, start = sample.row, self.lengths[sample.row]
        end = start + len(sample.tokens)
        self.responses[row, start:end] = torch.from_numpy(sample.tokens)
        self.log_probs[row, start:end] = torch.from_numpy(sample.log_probs)
        self.versions[row, start:end] = sample.version
        self.mask[row, start:end] = 1
        self.filled[row, start:end] = 1
        self.n_prompt += self.prompt_lengths[row] + start
        self.n_cached += sample.n_cached
        self.lengths[row], self.finished[row] = end, sample.finished

    def observe(self, row: int, token_ids: Sequence[int]) -> bool:
        """Append what the model is to read and has not written, as much of it as fits; whether there is room
        for more: the row is to be continued then.
        """
        start = self.lengths[row]
        end = min(start + len(token_ids), self.options.max_response_tokens)
        self.responses[row, start:end] = torch.tensor(token_ids[: end - start], dtype=self.responses.dtype)
        self.filled[row, start:end] = 1
        self.lengths[row] = end
        self.finished[row] = self.room(row) == 0
        return not self.finished[row]

    def room(self, row: int) -> int:
        """How many tokens the response may still have."""
        return self.options.max_response_tokens - self.lengths[row]

    def columns(self, rows: Sequence[int], *, partial: bool = False) -> DataProto:
        """The columns that `HFRollout.generate` lists, of these rows, and `weight_versions` [b, R] int64: of
        the weights that wrote each token, -1 outside of the response. With `partial` also `finished` [b].
        """
        at = torch.as_tensor(list(rows), dtype=torch.int64)
        prompts, responses, mask = self.prompts[at], self.responses[at], self.mask[at]
        attention_mask = torch.cat([self.prompt_mask[at], self.filled[at]], dim=1)
        columns = {
            "prompts": prompts,
            "responses": responses,
            "response_mask": mask,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
            "rollout_log_probs": self.log_probs[at],
            "weight_versions": self.versions[at],
        }
        if partial:
            columns["finished"] = torch.tensor([self.finished[row] for row in rows], dtype=torch.bool)
        return DataProto.from_dict(tensors=columns)

    def request(self, row: int) -> Request:
        """To continue a row."""
        options, n = self.options, self.lengths[row]
        prompt = self.prompts[row][self.prompt_mask[row].bool()]
        token_ids = torch.cat([prompt, self.responses[row, :n]]).numpy()
        seed = None if self._seeded is None else row_seed(options.seed, self._seeded[row], n)
        return Request(row, token_ids, self.room(row), seed)

    def _is_whole(self, row: int) -> bool:
        """Whether the response that was given ends, or leaves no room."""
        n = self.lengths[row]
        ended = n > 0 and int(self.responses[row, n - 1]) in self.options.eos_ids
        return ended or n == self.options.max_response_tokens
