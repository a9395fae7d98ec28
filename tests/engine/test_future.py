"""Futures over plain values: order, chaining, parts without data, limits."""

import asyncio
import concurrent.futures
import gc
import threading
import time
import weakref

import pytest
import torch

from rolemesh.engine.batch_ref import BatchRef, pack, unpack
from rolemesh.engine.errors import CallTimeout
from rolemesh.engine.future import DataProtoFuture, Outcome, as_completed
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.ray.queue import Call, PoolQueue


class Kept:
    """A store whose every fetch is noted: handles are the blocks themselves."""

    def __init__(self) -> None:
        self.fetched: list[tuple[tuple[str, ...], int]] = []
        self.values: list = []

    def put(self, proto: DataProto) -> BatchRef:
        manifest, blocks = pack(proto)
        first = len(self.values)
        self.values.extend(blocks)
        return manifest.stored(list(range(first, len(self.values))))

    def fetch(self, ref: BatchRef, timeout_s: float) -> DataProto:
        self.fetched.append((tuple(ref.columns), ref.n_rows))
        return unpack(ref, dict(enumerate(self.values)))

    def future(self, proto: DataProto | None = None) -> tuple[concurrent.futures.Future, DataProtoFuture]:
        source: concurrent.futures.Future = concurrent.futures.Future()
        if proto is not None:
            source.set_result(Outcome(self.put(proto)))
        return source, DataProtoFuture(source, name="role.method", fetch=self.fetch, timeout_s=5.0)


@pytest.fixture
def kept() -> Kept:
    return Kept()


def batch(start: int = 0, n_rows: int = 5) -> DataProto:
    rows = torch.arange(start, start + n_rows)
    return DataProto.from_dict({"a": rows, "b": rows * 10})


def test_parts_are_made_before_the_result_and_fetch_only_what_they_hold(kept):
    source, future = kept.future()
    chunks = future.select(["b"]).chunk(2)
    back = DataProtoFuture.concat(chunks[::-1])
    assert not back.done()
    source.set_result(Outcome(kept.put(batch())))
    assert back.done()
    assert kept.fetched == []
    assert back.get().batch["b"].tolist() == [30, 40, 0, 10, 20]
    assert chunks[1].get().batch["b"].tolist() == [30, 40]
    assert kept.fetched == [(("b",), 5), (("b",), 2)]


def test_rows_and_columns_are_rearranged_by_handle(kept):
    _, future = kept.future(batch())
    _, other = kept.future(DataProto.from_dict({"c": torch.arange(5)}))
    assert future.slice(1, 3).get().batch["a"].tolist() == [1, 2]
    assert future.reorder([4, 0]).get().batch["a"].tolist() == [4, 0]
    assert [len(part.get()) for part in future.split(2)] == [2, 2, 1]
    assert set(future.union(other.rename({"c": "d"})).get().batch.keys()) == {"a", "b", "d"}


def test_get_is_limited_and_the_call_goes_on(kept):
    source, future = kept.future()
    start = time.monotonic()
    with pytest.raises(CallTimeout, match=r"role\.method.*0\.1 s"):
        future.get(timeout=0.1)
    assert time.monotonic() - start < 2
    source.set_result(Outcome(41))
    assert future.get() == 41


def test_an_error_reaches_every_future_that_depends_on_it(kept):
    source, future = kept.future()
    derived = DataProtoFuture.concat([kept.future(batch())[1], future.slice(0, 1)])
    source.set_exception(ValueError("x"))
    for failed in (future, derived):
        with pytest.raises(ValueError, match="x"):
            failed.get()


def test_as_completed_follows_completion_and_names_the_late(kept):
    sources, futures = zip(*(kept.future() for _ in range(3)), strict=True)
    order = as_completed(futures, timeout=1.0)
    sources[2].set_result(Outcome(None))
    assert next(order) is futures[2]
    threading.Timer(0.05, sources[0].set_result, [Outcome(None)]).start()
    assert next(order) is futures[0]
    with pytest.raises(CallTimeout, match=r"role\.method"):
        next(order)


def test_await_gives_the_data_and_is_limited(kept):
    async def both() -> DataProto:
        source, late = kept.future()
        late.timeout_s = 0.05
        with pytest.raises(CallTimeout):
            await late
        source.set_result(Outcome(7))
        assert await late == 7
        source, future = kept.future()
        threading.Timer(0.05, source.set_result, [Outcome(kept.put(batch()))]).start()
        return await future

    assert len(asyncio.run(both())) == 5


def test_a_list_of_batches_is_fetched_one_by_one(kept):
    source, future = kept.future()
    source.set_result(Outcome([kept.put(batch()), 3, kept.put(batch(5))]))
    first, three, last = future.get()
    assert three == 3
    assert [first.batch["a"][0].item(), last.batch["a"][0].item()] == [0, 5]
    assert all(isinstance(part, BatchRef) for part in (future.ref()[0], future.ref()[2]))


@pytest.fixture
def _no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_blocks_go_with_the_last_future_without_the_garbage_collector(kept):
    source, future = kept.future()
    derived = DataProtoFuture.concat([future.select(["a"]), future.slice(0, 2).select(["a"])])
    ref = kept.put(batch())
    held = weakref.ref(ref)
    source.set_result(Outcome(ref))
    assert list(as_completed([future, derived], timeout=1.0)) == [future, derived]
    del ref, source, future
    assert len(derived.get()) == 7
    assert held() is None


@pytest.mark.usefixtures("_no_collector")
def test_a_pools_queue_keeps_nothing_of_a_call_that_ended(kept):
    queue = PoolQueue("pool")
    ref = kept.put(batch())
    held = weakref.ref(ref)
    outcomes = [Outcome(ref)]
    _, before = kept.future(batch())
    call = Call("role", "role.method", [before], outcomes.pop, 1.0)
    queue.submit(call)
    assert call.result.result(timeout=5).value is ref
    del ref, call
    deadline = time.monotonic() + 2
    while held() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    queue.close()
    assert held() is None
