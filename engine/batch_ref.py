"""BatchRef: a batch as a manifest of blocks, so that what moves between processes is planned without data.

A *block* holds some rows of one column and is the unit of transfer: no part of a block can be fetched.
A batch is cut into blocks at the row boundaries at which later consumers will cut it (`split_points`),
so they fetch whole blocks and nothing else. Everything here is pure: `pack` makes values for a store to
keep, the operations on `BatchRef` rearrange references to them, `unpack` needs the fetched values.
"""

import copy
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict

from rolemesh.engine.columns import (
    ProtoError,
    RowIndex,
    check_same_kind,
    check_same_names,
    dtype_name,
    empty_array,
    row_bounds,
    row_indices,
    tensor_to_array,
)
from rolemesh.engine.meta_info import merge_meta, union_meta
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.read_only import read_only


@dataclass(frozen=True)
class Block:
    """`n_rows` rows of one column, stored as one value of `nbytes` bytes on `node`.

    `ref` is the value's ordinal in what `pack` returned; `BatchRef.stored` puts the store's handle there.
    """

    ref: Any
    n_rows: int
    nbytes: int
    node: str | None = None


@dataclass(frozen=True)
class Piece:
    """Rows `start:stop` of a block."""

    block: Block
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.block.n_rows:
            raise ProtoError(f"rows {self.start}:{self.stop} of a block of {self.block.n_rows} rows")

    @property
    def n_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ColumnRef:
    """One column: the rows of `pieces`, in order.

    Attributes:
        dtype: torch's name for a tensor column (`bfloat16`), numpy's string for an object column (`|O`).
        shape: shape per row.
    """

    name: str
    kind: Literal["tensor", "object"]
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def n_rows(self) -> int:
        return sum(piece.n_rows for piece in self.pieces)

    def take(self, rows: np.ndarray) -> "ColumnRef":
        """The rows [m] int64 in that order; neighbours that lie side by side in a block become one piece."""
        starts = np.cumsum([0, *(piece.n_rows for piece in self.pieces)])
        holder = np.searchsorted(starts, rows, side="right") - 1
        local = rows - starts[holder] + np.array([piece.start for piece in self.pieces] or [0])[holder]
        breaks = np.flatnonzero((np.diff(holder) != 0) | (np.diff(local) != 1)) + 1
        runs = pairwise([0, *breaks.tolist(), len(rows)]) if len(rows) else ()
        pieces = [Piece(self.pieces[holder[a]].block, int(local[a]), int(local[b - 1]) + 1) for a, b in runs]
        return replace(self, pieces=_coalesced(pieces))


