"""What one column of a batch needs: building, comparing, indexing, and travelling as plain arrays."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

RowIndex = Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor

# numpy has no such types: these travel as integers of the same width.
_INTEGER_TWIN = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


class ProtoError(ValueError, AssertionError):
    """Columns or meta information that do not fit together (verl raises AssertionError in these places)."""


def object_column(values: Iterable[Any]) -> np.ndarray:
    """One object per row, [b]; rows that are lists of equal length stay lists, not a second axis."""
    values = list(values)
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def row_bounds(n_rows: int, parts: int) -> list[int]:
    """The `parts + 1` row boundaries of an even cut; the first `n_rows % parts` parts hold one row more.

    The sizes are those of `numpy.array_split`: 206 rows over 4 are [52, 52, 51, 51].
    """
    if parts < 1:
        raise ValueError(f"cannot cut {n_rows} rows into {parts} parts; ask for at least 1")
    size, extra = divmod(n_rows, parts)
    return [part * size + min(part, extra) for part in range(parts + 1)]


def row_indices(index: RowIndex, n_rows: int) -> np.ndarray:
    """Row numbers [m] int64 in [0, n_rows) from positions (negative: from the end) or a mask [n_rows]."""
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu().numpy()
    rows = np.asarray(index)
    if rows.dtype == bool:
        if rows.shape != (n_rows,):
            raise IndexError(f"a mask of shape {list(rows.shape)} cannot select from {n_rows} rows")
        return np.flatnonzero(rows)
    if rows.size == 0:
        return np.empty(0, dtype=np.int64)
    if rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
        raise IndexError(
            f"rows are chosen by a 1-d list of integers or a mask, not {rows.dtype} {rows.shape}"
        )
    rows = rows.astype(np.int64)
    if rows.min() < -n_rows or rows.max() >= n_rows:
        raise IndexError(f"row numbers from {rows.min()} to {rows.max()} in a batch of {n_rows} rows")
    return np.where(rows < 0, rows + n_rows, rows)


def values_equal(left: Any, right: Any) -> bool:
    """Deep equality of tensors, arrays, containers and scalars in which NaN equals NaN."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return _tensors_equal(left, right)
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        if left.dtype != object:
            return np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
        return all(map(values_equal, left.flat, right.flat))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(values_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(map(values_equal, left, right))
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right):
        return True
    return type(left) is type(right) and bool(left == right)


def _tensors_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if not left.is_floating_point():
        return torch.equal(left, right)
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def union_columns(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Both sets of columns in one; ProtoError where a name has two different columns (NaN equals NaN)."""
    unequal = [name for name in theirs if name in mine and not values_equal(mine[name], theirs[name])]
    if unequal:
        raise ProtoError(f"columns {unequal} are on both sides of a union with different values")
    return {**mine, **theirs}


def check_same_kind(name: str, part: int, kind: tuple, first: tuple) -> None:
    """Raise ProtoError unless part `part` of a concat has the first part's kind: (type, shape per row)."""
    if kind != first:
        one, other = (f"{column} {list(shape)} per row" for column, shape in (first, kind))
        raise ProtoError(f"column {name!r} is {one} in part 0 and {other} in part {part} of a concat")


def check_same_names(part: int, names: Iterable[str], first: Iterable[str]) -> None:
    """Raise ProtoError unless part number `part` of a concat has the first part's columns."""
    odd = sorted(set(names) ^ set(first))
    if odd:
        raise ProtoError(f"columns {odd} are in only one of part 0 and part {part} of a concat")


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def tensor_to_array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's values as a contiguous CPU array, without a copy where they are that already."""
    plain = tensor.as_subclass(torch.Tensor).detach().cpu().contiguous()
    twin = _INTEGER_TWIN.get(plain.dtype)
    return (plain if twin is None else plain.view(twin)).numpy()


def array_to_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """The inverse of `tensor_to_array`, over the array's own memory; `dtype` is the tensor's name for it."""
    target: torch.dtype = getattr(torch, dtype)
    tensor = torch.from_numpy(array)
    return tensor.view(target) if target in _INTEGER_TWIN else tensor


def empty_array(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """What `tensor_to_array` gives for 0 rows of such a column."""
    return tensor_to_array(torch.empty((0, *shape), dtype=getattr(torch, dtype)))
