"""Weights by handle: (name, tensor) pairs that one worker group streams out and another takes in.

A registered method that is a generator of such pairs is stored tensor by tensor, so its process never holds
more than one of them beyond its own; the caller gets a `NamedTensorsRef`. A method that is given one iterates
`NamedTensors`: each tensor is brought when its turn comes, as a view of the stored memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rolemesh.engine.read_only import read_only


@dataclass(frozen=True)
class NamedTensor:
    """Where one tensor is stored. `dtype` is torch's name for it; the stored array may be its bytes."""

    name: str
    dtype: str
    nbytes: int
    ref: Any


@dataclass(frozen=True)
class NamedTensorsRef:
    """Handles of named tensors, in the order they were produced; names are unique."""

    tensors: tuple[NamedTensor, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @staticmethod
    def merge(parts: Sequence[NamedTensorsRef]) -> NamedTensorsRef:
        """All tensors of several ranks; of a name that several ranks gave, the first."""
        first: dict[str, NamedTensor] = {}
        for part in parts:
            for tensor in part.tensors:
                first.setdefault(tensor.name, tensor)
        return NamedTensorsRef(tuple(first.values()))


@dataclass(frozen=True)
class NamedTensors:
    """The tensors of a handle, brought one at a time; read-only."""

    handle: NamedTensorsRef
    fetch: Callable[[Any], np.ndarray]  # from a stored ref

    def __len__(self) -> int:
        return len(self.handle.tensors)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for stored in self.handle.tensors:
            yield stored.name, read_only(self.fetch(stored.ref), stored.dtype)
