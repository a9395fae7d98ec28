from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolemesh.parallel.micro_batches import (
    Padding,
    balanced,
    micro_batches,
    pack,
    partition,
    response_index,
    unpack,
)

LENGTHS = st.lists(st.integers(0, 300), max_size=60)


def test_146_rows_by_4_are_37_micro_batches_with_a_short_tail():
    parts = partition([7] * 146, size=4)
    assert [len(part) for part in parts] == [4] * 36 + [2]
    assert list(chain(*parts)) == list(range(146))


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 400))
def test_a_token_budget_bounds_tokens_except_for_a_single_long_row(lengths: list[int], budget: int):
    parts = partition(lengths, budget_tokens=budget)
    assert sorted(chain(*parts)) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or sum(lengths[row] for row in part) <= budget
    totals = sorted(sum(lengths[row] for row in part) for part in parts)
    assert len(parts) < 2 or totals[0] + totals[1] > budget


def test_partition_needs_exactly_one_limit():
    for limits in ({}, {"size": 2, "budget_tokens": 3}, {"size": 0}):
        with pytest.raises(ValueError, match=r"size|room"):
            partition([1, 2], **limits)


def test_206_rows_after_filtering_balance_over_4_ranks():
    lengths = range(1, 207)
    parts = balanced(lengths, 4)
    sums = [sum(lengths[row] for row in part) for part in parts]
    assert [len(part) for part in parts] == [52, 52, 51, 51]
    assert max(sums) / min(sums) < 1.05


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 7))
def test_balanced_parts_hold_every_row_once_in_sizes_that_differ_by_at_most_one(lengths: list[int], n: int):
    parts = balanced(lengths, n)
    sizes = [len(part) for part in parts]
    assert len(parts) == n
    assert sorted(chain(*parts)) == list(range(len(lengths)))
    assert max(sizes) - min(sizes) <= 1


def padded_batch(
    lengths: list[tuple[int, int]], prompt: int, response: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [b, P + R] with left-padded prompts and right-padded responses, and their mask."""
    ids = torch.full((len(lengths), prompt + response), 99)
    mask = torch.zeros_like(ids)
    for row, (p, r) in enumerate(lengths):
        mask[row, prompt - p : prompt + r] = 1
        ids[row, prompt - p : prompt + r] = 10 * row + torch.arange(p + r)
    return ids, mask


def test_pack_lays_rows_end_to_end_whatever_the_padding():
    ids, mask = padded_batch([(2, 3), (1, 1), (3, 2)], prompt=4, response=3)
    micro_batch = pack(ids, mask, {"reward": torch.tensor([1.0, 2.0, 3.0])}, [2, 1])
    assert micro_batch.tokens.tolist() == [[20, 21, 22, 23, 24, 10, 11]]
    assert micro_batch.lengths.tolist() == [5, 2]
    assert micro_batch.bounds == (0, 5, 7)
    assert micro_batch.columns["reward"].tolist() == [3.0, 2.0]


def test_rows_and_the_whole_are_padded_to_their_multiples_and_lengths_come_back():
    ids, mask = padded_batch([(4, 1), (4, 5), (3, 0)], prompt=4, response=5)
    micro_batch = pack(ids, mask, {}, [0, 1, 2], padding=Padding(row=4, whole=8))
    assert micro_batch.bounds == (0, 8, 20, 24)
    assert micro_batch.lengths.tolist() == [5, 9, 3]
    assert micro_batch.tokens[0, 5:8].tolist() == [0, 0, 0]
    behind = pack(ids, mask, {}, [1, 2], padding=Padding(row=4, whole=8))
    assert behind.bounds == (0, 12, 16)
    assert pack(ids, mask, {}, [2], padding=Padding(whole=8)).bounds == (0, 3, 8)


def test_results_of_dynamic_micro_batches_come_back_in_the_input_order():
    ids, mask = padded_batch([(1, 1), (1, 4), (1, 0), (1, 3)], prompt=1, response=4)
    batches = micro_batches(ids, mask, {}, budget_tokens=6)
    assert [batch.rows.tolist() for batch in batches] == [[1, 2], [0, 3]]
    sums = [
        {"sum": torch.stack([part.sum() for part in batch.tokens[0].split(batch.lengths.tolist())])}
        for batch in batches
    ]
    assert unpack(batches, sums)["sum"].tolist() == (ids * mask).sum(dim=1).tolist()


def test_response_index_finds_the_token_before_each_response_token():
    ids, mask = padded_batch([(2, 3), (3, 1), (1, 0)], prompt=4, response=3)
    mask[0, 5] = 0  # a hole inside of the response
    packed = pack(ids, mask, {}, [0, 1, 2], padding=Padding(row=4))
    index = response_index(packed, 3)
    labels = packed.tokens[0, index.previous + 1]
    assert labels.tolist() == [2, 4, 13]
    assert packed.tokens[0, index.previous].tolist() == [1, 2, 12]
    assert index.scatter(labels).tolist() == [[2, 0, 4], [13, 0, 0], [0, 0, 0]]


def test_a_response_without_a_prompt_is_refused():
    mask = torch.tensor([[1, 1], [0, 1]])
    with pytest.raises(ValueError, match="row 1 has a response but no prompt"):
        response_index(pack(mask, mask, {}, [0, 1]), 1)
