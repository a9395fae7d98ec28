"""A model's states in host memory while other roles use its device.

Storages are emptied and filled again, so that every view of them (parameters, gradients, the optimizer's
shards) stays what it is. Gradients are not kept: an update starts with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, UntypedStorage

Use = Literal["weights", "states", "training"]
"""What an operation needs: weights; optimizer state beside them; room for gradients too, and changes both."""
Kind = Literal["weights", "optimizer", "gradients"]

_NEEDS: Mapping[Use, tuple[Kind, ...]] = {
    "weights": ("weights",),
    "states": ("weights", "optimizer"),
    "training": ("weights", "optimizer", "gradients"),
}


class Offload:
    """Which states of a model are on its device: all at first, none after `rest` but inside of `use`.

    `tensors` gives those of each kind that there are now, weights first: memory that kinds share counts for
    the first. The host's copies stay there, pinned where the device is a GPU.
    """

    def __init__(self, device: torch.device, tensors: Callable[[], Mapping[Kind, Iterable[Tensor]]]) -> None:
        self._device, self._tensors = device, tensors
        self._away: dict[Kind, list[tuple[UntypedStorage, int]]] = {}
        self._host: dict[int, Tensor] = {}
        self._current: set[int] = set()  # storages whose copy on the host is as they are
        self._uses = 0

    @contextmanager
    def use(self, what: Use) -> Iterator[None]:
        """What `what` needs is on the device inside; a use within another brings what that lacks."""
        for kind in _NEEDS[what]:
            self._bring(kind)
        if what == "training":
            self._current.clear()
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            if self._uses == 0:
                self.rest()

    def rest(self) -> None:
        """Free the device; what the host does not hold yet is copied there."""
        seen: set[int] = set()
        for kind, tensors in self._tensors().items():
            storages = {storage._cdata: storage for x in tensors for storage in [x.untyped_storage()]}
            mine = {key: storage for key, storage in storages.items() if key not in seen}
            seen |= set(mine)
            if kind in self._away:
                continue
            if kind != "gradients":
                for key in set(mine) - self._current:
                    self._copy_out(mine[key])
            self._away[kind] = [(storage, storage.nbytes()) for storage in mine.values()]
            for storage in mine.values():
                storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # other processes on the device are to have it

    def _bring(self, kind: Kind) -> None:
        for storage, n_bytes in self._away.pop(kind, []):
            storage.resize_(n_bytes)
            if kind != "gradients":
                _bytes_of(storage).copy_(self._host[storage._cdata], non_blocking=True)

    def _copy_out(self, storage: UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._host or self._host[key].numel() != storage.nbytes():
            pinned = self._device.type == "cuda"
            self._host[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
        self._host[key].copy_(_bytes_of(storage))
        self._current.add(key)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
