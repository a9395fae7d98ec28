"""Validation: what the answers to held-out prompts come to, per source, and a table of them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.response import response_tokens

CORE = "acc"  # verl's name of the score that counts, where a reward returns it


def validation_metrics(data: DataProto, extras: Collection[str] = ()) -> dict[str, float]:
    """Means over all rows and over each source's.

    Args:
        data: `rm_scores` float [b, R], `responses` [b, R], `attention_mask` [b, P + R], column `data_source`
            (one source where there is none); rows where a bool column `dropped` [b] is set count nowhere but
            in `val/dropped`.
        extras: object columns that a reward function returned; those of numbers are averaged where present.

    Returns:
        `val/reward/mean` and `val/response_length/mean`, the same per source as `val/reward/SOURCE/mean`, and
        in verl's names `val-core/SOURCE/reward/mean@1`. An extra NAME is `val-aux/SOURCE/NAME/mean@1`; where
        there is one called `acc`, that is the core one and the reward is auxiliary.
    """
    kept = np.ones(len(data), dtype=bool)
    metrics: dict[str, float] = {}
    if "dropped" in data.columns:
        kept = ~data.batch["dropped"].bool().numpy()
        metrics["val/dropped"] = float((~kept).sum())
    values: dict[str, Sequence[Any]] = {"reward": scores_of(data)}
    values |= {name: data.non_tensor_batch[name].tolist() for name in extras}
    lengths = response_tokens(data).sum(-1).tolist()
    metrics["val/reward/mean"] = _mean(values["reward"], kept)
    metrics["val/response_length/mean"] = _mean(lengths, kept)
    sources = np.array(sources_of(data))
    for source in dict.fromkeys(sources.tolist()):
        rows = kept & (sources == source)
        means = {name: _mean(column, rows) for name, column in values.items() if _is_numeric(column)}
        metrics[f"val/reward/{source}/mean"] = means["reward"]
        metrics[f"val/response_length/{source}/mean"] = _mean(lengths, rows)
        core = CORE if CORE in means else "reward"
        for name, mean in means.items():
            metrics[f"val-{'core' if name == core else 'aux'}/{source}/{name}/mean@1"] = mean
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def sample_table(
    data: DataProto, tokenizer: PreTrainedTokenizerBase, extras: Collection[str] = ()
) -> list[dict[str, Any]]:
    """A row per answer: `source`, `prompt` (without special tokens), `response` (with them), `score` (none
    of a dropped row),
    `response_tokens`, the model's `turns` where an agent answered, `ground_truth` where known, and the
    extras.
    """
    width = data.batch["responses"].shape[1]
    in_prompt = data.batch["attention_mask"][:, :-width].bool()
    in_response = response_tokens(data)
    truths = data.non_tensor_batch.get("reward_model", [None] * len(data))
    special = torch.tensor(tokenizer.all_special_ids)
    rows = []
    turns = data.batch["num_turns"].tolist() if "num_turns" in data.columns else None
    lost = data.batch["dropped"].tolist() if "dropped" in data.columns else [False] * len(data)
    for i, (source, score) in enumerate(zip(sources_of(data), scores_of(data), strict=True)):
        prompt = data.batch["prompts"][i][in_prompt[i]]
        response = data.batch["responses"][i][in_response[i]]
        row = {
            "source": source,
            "prompt": _text(tokenizer, prompt[~torch.isin(prompt, special)]),
            "response": _text(tokenizer, response),
            "score": None if lost[i] else score,
            "response_tokens": len(response),
        }
        if turns is not None:
            row["turns"] = turns[i]
        if (truth := truths[i]) and "ground_truth" in truth:
            row["ground_truth"] = truth["ground_truth"]
        rows.append(row | {name: data.non_tensor_batch[name][i] for name in extras})
    return rows


def extra_columns(data: DataProto, prompts: DataProto) -> list[str]:
    """The object columns of scored answers that their prompts did not have."""
    return sorted(set(data.non_tensor_batch) - set(prompts.non_tensor_batch))


def scores_of(data: DataProto) -> list[float]:
    """The score of each row."""
    return [float(score) for score in data.batch["rm_scores"].sum(-1).tolist()]


def sources_of(data: DataProto) -> list[str]:
    """The source of each row."""
    given = data.non_tensor_batch.get("data_source")
    return ["all"] * len(data) if given is None else [str(source) for source in given]


def _text(tokenizer: PreTrainedTokenizerBase, token_ids: torch.Tensor) -> str:
    return str(tokenizer.decode(token_ids.tolist(), clean_up_tokenization_spaces=False))


def _is_numeric(column: Sequence[Any]) -> bool:
    present = [value for value in column if value is not None]
    return bool(present) and all(isinstance(value, numbers.Real) for value in present)


def _mean(column: Sequence[Any], rows: np.ndarray) -> float:
    """The mean over the rows that have a value; NaN where none has."""
    present = [float(v) for v, row in zip(column, rows, strict=True) if row and v is not None and v == v]
    return math.fsum(present) / len(present) if present else math.nan
