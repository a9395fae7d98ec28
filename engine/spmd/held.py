"""Batches and tensors of a run without Ray: a block is held by its handle, and goes where the handle goes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rolemesh.engine.batch_ref import BatchRef, pack, split_points, unpack
from rolemesh.engine.future import DataProtoFuture
from rolemesh.engine.protocol import DataProto


class Held:
    """A stored value. Pickled with a message it arrives as a copy; two handles are never equal."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def put_batch(proto: DataProto, dp_sizes: Iterable[int] = (1,)) -> BatchRef:
    """Store a batch here, in blocks that consumers of these `dp` sizes take whole."""
    return stored(proto, split_points(len(proto), dp_sizes))


def stored(proto: DataProto, cuts: Iterable[int] = ()) -> BatchRef:
    """Store a batch here, in blocks cut at these rows."""
    manifest, blocks = pack(proto, tuple(cuts))
    return manifest.stored([Held(block) for block in blocks])


def fetch_batch(ref: BatchRef, timeout_s: float = 0.0) -> DataProto:
    """The batch of a handle that is here, read-only; nothing is waited for."""
    return unpack(ref, {block.ref: block.ref.value for block in ref.blocks})


def given(value: Any) -> Any:
    """A future's value where `value` is one, also inside lists and tuples; batches as handles."""
    if isinstance(value, DataProtoFuture):
        return value.ref(timeout=0)
    if isinstance(value, DataProto):
        return stored(value)
    if isinstance(value, list | tuple) and any(isinstance(v, DataProto | DataProtoFuture) for v in value):
        return type(value)(given(inner) for inner in value)
    return value
