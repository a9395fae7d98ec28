"""PromptDataset: prompts from files, tokenised once, with what rewards need to know about them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rolemesh.engine.data.encode import prompt_tokens
from rolemesh.engine.data.files import DataError, Place, read_rows, source_of
from rolemesh.engine.protocol import DataProto

Overlong = Literal["error", "filter", "truncate"]


@dataclass(frozen=True)
class Row:
    """One prompt: its tokens (int32, [n]), and the columns that travel with it."""

    place: Place
    token_ids: np.ndarray
    raw_prompt: str | list[dict[str, Any]]
    data_source: str
    reward_model: dict[str, Any]
    extra_info: dict[str, Any]


class PromptDataset:
    """Prompts of one or more files, in file order.

    A row has the prompt under `prompt_key`: text or chat messages, see `prompt_tokens`. verl's further
    columns are `data_source` (default: the name of file or folder), `reward_model` (holds `ground_truth`) and
    `extra_info`; columns of any other name are added to `extra_info`.

    Args:
        files: what `data_files` takes, each.
        max_prompt_tokens: longest prompt, counted as it is sent (template and special tokens included).
        overlong: what happens to a longer one: `error`, `filter` (left out) or `truncate` (last tokens kept).

    Attributes:
        overlong: the longer prompts that were left out or cut, with their number of tokens.
        width: tokens of the longest prompt, the `P` of every collated batch.

    Raises:
        DataError: naming file and row.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str = "prompt",
        max_prompt_tokens: int = 512,
        overlong: Overlong = "error",
    ) -> None:
        self.files = [Path(file) for file in ([files] if isinstance(files, str | Path) else files)]
        self.tokenizer, self.prompt_key, self.kept_overlong = tokenizer, prompt_key, overlong == "truncate"
        self.overlong: list[tuple[Place, int]] = []
        read = [self._row(place, fields) for file in self.files for place, fields in read_rows(file)]
        fitted = (self._fitted(row, max_prompt_tokens, overlong) for row in read)
        self.rows = [row for row in fitted if row is not None]
        if not self.rows:
            names = ", ".join(map(str, self.files)) or "an empty list of files"
            longer = f"{len(self.overlong)} of them longer than {max_prompt_tokens} tokens"
            raise DataError(f"no prompts in {names}: {len(read)} rows read, {longer}")
        self.width = max(len(row.token_ids) for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The columns of one prompt; `raw_prompt_ids` are its tokens as a list, `index` its number here."""
        row = self.rows[index]
        return {
            "raw_prompt_ids": row.token_ids.tolist(),
            "raw_prompt": row.raw_prompt,
            "data_source": row.data_source,
            "reward_model": row.reward_model,
            "extra_info": row.extra_info,
            "index": range(len(self))[index],
        }

    def collate(self, indices: Sequence[int]) -> DataProto:
        """A batch of prompts: `input_ids`, `attention_mask`, `position_ids` int64 [b, width], padded on the
        left, and the columns of `__getitem__`."""
        items = [self[index] for index in indices]
        pad_id = self.tokenizer.pad_token_id
        # Padding is masked wherever it is read, so any id will do.
        input_ids = torch.full((len(items), self.width), 0 if pad_id is None else pad_id)
        attention_mask = torch.zeros_like(input_ids)
        for row, item in enumerate(items):
            start = self.width - len(item["raw_prompt_ids"])
            input_ids[row, start:] = torch.tensor(item["raw_prompt_ids"])
            attention_mask[row, start:] = 1
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        tensors = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        return DataProto.from_dict(tensors, {name: [item[name] for item in items] for name in self[0]})

    def sources(self) -> dict[str, list[int]]:
        """The numbers of each source's prompts; sources in the order of their first one."""
        rows: dict[str, list[int]] = {}
        for number, row in enumerate(self.rows):
            rows.setdefault(row.data_source, []).append(number)
        return rows

    def describe(self) -> str:
        """One line for the log: prompts, sources, and the longer ones that were left out or cut."""
        text = f"{len(self)} prompts of at most {self.width} tokens from "
        text += ", ".join(f"{name} ({len(rows)})" for name, rows in self.sources().items())
        if self.overlong:
            place, n_tokens = max(self.overlong, key=lambda item: item[1])
            what = "cut" if self.kept_overlong else "left out"
            text += f"; {len(self.overlong)} too long, {what} (the longest: {n_tokens} tokens, {place})"
        return text

    def metrics(self, name: str) -> dict[str, float]:
        """How many prompts the set `name` has, and how many were too long, for the metrics."""
        what = "truncated" if self.kept_overlong else "filtered"
        return {
            f"data/{name}/prompts": float(len(self)),
            f"data/{name}/overlong_{what}": float(len(self.overlong)),
        }

    def _row(self, place: Place, fields: dict[str, Any]) -> Row:
        rest, data_source = dict(fields), source_of(place, fields)
        if self.prompt_key not in rest:
            names = sorted(rest)
            raise DataError(f"{place} has no {self.prompt_key!r}; it has {names} (see data.prompt_key)")
        prompt = rest.pop(self.prompt_key)
        try:
            token_ids = np.array(prompt_tokens(prompt, self.tokenizer), dtype=np.int32)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        reward_model = _mapping(place, "reward_model", rest.pop("reward_model", None))
        extra_info = _mapping(place, "extra_info", rest.pop("extra_info", None))
        rest.pop("data_source", None)
        return Row(place, token_ids, prompt, data_source, reward_model, rest | extra_info)

    def _fitted(self, row: Row, limit: int, overlong: Overlong) -> Row | None:
        """The row within the limit, None where it is left out; `overlong` of the data set counts both."""
        n_tokens = len(row.token_ids)
        if n_tokens <= limit:
            return row
        if overlong == "error":
            raise DataError(
                f"{row.place}: the prompt has {n_tokens} tokens, more than the limit of {limit}; raise "
                "data.max_prompt_tokens, or set data.overlong to filter or truncate"
            )
        self.overlong.append((row.place, n_tokens))
        return replace(row, token_ids=row.token_ids[-limit:]) if overlong == "truncate" else None


def _mapping(place: Place, name: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise DataError(f"{place}: {name!r} is a {type(value).__name__}, not an object with named fields")
    return value or {}
