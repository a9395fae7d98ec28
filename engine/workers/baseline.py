"""The greedy answer of each prompt, which ReMax compares the samples with: one per prompt, copied to its
samples' rows.
"""

from __future__ import annotations

import numpy as np
import torch

from rolemesh.engine.protocol import DataProto
from rolemesh.placement.steps.remax import BASELINE


def prompts_once(data: DataProto) -> tuple[DataProto, np.ndarray]:
    """The first row of each prompt (`uid`), and for each row of `data` [b] which of them is its own."""
    _, first, own = np.unique(
        data.non_tensor_batch["uid"].astype(str), return_index=True, return_inverse=True
    )
    return data.select_idxs(first), own


def as_prompts(data: DataProto) -> DataProto:
    """What to generate from: `input_ids` and `attention_mask` [b, P] of samples' `prompts` [b, P]."""
    prompts = data.batch["prompts"]
    mask = data.batch["attention_mask"][:, : prompts.shape[1]]
    return DataProto.from_dict({"input_ids": prompts, "attention_mask": mask})


def as_baseline(answers: DataProto, own: np.ndarray) -> DataProto:
    """The columns of `answers` under the baseline's names, answer `own[i]` in row i."""
    columns = {BASELINE + name: column for name, column in answers.batch.items()}
    return DataProto.from_dict(columns).select_idxs(own)


def as_samples(data: DataProto) -> DataProto:
    """The greedy answers under the names that samples' columns have, ready to be scored."""
    tensors = {name.removeprefix(BASELINE): column for name, column in data.batch.items()}
    return DataProto.from_dict(tensors, data.non_tensor_batch, data.meta_info)


def as_reward(scored: DataProto, own: np.ndarray) -> DataProto:
    """`reward_baselines` fp32 [b], the whole score of answer `own[i]` in row i; `baseline_dropped` [b] too,
    where a service tells of failures.
    """
    columns = {"reward_baselines": scored.batch["rm_scores"].sum(-1).float()}
    if "dropped" in scored.batch:
        columns[BASELINE + "dropped"] = scored.batch["dropped"]
    rows = torch.from_numpy(own)
    return DataProto.from_dict(
        {name: column[rows] for name, column in columns.items()}, meta_info=scored.meta_info
    )
