"""Rows as requests and samples as columns; no engine runs here."""

from dataclasses import replace

import numpy as np
import torch

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.rollout import SamplingOptions
from rolemesh.engine.rollout.requests import NO_VERSION, Rows, Sample
from rolemesh.engine.rollout.sampling import row_seed

OPTIONS = SamplingOptions(max_response_tokens=6, eos_ids=(2,), pad_id=0, seed=7)


def prompts() -> DataProto:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    ids = torch.arange(12).reshape(3, 4) * mask + 10 * mask
    return DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "row_ids": torch.tensor([5, 6, 9])})


def sample(row: int, tokens: list[int], version: int = 0, finished: bool = True) -> Sample:
    values = -0.5 * np.arange(1, len(tokens) + 1, dtype=np.float32)
    return Sample(row, np.array(tokens, dtype=np.int64), values, version, finished)


def test_a_request_has_the_prompt_without_padding_and_the_rows_own_seed():
    first, second, third = Rows(prompts(), OPTIONS).requests()
    assert first.token_ids.tolist() == [12, 13]
    assert second.token_ids.tolist() == [14, 15, 16, 17]
    assert [r.max_tokens for r in (first, second, third)] == [6, 6, 6]
    assert [r.seed for r in (first, second, third)] == [row_seed(7, row_id) for row_id in (5, 6, 9)]
    alone = Rows(prompts()[2:], OPTIONS).requests()
    assert (alone[0].seed, alone[0].token_ids.tolist()) == (third.seed, third.token_ids.tolist())


def test_greedy_requests_have_no_seed():
    data = prompts().select(["input_ids", "attention_mask"])
    assert [r.seed for r in Rows(data, replace(OPTIONS, do_sample=False)).requests()] == [None] * 3


def test_samples_become_columns_with_padding_outside_of_the_response():
    rows = Rows(prompts(), OPTIONS)
    rows.add(sample(1, [20, 21, 2], version=3))
    rows.add(sample(0, [30, 31, 32, 33, 34, 35], version=3))
    batch = rows.columns([1, 0]).batch
    assert batch["responses"].tolist() == [[20, 21, 2, 0, 0, 0], [30, 31, 32, 33, 34, 35]]
    assert batch["response_mask"].tolist() == [[1, 1, 1, 0, 0, 0], [1] * 6]
    assert batch["rollout_log_probs"][0].tolist() == [-0.5, -1.0, -1.5, 0, 0, 0]
    assert batch["weight_versions"].tolist() == [[3, 3, 3] + [NO_VERSION] * 3, [3] * 6]
    assert batch["input_ids"][0].tolist() == [14, 15, 16, 17, 20, 21, 2, 0, 0, 0]
    assert batch["attention_mask"][1].tolist() == [0, 0] + [1] * 8
    assert batch["position_ids"][1].tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7]


def test_an_unfinished_response_is_continued_where_it_stopped_with_other_random_numbers():
    rows = Rows(prompts(), OPTIONS)
    rows.add(sample(0, [20, 21], version=3, finished=False))
    rows.add(sample(1, [22, 2], version=3))
    rows.add(sample(2, [], version=3, finished=False))
    begun = rows.columns([0, 1, 2], partial=True)
    assert begun.batch["finished"].tolist() == [False, True, False]
    begun.batch["row_ids"] = prompts().batch["row_ids"]

    again = Rows(begun, OPTIONS)
    assert again.finished == [False, True, False]
    first, third = again.requests()
    assert (first.row, first.token_ids.tolist(), first.max_tokens) == (0, [12, 13, 20, 21], 4)
    assert first.seed == row_seed(7, 5, 2) != row_seed(7, 5)
    assert (third.row, third.seed, third.max_tokens) == (2, row_seed(7, 9), 6)
    again.add(sample(0, [23, 24, 25, 26], version=4))
    batch = again.columns([0]).batch
    assert batch["responses"].tolist() == [[20, 21, 23, 24, 25, 26]]
    assert batch["weight_versions"].tolist() == [[3, 3, 4, 4, 4, 4]]
    assert batch["rollout_log_probs"].tolist() == [[-0.5, -1.0, -0.5, -1.0, -1.5, -2.0]]


def test_no_rows_make_no_requests_and_columns_of_no_rows():
    rows = Rows(prompts()[:0], OPTIONS)
    assert rows.requests() == []
    some = Rows(prompts(), OPTIONS).columns([0])
    none = rows.columns([])
    assert {n: (c.dtype, c.shape[1:]) for n, c in none.batch.items()} == {
        n: (c.dtype, c.shape[1:]) for n, c in some.batch.items()
    }


def test_a_response_with_observations_is_continued_after_them():
    rows = Rows(prompts(), OPTIONS)
    rows.add(sample(0, [20, 2], version=3))
    assert rows.observe(0, [40, 41])
    begun = rows.columns([0])
    assert begun.batch["response_mask"].tolist() == [[1, 1, 0, 0, 0, 0]]
    begun.batch["row_ids"] = prompts().batch["row_ids"][:1]
    (request,) = Rows(begun, OPTIONS).requests()
    assert request.token_ids.tolist() == [12, 13, 20, 2, 40, 41]
    assert (request.max_tokens, request.seed) == (2, row_seed(7, 5, 4))