@dataclass(frozen=True)
class BatchRef:
    """A batch of `n_rows` rows whose columns lie in blocks elsewhere; operations return new ones.

    Attributes:
        tokens: tokens per row, where the batch has had an `attention_mask`.

    Raises:
        ProtoError: a column with another number of rows.
    """

    columns: Mapping[str, ColumnRef]
    n_rows: int
    meta_info: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        wrong = {name: column.n_rows for name, column in self.columns.items() if column.n_rows != self.n_rows}
        if wrong or (self.tokens is not None and len(self.tokens) != self.n_rows):
            raise ProtoError(
                f"a batch of {self.n_rows} rows with columns of {wrong} rows; tokens {self.tokens}"
            )

    def __len__(self) -> int:
        return self.n_rows

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The distinct blocks that hold this batch: what a consumer has to fetch."""
        return tuple({piece.block.ref: piece.block for piece in self._pieces()}.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and columns of this batch (object blocks count as evenly filled)."""
        return round(sum(p.block.nbytes * p.n_rows / p.block.n_rows for p in self._pieces()))

    @property
    def fetch_nbytes(self) -> int:
        """Bytes of the blocks that hold them."""
        return sum(block.nbytes for block in self.blocks)

    def select(self, columns: Iterable[str]) -> "BatchRef":
        """The named columns."""
        return self._with({name: self.columns[name] for name in self._known(columns)})

    def pop(self, columns: Iterable[str]) -> tuple["BatchRef", "BatchRef"]:
        """The named columns, and the others."""
        named = self._known(columns)
        return self.select(named), self.select(name for name in self.columns if name not in named)

    def rename(self, names: Mapping[str, str]) -> "BatchRef":
        """Columns renamed from old to new, all at once."""
        self._known(names)
        new = [replace(column, name=names.get(name, name)) for name, column in self.columns.items()]
        renamed = {column.name: column for column in new}
        if len(renamed) < len(new):
            raise ProtoError(
                f"renaming {dict(names)} would make two columns of one name; there are {[*self.columns]}"
            )
        return self._with(renamed)

    def take(self, indices: RowIndex) -> "BatchRef":
        """The rows at `indices` (positions in any order, repeats allowed, or a mask)."""
        rows = row_indices(indices, self.n_rows)
        tokens = None if self.tokens is None else tuple(self.tokens[row] for row in rows)
        taken = {name: column.take(rows) for name, column in self.columns.items()}
        return BatchRef(taken, len(rows), copy.deepcopy(self.meta_info), tokens)

    def slice(self, start: int | None = None, stop: int | None = None) -> "BatchRef":
        """Rows `start:stop`."""
        return self.take(np.arange(self.n_rows)[start:stop])

    def chunk(self, chunks: int) -> list["BatchRef"]:
        """Exactly `chunks` parts, cut as `DataProto.chunk` cuts."""
        return [self.slice(start, stop) for start, stop in pairwise(row_bounds(self.n_rows, chunks))]

    def union(self, other: "BatchRef") -> "BatchRef":
        """The columns of both.

        Raises:
            ProtoError: another number of rows, or a column of one name in different blocks (their values
                cannot be compared without fetching them).
        """
        if self.columns and other.columns and self.n_rows != other.n_rows:
            raise ProtoError(f"a union of {self.n_rows} rows with {other.n_rows} rows")
        clash = [
            name for name in self.columns.keys() & other.columns if self.columns[name] != other.columns[name]
        ]
        if clash:
            raise ProtoError(
                f"columns {sorted(clash)} are on both sides of a union; select or rename one side's"
            )
        longer = self if self.columns else other
        tokens = self.tokens if other.tokens is None else other.tokens
        meta = union_meta(self.meta_info, other.meta_info)
        return BatchRef({**self.columns, **other.columns}, longer.n_rows, meta, tokens)

    @staticmethod
    def concat(parts: Sequence["BatchRef"]) -> "BatchRef":
        """The rows of all parts, in order; errors and meta information are those of `DataProto.concat`."""
        if not parts:
            raise ProtoError("concat of no batches: there is no telling its columns")
        first = parts[0].columns
        for number, part in enumerate(parts):
            check_same_names(number, part.columns, first)
            for name, column in part.columns.items():
                check_same_kind(name, number, _kind(column), _kind(first[name]))
        columns = {
            name: replace(column, pieces=_coalesced(p for part in parts for p in part.columns[name].pieces))
            for name, column in first.items()
        }
        known = [part.tokens for part in parts if part.n_rows]
        tokens = None if None in known else tuple(n for row_tokens in known for n in row_tokens or ())
        return BatchRef(columns, sum(map(len, parts)), merge_meta([part.meta_info for part in parts]), tokens)

    def stored(self, handles: Sequence[Any], node: str | None = None) -> "BatchRef":
        """This manifest, fresh from `pack`, with the handle of value i for ordinal i."""
        columns = {}
        for name, column in self.columns.items():
            pieces = (
                replace(p, block=replace(p.block, ref=handles[p.block.ref], node=node)) for p in column.pieces
            )
            columns[name] = replace(column, pieces=tuple(pieces))
        return self._with(columns)

    def _with(self, columns: Mapping[str, ColumnRef]) -> "BatchRef":
        return BatchRef(columns, self.n_rows, copy.deepcopy(self.meta_info), self.tokens)

    def _pieces(self) -> Iterator[Piece]:
        return (piece for column in self.columns.values() for piece in column.pieces)

    def _known(self, names: Iterable[str]) -> list[str]:
        wanted = list(names)
        missing = [name for name in wanted if name not in self.columns]
        if missing:
            raise KeyError(f"no columns {missing} here; there are {[*self.columns]}")
        return wanted


