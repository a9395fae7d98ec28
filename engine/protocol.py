"""DataProto: a batch of named tensor columns, named object columns and meta information.

The names and semantics are those of verl's `DataProto`, with what its users ran into put right: any
number of rows can be cut into any number of parts, results share no mutable meta information with
their source, 0 rows are a batch like any other, and a name that does not exist is an error.
"""

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.utils.data import DataLoader

from rolemesh.engine.columns import (
    ProtoError,
    RowIndex,
    array_to_tensor,
    check_same_kind,
    check_same_names,
    dtype_name,
    object_column,
    row_bounds,
    row_indices,
    tensor_to_array,
    union_columns,
)
from rolemesh.engine.meta_info import merge_meta, union_meta

__all__ = [
    "DataProto",
    "DataProtoItem",
    "ProtoError",
    "pad_dataproto_to_divisor",
    "union_numpy_dict",
    "unpad_dataproto",
]


@dataclass
class DataProtoItem:
    """One row: `batch` has no batch dimension, `non_tensor_batch` holds the row's objects."""

    batch: Any = None  # TensorDict, or None where there is no tensor column
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """`b` rows of tensors [b, ...] in `batch` and of objects [b] in `non_tensor_batch`, and `meta_info`.

    Slices, chunks and selections look at the same tensor memory as their source; no method writes
    into it. `to`, `pop`, `rename`, `union` and `reorder` change which columns `self` holds, as in verl.

    Raises:
        ProtoError: columns of different length, or one name for a tensor and an object column.
    """

    batch: Any = None  # TensorDict, or None where there is no tensor column
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> Self:
        """A batch from columns; object columns may be any sequence with one value per row."""
        if num_batch_dims != 1:
            raise ProtoError(f"num_batch_dims={num_batch_dims}: a batch has one batch dimension")
        sizes = {name: tuple(tensor.shape[:1]) for name, tensor in (tensors or {}).items()}
        if len(set(sizes.values())) > 1 or () in sizes.values():
            raise ProtoError(f"tensor columns must agree in their first dimension; got {sizes}")
        objects = {
            name: values if isinstance(values, np.ndarray) else object_column(values)
            for name, values in (non_tensors or {}).items()
        }
        batch = TensorDict(dict(tensors), batch_size=next(iter(sizes.values()))) if tensors else None
        return cls(batch, objects, {} if meta_info is None else meta_info)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, torch.Tensor | np.ndarray], meta_info: dict[str, Any] | None = None
    ) -> Self:
        """A batch from one dict: tensors and arrays are told apart by their type."""
        wrong = {name: type(column).__name__ for name, column in data.items() if not _is_column(column)}
        if wrong:
            raise ProtoError(f"a column is a torch.Tensor or a numpy.ndarray; got {wrong}")
        tensors = {name: column for name, column in data.items() if isinstance(column, torch.Tensor)}
        objects = {name: column for name, column in data.items() if isinstance(column, np.ndarray)}
        return cls.from_dict(tensors, objects, meta_info)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: dict[str, Any] | None = None, num_batch_dims: int = 1
    ) -> Self:
        """The inverse of `to_tensordict`: stacks of non-tensors are object columns, single ones are meta."""
        tensors, objects, meta = {}, {}, dict(meta_info or {})
        for name in map(str, tensor_dict.keys()):
            value = tensor_dict.get(name)
            if isinstance(value, NonTensorStack):
                objects[name] = object_column(value.tolist())
            elif isinstance(value, NonTensorData):
                meta[name] = value.data
            else:
                tensors[name] = value
        return cls.from_dict(tensors, objects, meta, num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """One TensorDict: object columns as stacks of non-tensors, meta information as single non-tensors."""
        clash = sorted(self.meta_info.keys() & {*self.columns})
        if clash:
            raise ProtoError(f"{clash} name both columns and meta information")
        merged = TensorDict(self._tensors(), batch_size=[len(self)])
        for name, column in self.non_tensor_batch.items():
            merged.set(name, NonTensorStack(*(NonTensorData(value) for value in column)))
        for name, value in self.meta_info.items():
            merged[name] = NonTensorData(value, batch_size=[len(self)])
        return merged

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(column) for column in self.non_tensor_batch.values()), 0)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns, tensors first."""
        return tuple(self._columns())

    def check_consistency(self) -> None:
        """Raise ProtoError where columns disagree in length, are no arrays, or share a name."""
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise ProtoError(f"batch dimensions {list(self.batch.batch_size)}: a batch has exactly one")
        for name, column in self.non_tensor_batch.items():
            if not isinstance(column, np.ndarray):
                raise ProtoError(f"object column {name!r} is a {type(column).__name__}, not a numpy.ndarray")
            if column.ndim == 0 or len(column) != len(self):
                raise ProtoError(
                    f"object column {name!r} has shape {column.shape}; the batch has {len(self)} rows"
                )
        twice = sorted(self._tensors().keys() & self.non_tensor_batch.keys())
        if twice:
            raise ProtoError(f"{twice} name both tensor and object columns")

    def print_size(self, prefix: str = "") -> None:
        """Print the bytes of tensors and of object arrays (pointers only) in GiB."""
        tensor_bytes = sum(tensor.nbytes for tensor in self._tensors().values())
        array_bytes = sum(column.nbytes for column in self.non_tensor_batch.values())
        print(
            f"{prefix + ', ' if prefix else ''}Size of tensordict: {tensor_bytes / 1024**3} GB, "
            f"size of non_tensor_batch: {array_bytes / 1024**3} GB"
        )

    def to(self, device: torch.device | str) -> Self:
        """Move the tensor columns to `device`, in `self`."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # Rows

    def __getitem__(self, item: int | slice | RowIndex) -> "Self | DataProtoItem":
        """A row for an integer; a batch for a slice, a list, an array, a tensor or a boolean mask."""
        if isinstance(item, int | np.integer):
            row = int(row_indices([item], len(self))[0])
            return DataProtoItem(
                None if self.batch is None else self.batch[row],
                {name: column[row] for name, column in self.non_tensor_batch.items()},
                copy.deepcopy(self.meta_info),
            )
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list | np.ndarray | torch.Tensor):
            return self.select_idxs(item)
        raise TypeError(
            f"a batch is indexed by int, slice, list, array, tensor or mask, not {type(item).__name__}"
        )

    def select_idxs(self, idxs: RowIndex) -> Self:
        """The rows at `idxs` (positions in any order, or a mask [b]), copied."""
        rows = row_indices(idxs, len(self))
        index = torch.from_numpy(rows)
        return self._with_rows(
            len(rows), lambda tensor: tensor[index.to(tensor.device)], lambda column: column[rows]
        )

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Rows `start:end:step`, sharing tensor memory with `self` where the step is positive."""
        rows = range(len(self))[start:end:step]
        if rows.step < 0:
            return self.select_idxs(list(rows))
        cut = np.s_[start:end:step]
        return self._with_rows(len(rows), lambda tensor: tensor[cut], lambda column: column[cut])

    def chunk(self, chunks: int) -> list[Self]:
        """Exactly `chunks` parts whose sizes differ by at most one row (`numpy.array_split`)."""
        bounds = row_bounds(len(self), chunks)
        return [self.slice(start, stop) for start, stop in pairwise(bounds)]

    def split(self, split_size: int) -> list[Self]:
        """Parts of `split_size` rows; the last one holds what is left."""
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def reorder(self, indices: RowIndex) -> None:
        """Put the rows of `self` into the order `indices`, all columns alike."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Every row `repeat_times` times: 0 0 1 1 when interleaved, else 0 1 0 1."""
        rows = np.arange(len(self))
        return self.select_idxs(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor) -> Self:
        """Row i `repeat_times[i]` times in a row; `repeat_times` [b]."""
        times = np.asarray(repeat_times, dtype=np.int64)
        if times.shape != (len(self),):
            raise ProtoError(f"repeat_times has shape {times.shape}; the batch has {len(self)} rows")
        return self.select_idxs(np.repeat(np.arange(len(self)), times))

    def unfold_column_chunks(self, n_split: int, split_keys: Iterable[str] | None = None) -> Self:
        """Cut `split_keys` [b, n_split * m, ...] into [b * n_split, m, ...]; repeat the other columns."""
        columns = self.repeat(n_split)._columns()
        for name in self._known(split_keys or (), columns):
            rows, width, *rest = self._columns()[name].shape
            if width % n_split:
                raise ProtoError(f"column {name!r} is {width} wide, which does not cut into {n_split} chunks")
            columns[name] = self._columns()[name].reshape(rows * n_split, width // n_split, *rest)
        return type(self).from_single_dict(columns, copy.deepcopy(self.meta_info))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Mini-batches of `epochs` passes, by torch's DataLoader (`dataloader_kwargs`: shuffle, ...).

        The last mini-batch of a pass holds the rows that are left, unless `drop_last` is set.
        """
        if len(self) == 0:
            return
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader: DataLoader = DataLoader(
            range(len(self)),  # type: ignore[arg-type]
            batch_size=mini_batch_size,
            collate_fn=self.select_idxs,
            generator=generator,
            **(dataloader_kwargs or {}),
        )
        for _ in range(epochs):
            yield from loader

    # Columns

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """The named columns and meta information (None: all), sharing column memory unless `deepcopy`."""
        tensors, objects = self._tensors(), self.non_tensor_batch
        tensors = {name: tensors[name] for name in self._known(batch_keys, tensors)}
        objects = {name: objects[name] for name in self._known(non_tensor_batch_keys, objects)}
        if deepcopy:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            objects = copy.deepcopy(objects)
        meta = {name: self.meta_info[name] for name in self._known(meta_info_keys, self.meta_info)}
        return type(self)(self._batch(tensors), objects, copy.deepcopy(meta))

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Self:
        """Take the named columns and meta information (None: nothing) out of `self`."""
        named = (list(batch_keys or ()), list(non_tensor_batch_keys or ()), list(meta_info_keys or ()))
        popped = self.select(*named)
        self.batch = self._batch({k: v for k, v in self._tensors().items() if k not in named[0]})
        self.non_tensor_batch = {k: v for k, v in self.non_tensor_batch.items() if k not in named[1]}
        self.meta_info = {k: v for k, v in self.meta_info.items() if k not in named[2]}
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Rename columns of `self`, all at once (two names can be swapped)."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise ProtoError(f"{len(old)} columns {old} cannot take {len(new)} names {new}")
        names = dict(zip(self._known(old, self.columns), new, strict=True))
        after = [names.get(name, name) for name in self.columns]
        twice = sorted({name for name in after if after.count(name) > 1})
        if twice:
            raise ProtoError(f"renaming {names} would make two columns of each of {twice}")
        self.batch = self._batch({names.get(k, k): v for k, v in self._tensors().items()})
        self.non_tensor_batch = {names.get(k, k): v for k, v in self.non_tensor_batch.items()}
        return self

    def union(self, other: "DataProto") -> Self:
        """Add the columns and meta information of `other` to `self`.

        Raises:
            ProtoError: another number of rows, or a column or meta value of the same name that is not equal.
        """
        if self.columns and other.columns and len(self) != len(other):
            raise ProtoError(f"a union of {len(self)} rows with {len(other)} rows")
        batch = other.batch if self.batch is None else self.batch
        if batch is not None:
            tensors = union_columns(self._tensors(), other._tensors())
            self.batch = TensorDict(tensors, batch_size=batch.batch_size)
        self.non_tensor_batch = union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        self.meta_info = union_meta(self.meta_info, other.meta_info)
        self.check_consistency()
        return self

    @staticmethod
    def concat(data: Sequence["DataProto"]) -> "DataProto":
        """The rows of all parts, in order; `merge_meta` says what becomes of the meta information.

        Raises:
            ProtoError: no part, parts with other columns, or a column whose dtype or row shape differs.
        """
        if not data:
            raise ProtoError("concat of no batches: there is no telling its columns")
        parts = [part._columns() for part in data]
        for number, part in enumerate(parts):
            check_same_names(number, part, parts[0])
            for name, column in part.items():
                check_same_kind(name, number, _kind(column), _kind(parts[0][name]))
        tensors = {name: torch.cat([part._tensors()[name] for part in data]) for name in data[0]._tensors()}
        objects = {name: np.concatenate([part[name] for part in parts]) for name in data[0].non_tensor_batch}
        batch = None
        if data[0].batch is not None:
            batch = TensorDict(tensors, batch_size=[sum(map(len, data))])
        return type(data[0])(batch, objects, merge_meta([part.meta_info for part in data]))

    # Storage

    def __getstate__(self) -> tuple:
        """Plain arrays: the pickle of a slice holds the slice's bytes, not its source's."""
        tensors = {k: (tensor_to_array(v), dtype_name(v.dtype)) for k, v in self._tensors().items()}
        return tensors, self.batch is not None, len(self), self.non_tensor_batch, self.meta_info

    def __setstate__(self, state: tuple) -> None:
        arrays, has_batch, n_rows, self.non_tensor_batch, self.meta_info = state
        tensors = {name: array_to_tensor(array, dtype) for name, (array, dtype) in arrays.items()}
        self.batch = TensorDict(tensors, batch_size=[n_rows]) if has_batch else None

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write a file that `load_from_disk` reads without running code from it.

        Raises:
            ProtoError: an object column or meta value of a type that such a file cannot hold.
        """
        plain = {"non_tensor_batch": self.non_tensor_batch, "meta_info": self.meta_info}
        trial = io.BytesIO()
        torch.save(plain, trial)
        trial.seek(0)
        _safe_load(trial, f"cannot be saved to {filepath}")
        # clone: a view would bring the whole storage that it looks into.
        tensors = {name: tensor.clone() for name, tensor in self._tensors().items()}
        torch.save(
            plain | {"tensors": tensors, "n_rows": None if self.batch is None else len(self)}, filepath
        )

    @staticmethod
    def load_from_disk(filepath: str | Path) -> "DataProto":
        """The batch that `save_to_disk` wrote."""
        state = _safe_load(filepath, f"are in {filepath}, which is not a file that save_to_disk wrote")
        n_rows = state["n_rows"]
        batch = None if n_rows is None else TensorDict(state["tensors"], batch_size=[n_rows])
        return DataProto(batch, state["non_tensor_batch"], state["meta_info"])

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.batch is None else self.batch.to_dict()

    def _columns(self) -> dict[str, torch.Tensor | np.ndarray]:
        return {**self._tensors(), **self.non_tensor_batch}

    def _batch(self, tensors: dict[str, torch.Tensor]) -> TensorDict | None:
        """`tensors` as this batch's TensorDict: the rows are counted even with no tensor column left."""
        return None if self.batch is None else TensorDict(tensors, batch_size=self.batch.batch_size)

    def _with_rows(
        self,
        n_rows: int,
        of_tensor: Callable[[torch.Tensor], torch.Tensor],
        of_array: Callable[[np.ndarray], np.ndarray],
    ) -> Self:
        """A batch of `n_rows` rows: each column through its function, meta information copied."""
        batch = None
        if self.batch is not None:
            rows = {name: of_tensor(tensor) for name, tensor in self._tensors().items()}
            batch = TensorDict(rows, batch_size=[n_rows])
        objects = {name: of_array(column) for name, column in self.non_tensor_batch.items()}
        return type(self)(batch, objects, copy.deepcopy(self.meta_info))

    @staticmethod
    def _known(names: Iterable[str] | None, present: Iterable[str]) -> list[str]:
        """`names` as a list (None: all of `present`); KeyError for one that is not present."""
        present = list(present)
        wanted = present if names is None else list(names)
        missing = [name for name in wanted if name not in present]
        if missing:
            raise KeyError(f"no {missing} here; there are {present}")
        return wanted


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """`data` with rows from its start again at the end until `size_divisor` divides it, and their number."""
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    rows = np.arange(len(data) + pad_size) % len(data)
    return data.select_idxs(rows), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """`data` without its last `pad_size` rows."""
    return data.slice(0, len(data) - pad_size) if pad_size else data


def union_numpy_dict(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Both dicts in one; ProtoError where a name has two different arrays (NaN equals NaN)."""
    return union_columns(mine, theirs)


def _is_column(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _kind(column: torch.Tensor | np.ndarray) -> tuple[str, tuple[int, ...]]:
    """What must agree for a concat: type and shape per row (numpy widens string and number arrays itself)."""
    kind = dtype_name(column.dtype) if isinstance(column, torch.Tensor) else "object"
    return kind, tuple(column.shape[1:])


def _safe_load(source: Any, refused: str) -> Any:
    """torch.load of tensors, arrays, containers and scalars alone: nothing in the file is executed."""
    array_types: list[Any] = [np.ndarray, np.dtype, *(type(np.dtype(code)) for code in np.typecodes["All"])]
    array_types += [np.empty(0).__reduce__()[0], np.float32(0).__reduce__()[0]]
    try:
        with torch.serialization.safe_globals(array_types):
            return torch.load(source, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ProtoError(f"objects of this kind {refused}: {str(error).splitlines()[0]}") from error
