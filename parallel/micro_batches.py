"""Rows of a batch cut into micro-batches of right-padded tokens, and results put back in their order."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def partition(
    lengths: Sequence[int], *, size: int | None = None, budget_tokens: int | None = None
) -> list[list[int]]:
    """Cut rows of `lengths` tokens into micro-batches: every row once, in ascending order in each.

    `size` takes rows as they come, the last micro-batch may be shorter. `budget_tokens` bounds the
    padded tokens (rows times the longest row); rows of similar length go together, and a row longer
    than the budget is a micro-batch of its own. Exactly one of the two is given.
    """
    if (size is None) == (budget_tokens is None):
        raise ValueError(f"give size or budget_tokens, got size={size}, budget_tokens={budget_tokens}")
    limit = size if size is not None else budget_tokens
    if limit is None or limit < 1:
        raise ValueError(f"a micro-batch must have room for at least 1, got {limit}")
    if size is not None:
        return [list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size)]
    parts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        # Rows come longest first: the first one of a micro-batch sets its width.
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= limit:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [sorted(part) for part in parts]


def balanced(lengths: Sequence[int], n: int) -> list[list[int]]:
    """Cut rows into `n` parts of nearly equal token sums; sizes differ by at most one, larger ones first.

    Karmarkar and Karp's differencing: sets of n rows, one for each part, are merged two at a time, the
    most uneven ones first, heaviest against lightest. Deterministic; rows ascend in each part.
    """
    if n < 1:
        raise ValueError(f"cannot cut rows into {n} parts")
    by_length = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for start in range(0, len(by_length), n):
        parts = [(lengths[row], [row]) for row in by_length[start : start + n]]
        parts += [(0, [])] * (n - len(parts))
        heap.append((parts[-1][0] - parts[0][0], start, parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, heavy_first = heapq.heappop(heap)
        _, _, others = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(heavy_first, reversed(others), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], order, merged))
    cut = [sorted(rows) for _, rows in heap[0][2]] if heap else [[] for _ in range(n)]
    return sorted(cut, key=lambda rows: (-len(rows), rows))


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together.

    Attributes:
        rows: [m] int64, their places in the batch.
        tokens: [m, L] int64, right-padded with 0.
        lengths: [m] int64, tokens of each row.
        attention_mask: [m, W] of the batch's own, padded form: 1 where a token stands.
        columns: further columns of these rows, each [m, ...].
    """

    rows: Tensor
    tokens: Tensor
    lengths: Tensor
    attention_mask: Tensor
    columns: Mapping[str, Tensor]

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on `device`."""
        return MicroBatch(
            self.rows.to(device),
            self.tokens.to(device),
            self.lengths.to(device),
            self.attention_mask.to(device),
            {name: column.to(device) for name, column in self.columns.items()},
        )


def pack(
    input_ids: Tensor,
    attention_mask: Tensor,
    columns: Mapping[str, Tensor],
    rows: Sequence[int],
    *,
    multiple: int = 1,
) -> MicroBatch:
    """Take `rows` of a batch [b, W] and move their tokens to the left, whatever the padding was.

    The width L is the longest row's, rounded up to a multiple of `multiple` (tp under sequence parallel).
    """
    index = torch.as_tensor(rows, dtype=torch.int64)
    mask = attention_mask[index].bool()
    lengths = mask.sum(dim=1)
    longest = max(int(lengths.max()), 1)
    width = -(-longest // multiple) * multiple
    tokens = input_ids.new_zeros((len(index), width), dtype=torch.int64)
    tokens[torch.arange(width) < lengths[:, None]] = input_ids[index][mask].to(torch.int64)
    taken = {name: column[index] for name, column in columns.items()}
    return MicroBatch(index, tokens, lengths, attention_mask[index], taken)


def micro_batches(
    input_ids: Tensor,
    attention_mask: Tensor,
    columns: Mapping[str, Tensor],
    *,
    size: int | None = None,
    budget_tokens: int | None = None,
    multiple: int = 1,
) -> list[MicroBatch]:
    """Cut a batch as `partition` says and pack each part; no rows give no micro-batches."""
    lengths = attention_mask.sum(dim=1).tolist()
    padded = [-(-length // multiple) * multiple for length in lengths]
    parts = partition(padded, size=size, budget_tokens=budget_tokens)
    return [pack(input_ids, attention_mask, columns, rows, multiple=multiple) for rows in parts]


def unpack(micro_batches: Sequence[MicroBatch], results: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Results of micro-batches, each [m, ...], as columns of the batch [b, ...] in its order."""
    rows = torch.cat([micro_batch.rows for micro_batch in micro_batches])
    order = torch.argsort(rows)
    return {name: torch.cat([result[name] for result in results])[order] for name in results[0]}


@dataclass(frozen=True)
class ResponseIndex:
    """Where the n response tokens of a micro-batch stand, in the packed rows and in the [m, R] columns.

    Attributes:
        row: [n] row in the micro-batch.
        previous: [n] packed position of the token before: the output there predicts (or values) the token.
        column: [n] column among the R response columns.
        shape: (m, R).
    """

    row: Tensor
    previous: Tensor
    column: Tensor
    shape: tuple[int, int]

    def gather(self, output: Tensor) -> Tensor:
        """Model output [m, L, ...] at the tokens before: [n, ...]."""
        return output[self.row, self.previous]

    def labels(self, tokens: Tensor) -> Tensor:
        """Packed tokens [m, L] at the response tokens themselves: [n]."""
        return tokens[self.row, self.previous + 1]

    def scatter(self, values: Tensor) -> Tensor:
        """Values [n] of the response tokens as a column [m, R], 0 where no token stands."""
        return values.new_zeros(self.shape).index_put((self.row, self.column), values)


def response_index(attention_mask: Tensor, response_width: int) -> ResponseIndex:
    """Index of the tokens in the last `response_width` columns of `attention_mask` [m, W].

    Padding may stand anywhere. Raises ValueError for a response token with no token before it.
    """
    position = attention_mask.long().cumsum(dim=1) - 1
    start = attention_mask.shape[1] - response_width
    row, column = attention_mask[:, start:].bool().nonzero(as_tuple=True)
    previous = position[row, start + column] - 1
    if (previous < 0).any():
        first = int(row[previous < 0][0])
        raise ValueError(f"row {first} has a response but no prompt token that could predict its first token")
    return ResponseIndex(row, previous, column, (attention_mask.shape[0], response_width))
