"""A worker group whose one rank lives in this process: `from local_group import LocalGroup`."""

import concurrent.futures
import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from rolemesh.engine.batch_ref import BatchRef, pack, unpack
from rolemesh.engine.future import DataProtoFuture, Outcome, RankSpan
from rolemesh.engine.parts import Part
from rolemesh.engine.protocol import DataProto
from rolemesh.parallel.weights import export_hf

_BLOCKS: dict[int, Any] = {}
_NUMBERS = itertools.count()


def put(data: DataProto) -> BatchRef:
    """Keep a batch here; its handle."""
    manifest, blocks = pack(data)
    handles = [next(_NUMBERS) for _ in blocks]
    _BLOCKS.update(zip(handles, blocks, strict=True))
    return manifest.stored(handles)


def fetch(ref: BatchRef, timeout_s: float = 0.0) -> DataProto:
    """The batch of a handle, read-only."""
    return unpack(ref, {block.ref: _BLOCKS[block.ref] for block in ref.blocks})


class LocalGroup:
    """Calls a worker's methods here, at once; batches go in and out as handles, as with a Ray group."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.layout, self.world_size = worker, worker.layout, 1
        self.resource_pool = SimpleNamespace(name="here")

    def ask(self, method: str, *args: Any, ranks: Any = None, timeout_s: float = 0.0) -> list[Any]:
        return [getattr(self.worker, method)(*args)]

    def __getattr__(self, method: str) -> Any:
        own = {"export_weights": self._export, "load_weights": self._load}
        does = own.get(method) or getattr(self.worker, method)

        def call(*args: Any, blocking: bool = True, rows: Any = None, **kwargs: Any) -> Any:
            start_s = time.time()
            value = does(*(_taken(arg, rows) for arg in args), **kwargs)
            source: concurrent.futures.Future[Outcome] = concurrent.futures.Future()
            source.set_result(Outcome(_given(value), (RankSpan(0, start_s, time.time(), 0),)))
            future = DataProtoFuture(source, name=method, fetch=fetch, timeout_s=60.0)
            return future.get() if blocking else future

        return call

    def _export(self) -> Iterator[tuple[str, Tensor]]:
        """Whole: there are no other processes to meet."""
        model = self.worker.model
        with model.use("weights"):
            exported = export_hf(model.weights(), model.shape, model.layout, model.groups)
            yield from [(name, tensor.clone()) for name, tensor in exported]

    def _load(self, weights: Any, version: int) -> None:
        self.worker.engine.load_weights(weights)
        self.worker.version = version


def _taken(value: Any, rows: Any) -> Any:
    if isinstance(value, DataProtoFuture):
        value = value.ref()
    if not isinstance(value, BatchRef):
        return value
    data = fetch(value)
    return data if rows is None else data.select_idxs(list(rows[0]))


def _given(value: Any) -> Any:
    if isinstance(value, DataProto):
        return put(value)
    values = list(value) if isinstance(value, Iterator) else [value]
    if not isinstance(values[0], Part):
        return values
    rows = [row for part in values for row in part.rows]
    return put(DataProto.concat([part.data for part in values]).select_idxs(np.argsort(rows)))
