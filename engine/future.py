"""Completion handles of calls on worker groups: results move by handle until someone asks for the data."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import queue
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rolemesh.engine.batch_ref import BatchRef
from rolemesh.engine.errors import CallTimeout
from rolemesh.engine.parts import Listener, PartFeed
from rolemesh.engine.protocol import DataProto

Fetch = Callable[[BatchRef, float], DataProto]  # brings a handle's batch here, within so many seconds


@dataclass(frozen=True)
class RankSpan:
    """When one rank worked on a call (seconds since the epoch, on its node's clock) and what it fetched.

    `kernels` names the kernels that ran, with their forms: `("gae/avx2",)`; `notes` are the worker's own.
    """

    rank: int
    start_s: float
    end_s: float
    nbytes_fetched: int
    kernels: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a call gave: `value` is a BatchRef where the method returned a batch, lists of them per rank,
    or any other value; `spans` holds one entry per rank that ran."""

    value: Any
    spans: tuple[RankSpan, ...] = ()


class DataProtoFuture:
    """The result of a call that may still run.

    Passed to another worker group's method it chains: that call returns at once and is submitted when this
    one is done. `select`, `slice`, `take`, `chunk`, `concat` and `union` give futures of parts without moving
    data. A failed call raises at `get`. `get` and `await` bring a batch to the caller; nothing else does.
    Every wait has a limit: `timeout` seconds, or the call's own.
    """

    def __init__(
        self,
        source: concurrent.futures.Future[Outcome],
        *,
        name: str,
        fetch: Fetch,
        timeout_s: float,
        parts: PartFeed | None = None,
    ) -> None:
        self._source = source
        self._parts = parts
        self._fetch = fetch
        self.name = name
        self.timeout_s = timeout_s

    @classmethod
    def completed(cls, value: Any, *, name: str, fetch: Fetch, timeout_s: float) -> DataProtoFuture:
        """A future of a value that exists."""
        source: concurrent.futures.Future[Outcome] = concurrent.futures.Future()
        source.set_result(Outcome(value))
        return cls(source, name=name, fetch=fetch, timeout_s=timeout_s)

    @staticmethod
    def concat(futures: Sequence[DataProtoFuture]) -> DataProtoFuture:
        """The rows of several batches, one after the other."""
        return _combine(futures, lambda batches: BatchRef.concat(batches), "concat")

    def get(self, timeout: float | None = None) -> Any:
        """The result: a DataProto (or a list of them) for methods that return one, else the value itself.

        Raises what the call raised (WorkerError, WorkerDied, CallTimeout, PoolBroken), and CallTimeout when
        `timeout` seconds pass first; the call itself goes on then.
        """
        end = time.monotonic() + self._limit(timeout)
        value = self._outcome(timeout).value
        return self._materialize(value, max(1.0, end - time.monotonic()))

    def ref(self, timeout: float | None = None) -> Any:
        """The result as it travels: a BatchRef where `get` would give a DataProto. Raises as `get`."""
        return self._outcome(timeout).value

    def done(self) -> bool:
        """Whether the call has ended, with a result or an error."""
        return self._source.done()

    @property
    def spans(self) -> tuple[RankSpan, ...]:
        """What each rank did, once the call is done; empty for futures of parts."""
        return self._source.result(timeout=0).spans

    def add_done_callback(self, callback: Callable[[DataProtoFuture], None]) -> None:
        """Call `callback(self)` when the call ends, on the thread that ends it: it must be quick."""
        waiting = [functools.partial(callback, self)]  # emptied: the source keeps its callbacks for good
        self._source.add_done_callback(lambda _: waiting.pop()())

    def on_part(self, listener: Listener) -> None:
        """Tell `listener` of finished rows while the call runs, all of them before it is done.

        A call whose method makes no parts tells of none. See `PartFeed` on the thread that tells.
        """
        if self._parts is not None:
            self._parts.listen(listener)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._get_async().__await__()

    async def _get_async(self) -> Any:
        waiting = asyncio.wrap_future(self._source)
        try:
            outcome = await asyncio.wait_for(asyncio.shield(waiting), self.timeout_s)
        except TimeoutError as error:
            if waiting.done():
                raise
            raise self._late(self.timeout_s) from error
        return await asyncio.to_thread(self._materialize, outcome.value, self.timeout_s)

    def select(self, columns: Iterable[str]) -> DataProtoFuture:
        """The named columns only."""
        wanted = list(columns)
        return self._then(lambda batch: batch.select(wanted), "select")

    def slice(self, start: int, stop: int) -> DataProtoFuture:
        """Rows `start` to `stop`."""
        return self._then(lambda batch: batch.slice(start, stop), "slice")

    def take(self, rows: Sequence[int]) -> DataProtoFuture:
        """The given rows, in the given order."""
        return self._then(lambda batch: batch.take(rows), "take")

    def reorder(self, rows: Sequence[int]) -> DataProtoFuture:
        """verl's name for `take`; a new future, this one stays as it is."""
        return self.take(rows)

    def union(self, other: DataProtoFuture) -> DataProtoFuture:
        """The columns of both, for the same rows."""
        return _combine([self, other], lambda batches: batches[0].union(batches[1]), "union")

    def rename(self, names: Mapping[str, str]) -> DataProtoFuture:
        """Columns under new names, {old: new}."""
        return self._then(lambda batch: batch.rename(names), "rename")

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """`chunks` parts in order that differ by at most one row."""
        return [self._then(lambda batch, i=i: batch.chunk(chunks)[i], f"chunk {i}") for i in range(chunks)]

    def split(self, split_size: int, timeout: float | None = None) -> list[DataProtoFuture]:
        """Parts of `split_size` rows, the last one maybe shorter; waits for the number of rows."""
        n_rows = self.ref(timeout).n_rows
        return [self.slice(start, min(start + split_size, n_rows)) for start in range(0, n_rows, split_size)]

    def _then(self, change: Callable[..., Any], what: str) -> DataProtoFuture:
        return _combine([self], lambda batches: change(batches[0]), what)

    def _limit(self, timeout: float | None) -> float:
        return self.timeout_s if timeout is None else timeout

    def _outcome(self, timeout: float | None) -> Outcome:
        concurrent.futures.wait([self._source], timeout=self._limit(timeout))
        if not self._source.done():
            raise self._late(self._limit(timeout))
        return self._source.result(timeout=0)

    def _late(self, limit_s: float) -> CallTimeout:
        return CallTimeout(f"{self.name} gave no result within {limit_s:g} s; it goes on")

    def _materialize(self, value: Any, limit_s: float) -> Any:
        if isinstance(value, BatchRef):
            return self._fetch(value, limit_s)
        if isinstance(value, list) and any(isinstance(item, BatchRef) for item in value):
            return [self._materialize(item, limit_s) for item in value]
        return value


def as_completed(futures: Iterable[DataProtoFuture], timeout: float) -> Iterator[DataProtoFuture]:
    """The futures in the order in which they end. Raises CallTimeout naming those still running."""
    waiting = list(futures)
    ended: queue.SimpleQueue[DataProtoFuture] = queue.SimpleQueue()
    for future in waiting:
        future.add_done_callback(ended.put)
    end = time.monotonic() + timeout
    while waiting:
        try:
            future = ended.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            names = ", ".join(late.name for late in waiting)
            raise CallTimeout(f"not done within {timeout:g} s: {names}") from None
        waiting.remove(future)
        yield future


def _combine(
    futures: Sequence[DataProtoFuture], change: Callable[[list[Any]], Any], what: str
) -> DataProtoFuture:
    """A future of `change(values)`; it ends when all have, with the first error in their order if any."""
    if not futures:
        raise ValueError(f"{what} of no futures")
    result: concurrent.futures.Future[Outcome] = concurrent.futures.Future()
    first = futures[0]
    derived = DataProtoFuture(
        result,
        name=f"{what} of {', '.join(future.name for future in futures)}",
        fetch=first._fetch,
        timeout_s=max(future.timeout_s for future in futures),
    )
    unfinished = queue.SimpleQueue[int]()
    for i in range(1, len(futures)):
        unfinished.put(i)

    def one_ended(_: DataProtoFuture) -> None:
        try:
            unfinished.get_nowait()
        except queue.Empty:
            _finish(result, futures, change)

    for future in futures:
        future.add_done_callback(one_ended)
    return derived


def _finish(
    result: concurrent.futures.Future[Outcome],
    futures: Sequence[DataProtoFuture],
    change: Callable[[list[Any]], Any],
) -> None:
    try:
        result.set_result(Outcome(change([future.ref(timeout=0) for future in futures])))
    except Exception as error:
        result.set_exception(error)
