"""Rows of a batch packed into micro-batches, one behind the other, and results put back in their order."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


def partition(
    lengths: Sequence[int], *, size: int | None = None, budget_tokens: int | None = None
) -> list[list[int]]:
    """Cut rows of `lengths` tokens into micro-batches: every row once, in ascending order in each.

    `size` takes rows as they come, the last micro-batch may be shorter. `budget_tokens` bounds the tokens of
    a micro-batch: the longest rows are placed first, each into the first micro-batch with room for it, and a
    row longer than the budget is a micro-batch of its own. Exactly one of the two is given.
    """
    if (size is None) == (budget_tokens is None):
        raise ValueError(f"give size or budget_tokens, got size={size}, budget_tokens={budget_tokens}")
    limit = size if size is not None else budget_tokens
    if limit is None or limit < 1:
        raise ValueError(f"a micro-batch must have room for at least 1, got {limit}")
    if size is not None:
        return [list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size)]
    parts: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        at = next((at for at, free in enumerate(room) if lengths[row] <= free), len(parts))
        if at == len(parts):
            parts.append([])
            room.append(limit)
        parts[at].append(row)
        room[at] -= lengths[row]
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
class Padding:
    """What packed lengths must be multiples of: each row's (`row`), and a micro-batch's (`whole`)."""

    row: int = 1
    whole: int = 1

    def of_row(self, length: int) -> int:
        """The length that a row takes up."""
        return -(-length // self.row) * self.row


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together, one behind the other in one sequence of T tokens.

    Attributes:
        rows: [m] int64, their places in the batch.
        tokens: [1, T] int64, 0 where only padding stands.
        lengths: [m] int64, tokens of each row.
        bounds: where each row starts; then where padding does, if there is any behind the last row; last T.
        attention_mask: [m, W] of the batch's own, padded form: 1 where a token stands.
        columns: further columns of these rows, each [m, ...].
    """

    rows: Tensor
    tokens: Tensor
    lengths: Tensor
    bounds: tuple[int, ...]
    attention_mask: Tensor
    columns: Mapping[str, Tensor]

    @property
    def starts(self) -> Tensor:
        """Where each row starts [m] int64."""
        return torch.tensor(self.bounds[: len(self.rows)], dtype=torch.int64, device=self.tokens.device)

    @property
    def padding(self) -> Tensor:
        """Where no row's token stands [T] bool."""
        inside = torch.arange(int(self.lengths.max()) if len(self.rows) else 0, device=self.tokens.device)
        place = (self.starts[:, None] + inside)[inside < self.lengths[:, None]]
        return torch.ones_like(self.tokens[0], dtype=torch.bool).index_fill(0, place, False)

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on `device`."""
        return MicroBatch(
            self.rows.to(device),
            self.tokens.to(device),
            self.lengths.to(device),
            self.bounds,
            self.attention_mask.to(device),
            {name: column.to(device) for name, column in self.columns.items()},
        )


def pack(
    input_ids: Tensor,
    attention_mask: Tensor,
    columns: Mapping[str, Tensor],
    rows: Sequence[int],
    *,
    padding: Padding = Padding(),
) -> MicroBatch:
    """Take `rows` of a batch [b, W] and lay their tokens end to end, whatever the padding was."""
    index = torch.as_tensor(rows, dtype=torch.int64)
    mask = attention_mask[index].bool()
    lengths = mask.sum(dim=1)
    taken_up = [padding.of_row(length) for length in lengths.tolist()]
    bounds = [0, *accumulate(taken_up)]
    whole = max(-(-bounds[-1] // padding.whole), 1) * padding.whole
    if whole > bounds[-1]:
        bounds.append(whole)
    inside = torch.arange(max(taken_up, default=0)) < lengths[:, None]
    place = torch.tensor(bounds[: len(index)], dtype=torch.int64)[:, None] + torch.arange(inside.shape[1])
    tokens = input_ids.new_zeros(whole, dtype=torch.int64)
    tokens[place[inside]] = input_ids[index][mask].to(torch.int64)
    taken = {name: column[index] for name, column in columns.items()}
    return MicroBatch(index, tokens[None], lengths, tuple(bounds), attention_mask[index], taken)


def micro_batches(
    input_ids: Tensor,
    attention_mask: Tensor,
    columns: Mapping[str, Tensor],
    *,
    size: int | None = None,
    budget_tokens: int | None = None,
    padding: Padding = Padding(),
) -> list[MicroBatch]:
    """Cut a batch as `partition` says and pack each part; no rows give no micro-batches."""
    taken_up = [padding.of_row(length) for length in attention_mask.sum(dim=1).tolist()]
    parts = partition(taken_up, size=size, budget_tokens=budget_tokens)
    return [pack(input_ids, attention_mask, columns, rows, padding=padding) for rows in parts]


def unpack(micro_batches: Sequence[MicroBatch], results: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Results of micro-batches, each [m, ...], as columns of the batch [b, ...] in its order."""
    rows = torch.cat([micro_batch.rows for micro_batch in micro_batches])
    order = torch.argsort(rows)
    return {name: torch.cat([result[name] for result in results])[order] for name in results[0]}


@dataclass(frozen=True)
class ResponseIndex:
    """Where the n response tokens of a micro-batch stand, in the packed sequence and in the [m, R] columns.

    Attributes:
        previous: [n] packed position of the token before: the output there predicts (or values) the token.
        row: [n] row in the micro-batch.
        column: [n] column among the R response columns.
        shape: (m, R).
    """

    previous: Tensor
    row: Tensor
    column: Tensor
    shape: tuple[int, int]

    def scatter(self, values: Tensor) -> Tensor:
        """Values [n] of the response tokens as a column [m, R], 0 where no token stands."""
        return values.new_zeros(self.shape).index_put((self.row, self.column), values)


def response_index(micro_batch: MicroBatch, response_width: int) -> ResponseIndex:
    """Index of the tokens in the last `response_width` columns of the rows' own, padded form.

    Padding may stand anywhere there. Raises ValueError for a response token with no token before it.
    """
    mask = micro_batch.attention_mask
    position = mask.long().cumsum(dim=1) - 1
    start = mask.shape[1] - response_width
    row, column = mask[:, start:].bool().nonzero(as_tuple=True)
    previous = position[row, start + column] - 1
    if (previous < 0).any():
        first = int(row[previous < 0][0])
        raise ValueError(f"row {first} has a response but no prompt token that could predict its first token")
    shape = (mask.shape[0], response_width)
    return ResponseIndex(micro_batch.starts[row] + previous, row, column, shape)
