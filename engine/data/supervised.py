"""Examples to learn from: prompts with answers, and prompts with a better and a worse answer.

An answer's tokens are those that follow the prompt's own, as in generation: prompt and answer are tokenised
apart. What is learnt goes up to and with the last end token; one is added where a text has none.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rolemesh.engine.data.encode import prompt_tokens, rendered, token_ids
from rolemesh.engine.data.files import DataError, Place, read_rows
from rolemesh.engine.protocol import DataProto

Overlong = Literal["error", "filter", "truncate"]


@dataclass(frozen=True)
class Tokens:
    """Token ids [n] of prompt and answer, and where the loss is (bool [n])."""

    ids: np.ndarray
    counts: np.ndarray

    def cut(self, limit: int) -> Tokens:
        """The first `limit` tokens."""
        return Tokens(self.ids[:limit], self.counts[:limit])


class Encoder:
    """Turns prompts and answers into tokens; `end_ids` are the tokens that end an answer, the first one is
    added where none is written.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        eos = tokenizer.eos_token_id
        self.end_ids = ([] if eos is None else [eos]) + [i for i in end_ids if i != eos]
        if not self.end_ids:
            raise DataError("the tokenizer has no eos token: nothing would end an answer")

    def answered(self, prompt: Any, answer: Any) -> Tokens:
        """A prompt (text or messages) and its answer (text, or messages that go on). Raises DataError."""
        if isinstance(prompt, str) and isinstance(answer, str):
            return self._joined([(prompt_tokens(prompt, self.tokenizer), self._answer(answer))])
        if isinstance(prompt, str):
            raise DataError("the answer is a list of messages, so the prompt must be one too, not text")
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        return self.conversation([*prompt, *answer], first=len(prompt))

    def conversation(self, messages: Any, first: int = 0) -> Tokens:
        """Messages through the chat template: every answer of the assistant from message `first` on counts.

        Raises DataError where there is none, or the template writes a beginning otherwise than the whole.
        """
        rendered(messages, self.tokenizer, add_generation_prompt=False)  # refuses what are no messages
        turns = []
        done = ""
        for i, message in enumerate(messages):
            if i < first or message.get("role") != "assistant":
                continue
            before = rendered(messages[:i], self.tokenizer)
            whole = rendered(messages[: i + 1], self.tokenizer, add_generation_prompt=False)
            if not (before.startswith(done) and whole.startswith(before)):
                raise DataError(
                    f"the chat template writes the messages before number {i + 1} otherwise than with it, so "
                    "its tokens cannot be told from the prompt's: give this turn as prompt and answer texts"
                )
            turns.append((self._ids(before[len(done) :]), self._answer(whole[len(before) :])))
            done = whole
        if not turns:
            raise DataError("no message of the assistant to learn from")
        return self._joined(turns)

    def _ids(self, text: str) -> list[int]:
        return token_ids(text, self.tokenizer, add_special_tokens=False)

    def _answer(self, text: str) -> list[int]:
        ids = self._ids(text)
        return ids if any(i in self.end_ids for i in ids) else [*ids, self.end_ids[0]]

    def _joined(self, turns: Sequence[tuple[list[int], list[int]]]) -> Tokens:
        ids: list[int] = []
        counts: list[bool] = []
        for prompt, answer in turns:
            n = max(k for k, i in enumerate(answer, start=1) if i in self.end_ids)
            ids += [*prompt, *answer]
            counts += [False] * len(prompt) + [True] * n + [False] * (len(answer) - n)
        if counts[0]:
            raise DataError("the prompt has no tokens")
        last = max(k for k, counted in enumerate(counts, start=1) if counted)
        return Tokens(np.array(ids[:last], dtype=np.int32), np.array(counts[:last]))


