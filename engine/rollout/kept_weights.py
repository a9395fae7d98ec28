"""A rank's part of a model's weights in host memory, where the processes of its engine read it in place.

The rank keeps it from one transfer to the next: an engine that takes a dead one's place reads the same again.
The memory has no name that could be left behind; it goes with the rank's process.
"""

from __future__ import annotations

import mmap
import os
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import psutil
import torch
from torch import Tensor

from rolemesh.engine.rollout.sampling import RolloutError

if TYPE_CHECKING:  # vLLM's processes need not import what it needs
    from rolemesh.parallel.weights.transfer_sides import EngineSide

_ALIGN_BYTES = 8


class KeptTensor(NamedTuple):
    """`part` of the Hugging Face tensor `name` [shape], `start` bytes into the memory."""

    name: str
    shape: tuple[int, ...]
    part: tuple[slice, ...]
    dtype: torch.dtype
    start: int

    @property
    def part_shape(self) -> tuple[int, ...]:
        return tuple(side.stop - side.start for side in self.part)

    @property
    def n_bytes(self) -> int:
        return prod(self.part_shape) * self.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """The part, in the memory that holds it."""
        numbers = memory[self.start : self.start + self.n_bytes].view(self.dtype)
        return numbers.view(self.part_shape)


@dataclass(frozen=True)
class KeptWeights:
    """A rank's part, as other processes of its machine read it: numbers up to `index`, then what they are."""

    path: str
    n_bytes: int
    index: int

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) pairs in the model's order, for vLLM's `load_weights`. Not to be
        written.

        A tensor has its whole shape, since vLLM cuts it by its own rules, but only the rank's part is filled
        in: the rest is never read, and so takes no memory. One that is kept whole is not copied.

        Raises RolloutError where the memory is not to be had.
        """
        try:
            with open(self.path, "r+b") as file:
                memory = torch.frombuffer(mmap.mmap(file.fileno(), self.n_bytes), dtype=torch.uint8)
        except OSError as error:
            raise RolloutError(f"cannot open the weights that a rollout rank keeps: {error}") from error
        kept: list[KeptTensor] = pickle.loads(memory[self.index :].numpy().tobytes())
        for tensor in kept:
            own = tensor.view(memory)
            if own.shape != tensor.shape:
                part, own = own, torch.empty(tensor.shape, dtype=tensor.dtype)
                own[tensor.part] = part
            yield tensor.name, own


class WeightKeeper:
    """The memory of a tp rank's part of a model.

    Raises RolloutError where the machine has not so much.
    """

    def __init__(self, side: EngineSide, tp_rank: int) -> None:
        end = 0
        self._kept: dict[str, KeptTensor] = {}
        for tensor, part in side.parts(tp_rank):
            kept = KeptTensor(tensor.name, tensor.shape, part, side.dtype_of(tensor.name), end)
            end += -(-kept.n_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
            self._kept[tensor.name] = kept
        index = pickle.dumps(list(self._kept.values()))
        size = end + len(index)
        if size > (free := psutil.virtual_memory().available):
            raise RolloutError(
                f"tp rank {tp_rank} of {side} keeps {size / 2**30:.2f} GiB of weights in host memory for its "
                f"engine, {free / 2**30:.2f} GiB are free: use a larger rollout.layout.tp, or fewer replicas"
            )
        file = os.memfd_create("rolemesh-weights")
        weakref.finalize(self, os.close, file)
        os.posix_fallocate(file, 0, size)  # now: a later write that finds no room would kill
        self._memory = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        self._memory[end:] = torch.frombuffer(bytearray(index), dtype=torch.uint8)
        self.weights = KeptWeights(f"/proc/{os.getpid()}/fd/{file}", size, end)

    @property
    def n_bytes(self) -> int:
        """Of all parts, without the gaps between them."""
        return sum(tensor.n_bytes for tensor in self._kept.values())

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Where the rank's part of a tensor lies, to be written in place."""
        return self._kept[name].view(self._memory)
