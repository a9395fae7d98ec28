"""Flat ranges of a parameter as boxes of Hugging Face tensors: how optimizer state is named in a checkpoint.

The distributed optimizer cuts a parameter's numbers, laid end to end, over data parallel ranks. A box of a
Hugging Face tensor means the same under every layout, so a checkpoint made of boxes loads under any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from rolemesh.parallel.weights.pieces import Cut


@dataclass(frozen=True)
class Box:
    """`shape` numbers of a Hugging Face tensor from `offset`, and where they lie in a flat range.

    The number at index i of the box is the flat range's number `start + sum(i * strides)`.
    """

    tensor: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """The box's numbers in `flat`, the contiguous range [n] that it was made for: a view of `shape`."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.start)


def boxes(cut: Cut, low: int, high: int) -> Iterator[Box]:
    """The Hugging Face tensors' numbers among numbers `low` to `high` of a tp rank's part of a parameter.

    Every such number is in one box; rows of padding are in none.
    """
    strides = tuple(prod(cut.shape[axis + 1 :]) for axis in range(len(cut.shape)))
    for block in _blocks(cut.shape, low, high):
        for piece in cut.pieces:
            starts = [max(b.start, t.start) for b, t in zip(block, piece.target, strict=True)]
            stops = [min(b.stop, t.stop) for b, t in zip(block, piece.target, strict=True)]
            if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
                continue
            offset = (
                s.start + start - t.start
                for s, t, start in zip(piece.source, piece.target, starts, strict=True)
            )
            yield Box(
                tensor=piece.tensor,
                offset=tuple(offset),
                shape=tuple(stop - start for start, stop in zip(starts, stops, strict=True)),
                start=sum(at * stride for at, stride in zip(starts, strides, strict=True)) - low,
                strides=strides,
            )


def _blocks(shape: tuple[int, ...], low: int, high: int) -> Iterator[tuple[slice, ...]]:
    """Rectangles that hold numbers `low` to `high` of an array in row-major order, each once."""
    if low >= high:
        return
    if len(shape) == 1:
        yield (slice(low, high),)
        return
    row = prod(shape[1:])
    first, skip = divmod(low, row)
    last, rest = divmod(high, row)
    if first == last:
        yield from _in_row(shape, first, skip, rest)
        return
    if skip:
        yield from _in_row(shape, first, skip, row)
        first += 1
    if first < last:
        yield (slice(first, last), *(slice(0, size) for size in shape[1:]))
    yield from _in_row(shape, last, 0, rest)


def _in_row(shape: tuple[int, ...], row: int, low: int, high: int) -> Iterator[tuple[slice, ...]]:
    for inner in _blocks(shape[1:], low, high):
        yield (slice(row, row + 1), *inner)
