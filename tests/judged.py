"""Batches of text for a judge, and a judge over a server: `from judged import batch, judge`."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tiny import char_tokenizer

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.remote.http import Client, Limits
from rolemesh.engine.rewards.failure import FailurePolicy
from rolemesh.engine.rewards.judge import JudgeReward, chat_endpoint
from rolemesh.engine.rewards.judge_forms import Scores
from rolemesh.engine.rewards.texts import RewardTexts

TOKENIZER = char_tokenizer(add_bos=False)


def batch(
    responses: Sequence[str],
    *,
    prompt: str = "2+2?",
    labels: Sequence[Any] | None = None,
    uids: Sequence[str] | None = None,
) -> DataProto:
    """One row per response to `prompt`, padded on the right to 2 more columns than the longest."""
    width = max(map(len, responses)) + 2
    ids = TOKENIZER(prompt, add_special_tokens=False)["input_ids"]
    rows = torch.zeros(len(responses), width, dtype=torch.long)
    mask = torch.zeros(len(responses), len(ids) + width, dtype=torch.long)
    for row, response in enumerate(responses):
        tokens = TOKENIZER(response, add_special_tokens=False)["input_ids"]
        rows[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(ids) + len(tokens)] = 1
    objects: dict[str, Any] = {}
    if labels is not None:
        objects["reward_model"] = [{"ground_truth": label} for label in labels]
    if uids is not None:
        objects["uid"] = list(uids)
    tensors = {"prompts": torch.tensor([ids] * len(responses)), "responses": rows, "attention_mask": mask}
    return DataProto.from_dict(tensors, objects)


@contextlib.contextmanager
def judge(endpoint: str, on_failure: FailurePolicy | None = None, **options: Any) -> Iterator[JudgeReward]:
    """A judge of that endpoint; `on_failure` is raise where it is not given."""
    limits = options.pop("limits", Limits(retries=2, backoff_s=0.01))
    options = {"model": "llama3.2:1b", "form": Scores()} | options
    client = Client([chat_endpoint(endpoint)], limits, what="reward")
    policy = on_failure or FailurePolicy("raise")
    with contextlib.closing(client):
        yield JudgeReward(client, RewardTexts(TOKENIZER), policy, **options)


def scores(result: DataProto) -> list[float]:
    """The sum of each row's `rm_scores`."""
    return [float(value) for value in result.batch["rm_scores"].sum(-1)]
