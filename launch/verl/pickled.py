"""Tensors of a file that `torch.save` wrote on one rank, read one at a time; runs nothing that is in it.

The file's pickle may name tensors and torch's descriptions of distributed ones. The latter come as plain
records, whatever torch's version wrote them, so no process group is needed either.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rolemesh.parallel.checkpoint_error import CheckpointError

_LOCAL_HEADER_BYTES = 30


class Record:
    """An object of torch.distributed: `args` that it was made with, and its attributes."""

    def __new__(cls, *args: Any) -> Record:
        made = super().__new__(cls)
        made.__dict__["args"] = args
        return made

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            self.__dict__.update(part or {})

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True)
class Stored:
    """A tensor in the file: `key` of its storage, and how it lies there, in elements."""

    key: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One rank's part of a tensor of `shape`: cut along `dim` (None: whole), the `index`-th part."""

    local: Stored
    shape: tuple[int, ...]
    dim: int | None
    index: int


class RankFile:
    """What one rank has saved, by name: a `Part`, or a `Stored` tensor that says nothing of other ranks.

    Raises CheckpointError for a file that is truncated, damaged, or holds anything but tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self._at = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                state = _Reader(io.BytesIO(archive.read(self._at["data.pkl"]))).load()
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{path} holds more than tensors: {error}; it was not loaded") from error
        except Exception as error:  # whatever cut or damaged bytes make of it
            raise CheckpointError(f"{path} is truncated or damaged: {error}") from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{path} is no state_dict but a {type(state).__name__}")
        self.tensors: dict[str, Part | Stored] = {name: self._part(name, x) for name, x in state.items()}
        for name, found in self.tensors.items():
            self._check(name, found.local if isinstance(found, Part) else found)

    def read(self, stored: Stored) -> Tensor:
        """The tensor's own numbers; nothing else of the file is held."""
        n_elements = _span(stored)
        if n_elements == 0:
            return torch.empty(stored.shape, dtype=stored.dtype)
        with self.path.open("rb") as file:
            file.seek(self._start(file, stored.key) + stored.offset * stored.dtype.itemsize)
            data = bytearray(n_elements * stored.dtype.itemsize)
            if file.readinto(data) != len(data):
                raise CheckpointError(f"{self.path} is truncated")
        return torch.frombuffer(data, dtype=stored.dtype).as_strided(stored.shape, stored.stride)

    def _start(self, file: Any, key: str) -> int:
        """Where a storage's bytes begin: after a header that only the file itself tells the length of."""
        header = self._at[f"data/{key}"].header_offset
        file.seek(header)
        text = file.read(_LOCAL_HEADER_BYTES)
        n_name, n_extra = (int.from_bytes(text[at : at + 2], "little") for at in (26, 28))
        return int(header + _LOCAL_HEADER_BYTES + n_name + n_extra)

    def _check(self, name: str, stored: Stored) -> None:
        info = self._at.get(f"data/{stored.key}")
        n_bytes = (stored.offset + _span(stored)) * stored.dtype.itemsize if _span(stored) else 0
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size < n_bytes:
            raise CheckpointError(f"{self.path} is damaged: the numbers of {name} are not all there")

    def _part(self, name: str, value: Any) -> Part | Stored:
        if isinstance(value, Stored):
            return value
        spec = getattr(value, "_spec", None)
        local = getattr(value, "_local_tensor", None)
        if spec is None or not isinstance(local, Stored):
            raise CheckpointError(f"{self.path}: {name} is a {type(value).__name__}, not a DTensor or tensor")
        cuts = [(axis, place) for axis, place in enumerate(spec.placements) if _kind(place) != "Replicate"]
        if len(cuts) > 1 or any(_kind(place) != "Shard" for _, place in cuts):
            kinds = ", ".join(_kind(place) for place in spec.placements)
            raise CheckpointError(
                f"{self.path}: {name} is placed as ({kinds}); Shard over one axis, and Replicate, are read"
            )
        shape = tuple(value.shape)
        if not cuts:
            return Part(local, shape, None, 0)
        (axis, place), coordinate = cuts[0], getattr(spec.mesh, "_coordinate_on_dim", None)
        if coordinate is None:
            raise CheckpointError(f"{self.path}: {name} does not say which part of the whole it is")
        return Part(local, shape, place.dim % len(shape), coordinate[axis])


def _kind(record: Any) -> str:
    return type(record).__name__


def _span(stored: Stored) -> int:
    """Elements from the tensor's first to its last, both counted."""
    if math.prod(stored.shape) == 0:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(stored.shape, stored.stride, strict=True))


def _stored(storage: tuple[str, torch.dtype], offset: int, shape: Any, stride: Any, *_: Any) -> Stored:
    key, dtype = storage
    return Stored(key, dtype, offset, tuple(shape), tuple(stride))


def _wrapper(_: type, __: torch.dtype, shape: Any, *___: Any) -> Any:
    return tuple(shape)


def _from_type(make: Any, kind: type, args: tuple[Any, ...], state: Any) -> Any:
    """A tensor of a class of its own: a record with the attributes it had, and its shape."""
    made = make(*args)
    if not issubclass(kind, Record):
        return made
    record = kind()
    record.__setstate__(state)
    record.__dict__["shape"] = made
    return record


_KNOWN = {
    "collections.OrderedDict": OrderedDict,
    "torch._utils._rebuild_tensor_v2": _stored,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.serialization._get_layout": str,
    "torch.device": lambda *of: of,
    "torch.Size": tuple,
    "torch.Tensor": object,
    "torch.nn.parameter.Parameter": object,
}


_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}


class _Reader(pickle.Unpickler):
    """Knows the names above, torch's dtypes, and torch.distributed's classes as records."""

    def find_class(self, module: str, name: str) -> Any:
        if (found := _KNOWN.get(f"{module}.{name}")) is not None:
            return found
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module.startswith("torch.distributed.") and name.isidentifier():
            return type(name, (Record,), {})
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> tuple[str, torch.dtype]:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"a storage of {dtype}")
        return key, dtype