def split_points(
    n_rows: int, dp_sizes: Iterable[int], start: int = 0, stop: int | None = None
) -> tuple[int, ...]:
    """Where a producer of rows `start:stop` of a batch cuts its blocks: every boundary of every dp size.

    Args:
        n_rows: rows of the whole batch.
        dp_sizes: the dp sizes of the layouts that will read it.

    Returns:
        Ascending row numbers, counted from `start`, without the two ends.
    """
    stop = n_rows if stop is None else stop
    points = {bound for dp in dp_sizes for bound in row_bounds(n_rows, dp)}
    return tuple(sorted(point - start for point in points if start < point < stop))


def pack(proto: DataProto, cuts: Sequence[int] = ()) -> tuple[BatchRef, list[np.ndarray | bytes]]:
    """The manifest of a batch cut at rows `cuts`, and the value of each block, by ordinal.

    A tensor block is an array over the column's own memory (bf16 as int16), an object block its pickle.

    Raises:
        ProtoError: a column whose values cannot travel.
    """
    n_rows = len(proto)
    ranges = list(pairwise(sorted({0, n_rows, *(cut for cut in cuts if 0 < cut < n_rows)})))
    values: list[np.ndarray | bytes] = []
    columns = {}
    for name, tensor in proto.batch.items() if proto.batch is not None else ():
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise ProtoError(f"column {name!r} is {tensor.layout}; only dense tensors travel")
        array = tensor_to_array(tensor)
        pieces = _store(values, ranges, [array[start:stop] for start, stop in ranges])
        columns[name] = ColumnRef(name, "tensor", dtype_name(tensor.dtype), tuple(tensor.shape[1:]), pieces)
    for name, column in proto.non_tensor_batch.items():
        pieces = _store(values, ranges, [_pickled(name, column[start:stop]) for start, stop in ranges])
        columns[name] = ColumnRef(name, "object", column.dtype.str, column.shape[1:], pieces)
    tokens = None
    if "attention_mask" in columns and len(columns["attention_mask"].shape) == 1:
        tokens = tuple(proto.batch["attention_mask"].sum(-1).tolist())
    return BatchRef(columns, n_rows, copy.deepcopy(proto.meta_info), tokens), values


def unpack(ref: BatchRef, values: Mapping[Any, Any]) -> DataProto:
    """The batch itself, given the value of each of its blocks; tensor columns are read-only.

    A tensor column in one block is that block's memory; one in several is one concatenation.
    """
    tensors, objects = {}, {}
    for name, column in ref.columns.items():
        if column.kind == "tensor":
            parts = [values[piece.block.ref][piece.start : piece.stop] for piece in column.pieces]
            tensors[name] = read_only(_joined(parts, empty_array(column.dtype, column.shape)), column.dtype)
        else:
            loaded = {p.block.ref: pickle.loads(values[p.block.ref]) for p in column.pieces}
            parts = [loaded[piece.block.ref][piece.start : piece.stop] for piece in column.pieces]
            objects[name] = _joined(parts, np.empty((0, *column.shape), dtype=column.dtype))
    only_rows = not ref.columns and ref.n_rows > 0
    batch = TensorDict(tensors, batch_size=[ref.n_rows]) if tensors or only_rows else None
    return DataProto(batch, objects, copy.deepcopy(ref.meta_info))


def _store(values: list, ranges: list[tuple[int, int]], cut: list) -> tuple[Piece, ...]:
    """Append a column's cut values and return the pieces that refer to them by ordinal."""
    pieces = []
    for (start, stop), value in zip(ranges, cut, strict=True):
        nbytes = value.nbytes if isinstance(value, np.ndarray) else len(value)
        pieces.append(Piece(Block(len(values), stop - start, nbytes), 0, stop - start))
        values.append(value)
    return tuple(pieces)


def _pickled(name: str, column: np.ndarray) -> bytes:
    try:
        return pickle.dumps(column, protocol=5)
    except Exception as error:
        raise ProtoError(f"object column {name!r} holds values that cannot be pickled: {error}") from error


def _joined(parts: list[np.ndarray], empty: np.ndarray) -> np.ndarray:
    if not parts:
        return empty
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _kind(column: ColumnRef) -> tuple[str, tuple[int, ...]]:
    return (column.dtype if column.kind == "tensor" else "object"), column.shape


def _coalesced(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Pieces with neighbours joined where one continues the other's rows in the same block."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.block == piece.block and last.stop == piece.start:
            joined[-1] = Piece(last.block, last.start, piece.stop)
        else:
            joined.append(piece)
    return tuple(joined)
