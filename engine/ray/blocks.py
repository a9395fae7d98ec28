"""Batches in Ray's object store: a stored block is one object, read where it lies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray

from rolemesh.engine.batch_ref import BatchRef, pack, split_points, unpack
from rolemesh.engine.errors import CallTimeout
from rolemesh.engine.future import DataProtoFuture
from rolemesh.engine.protocol import DataProto

FETCH_TIMEOUT_S = 600.0


def put_batch(proto: DataProto, dp_sizes: Iterable[int]) -> BatchRef:
    """Store a batch, one copy, in blocks that consumers of these `dp` sizes fetch whole."""
    manifest, blocks = pack(proto, split_points(len(proto), dp_sizes))
    return manifest.stored([ray.put(block) for block in blocks], ray.get_runtime_context().get_node_id())


def fetch_batch(ref: BatchRef, timeout_s: float = FETCH_TIMEOUT_S) -> DataProto:
    """The batch of a handle, read-only; columns of one block are views of the object store.

    Raises CallTimeout when its blocks are not here after `timeout_s` seconds.
    """
    handles = [block.ref for block in ref.blocks]
    return unpack(ref, dict(zip(handles, _get(handles, timeout_s, ref.fetch_nbytes), strict=True)))


def batch_future(proto: DataProto, dp_sizes: Iterable[int] = (1,)) -> DataProtoFuture:
    """A batch of the driver's own as a handle: stored once, however many calls it is given to."""
    ref = put_batch(proto, dp_sizes)
    return DataProtoFuture.completed(ref, name="batch", fetch=fetch_batch, timeout_s=FETCH_TIMEOUT_S)


def _get(handles: list[Any], timeout_s: float, nbytes: int) -> list[Any]:
    try:
        return ray.get(handles, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        size = f"{nbytes / 2**20:.1f} MiB"
        raise CallTimeout(f"{len(handles)} blocks ({size}) did not arrive within {timeout_s:g} s") from error