class SupervisedDataset(abc.ABC):
    """Rows of files as examples, in file order.

    Args:
        files: `.jsonl` or `.parquet`.
        max_tokens: longest sequence (prompt and answer), `overlong` says what happens to a longer one:
            `error`, `filter` (left out) or `truncate` (its first tokens are kept; left out where no more than
            the prompt fits).

    Attributes:
        overlong: longer rows that were left out or cut, with their number of tokens.
        useless: rows left out because there is nothing to learn from them.

    Raises:
        DataError: naming file and row.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        encoder: Encoder,
        keys: Mapping[str, str],
        *,
        max_tokens: int,
        overlong: Overlong = "error",
    ) -> None:
        self.files, self.encoder, self.keys = [Path(file) for file in files], encoder, keys
        self.overlong: list[tuple[Place, int]] = []
        self.useless = 0
        self.rows: list[tuple[Tokens, ...]] = []
        for place, fields in (row for file in self.files for row in read_rows(file)):
            try:
                row = self._row(fields)
            except DataError as error:
                raise DataError(f"{place}: {error}") from error
            longest = max(len(sequence.ids) for sequence in row)
            if longest > max_tokens:
                if overlong == "error":
                    raise DataError(
                        f"{place}: prompt and answer have {longest} tokens, more than the limit of "
                        f"{max_tokens}; raise data.max_tokens, or set data.overlong to filter or truncate"
                    )
                self.overlong.append((place, longest))
                if overlong == "filter":
                    continue
                row = tuple(sequence.cut(max_tokens) for sequence in row)
            if self._teaches(row):
                self.rows.append(row)
            else:
                self.useless += 1
        if not self.rows:
            raise DataError(f"nothing to learn from in {', '.join(map(str, self.files))}: {self.describe()}")

    def __len__(self) -> int:
        return len(self.rows)

    def describe(self) -> str:
        """One line for the log: examples, files, and what was left out or cut."""
        text = f"{len(self)} examples from {len(self.files)} files"
        if self.overlong:
            place, n_tokens = max(self.overlong, key=lambda item: item[1])
            text += f"; {len(self.overlong)} too long, left out or cut (the longest: {n_tokens}, {place})"
        return text + (f"; {self.useless} with nothing to learn, left out" if self.useless else "")

    def _field(self, fields: Mapping[str, Any], name: str) -> Any:
        if fields.get(self.keys[name]) is None:
            raise DataError(f"has no {self.keys[name]!r}; it has {sorted(fields)} (see data.{name}_key)")
        return fields[self.keys[name]]

    @abc.abstractmethod
    def _row(self, fields: Mapping[str, Any]) -> tuple[Tokens, ...]: ...

    @abc.abstractmethod
    def _teaches(self, row: tuple[Tokens, ...]) -> bool: ...

    @abc.abstractmethod
    def collate(self, indices: Sequence[int]) -> DataProto:
        """The examples of these numbers as a batch."""


class SftDataset(SupervisedDataset):
    """Prompts with answers: the columns `prompt` and `response`, or whole conversations in `messages`.

    `keys` names the columns. A batch holds `input_ids` and `attention_mask` [b, P + R], and `responses` and
    `response_mask` [b, R], all int64: what stands before the first token that counts is padded on the left,
    the rest on the right; `response_mask` is 0 for what a user says in between.
    """

    def _row(self, fields: Mapping[str, Any]) -> tuple[Tokens, ...]:
        if (messages := fields.get(self.keys["messages"])) is not None:
            return (self.encoder.conversation(messages),)
        prompt, response = (self._field(fields, name) for name in ("prompt", "response"))
        return (self.encoder.answered(prompt, response),)

    def _teaches(self, row: tuple[Tokens, ...]) -> bool:
        return bool(row[0].counts.any())

    def collate(self, indices: Sequence[int]) -> DataProto:
        rows = [self.rows[index][0] for index in indices]
        starts = [int(row.counts.argmax()) for row in rows]
        before = max(starts)
        shifts = [before - start for start in starts]
        ids, mask = _padded([row.ids for row in rows], shifts)
        counts, _ = _padded([row.counts for row in rows], shifts)
        return DataProto.from_dict(
            {
                "input_ids": ids,
                "attention_mask": mask,
                "responses": ids[:, before:].clone(),
                "response_mask": counts[:, before:].clone(),
            }
        )


class PairDataset(SupervisedDataset):
    """Prompts with a better and a worse answer: the columns `prompt`, `chosen` and `rejected`.

    Without a prompt both are whole conversations. A batch holds `input_ids` and `attention_mask` int64
    [b, 2W], see `PairsWorker`. Pairs of equal sequences are left out.
    """

    def _row(self, fields: Mapping[str, Any]) -> tuple[Tokens, ...]:
        prompt = fields.get(self.keys["prompt"])
        answers = [self._field(fields, name) for name in ("chosen", "rejected")]
        if prompt is None:
            if any(isinstance(answer, str) for answer in answers):
                self._field(fields, "prompt")
            return tuple(self.encoder.conversation(answer) for answer in answers)
        return tuple(self.encoder.answered(prompt, answer) for answer in answers)

    def _teaches(self, row: tuple[Tokens, ...]) -> bool:
        return not np.array_equal(row[0].ids, row[1].ids)

    def collate(self, indices: Sequence[int]) -> DataProto:
        both = [sequence.ids for index in indices for sequence in self.rows[index]]
        ids, mask = (column.reshape(len(indices), -1) for column in _padded(both, [0] * len(both)))
        return DataProto.from_dict({"input_ids": ids, "attention_mask": mask})


def _padded(parts: Sequence[np.ndarray], shifts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Parts as rows [b, W] int64, each `shift` columns from the left, 0 elsewhere; and a mask of them."""
    width = max(shift + len(part) for part, shift in zip(parts, shifts, strict=True))
    values = torch.zeros((len(parts), width), dtype=torch.int64)
    mask = torch.zeros_like(values)
    for row, (part, shift) in enumerate(zip(parts, shifts, strict=True)):
        values[row, shift : shift + len(part)] = torch.from_numpy(part.astype(np.int64))
        mask[row, shift : shift + len(part)] = 1
    return values, mask
