"""The driver's handle on all workers of one role: registered methods become calls on every rank."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rolemesh.engine.at_step import current_step
from rolemesh.engine.batch_ref import BatchRef
from rolemesh.engine.dispatch import (
    CustomDispatch,
    DispatchError,
    OutputCuts,
    Registration,
    Rows,
    Shares,
    collect,
    registered_methods,
    share,
)
from rolemesh.engine.errors import CallError
from rolemesh.engine.future import DataProtoFuture, Outcome, RankSpan
from rolemesh.engine.parts import PartFeed, PartRef, join_parts
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.ray.blocks import fetch_batch, put_batch
from rolemesh.engine.ray.host import Reply, Request, WorkerSpec
from rolemesh.engine.ray.host_group import HostGroup
from rolemesh.engine.ray.pools import ResourcePool
from rolemesh.engine.ray.queue import Call
from rolemesh.engine.ray.transfer import Offer, take
from rolemesh.engine.user_file import UserClass
from rolemesh.engine.worker import Worker
from rolemesh.parallel.weights.transfer_link import Meeting
from rolemesh.placement.layout import Layout, LayoutError

CALL_TIMEOUT_S = 1800.0


class RayClassWithInitArgs:
    """A worker class and the arguments of its constructor on every rank; a user's is loaded on each.

    Raises UserFileError for a user's class that is not there, or is another role's.
    """

    def __init__(self, cls: type[Worker] | UserClass, *args: Any, **kwargs: Any) -> None:
        self.sent, self.args, self.kwargs = cls, args, kwargs
        self.cls: type[Worker] = cls.load() if isinstance(cls, UserClass) else cls


class RayWorkerGroup:
    """Workers of one role on all processes of a pool.

    Every method of the class that carries `@register` can be called here:
    `group.method(*args, blocking=None, timeout_s=None, rows=None, **kwargs)`. Batches may be DataProto or
    futures of other calls. Non-blocking calls return a DataProtoFuture at once; blocking ones its `get()`.
    `timeout_s` limits the operation itself, from its start on the ranks; waiting for the pool or for inputs
    is limited by those calls' own limits. `rows` is as in `dispatch.share`.

    Args:
        resource_pool: reserved and started when that has not happened yet.
        ray_cls_with_init: what to create on every rank; the constructor has `timeout_s` to end.
        layout: how the role's model is cut; None: every rank is a replica.
        role: the name in messages and spans, unique in the pool.
        own_process: the role gets processes of its own on the pool's devices.
        timeout_s: limit of a call that names none.

    Raises what the constructor raised on a rank, as a WorkerError.
    """

    def __init__(
        self,
        resource_pool: ResourcePool,
        ray_cls_with_init: RayClassWithInitArgs,
        *,
        layout: Layout | None = None,
        role: str | None = None,
        own_process: bool = False,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        cls = ray_cls_with_init.cls
        self.resource_pool = resource_pool
        self.role = role or cls.__name__
        self.layout = layout or Layout(dp=resource_pool.world_size)
        self.timeout_s = timeout_s
        if self.layout.world != resource_pool.world_size:
            raise LayoutError(
                f"{self.role}: layout {self.layout} has {self.layout.world} ranks, pool "
                f"{resource_pool.name!r} has {resource_pool.world_size} processes"
            )
        self._own_process_of = self.role if own_process else None
        self.meetings: dict[str, tuple[HostGroup, HostGroup, Meeting]] = {}  # by the pair of roles
        self.meetings_lock = threading.Lock()
        resource_pool.add_role(self.role, self.layout.dp)
        made = ray_cls_with_init
        spec = WorkerSpec(made.sent, made.args, made.kwargs, self.layout)
        self._submit("__init__", [], functools.partial(self._create, spec), timeout_s).get()
        for name, registration in registered_methods(cls).items():
            if hasattr(type(self), name) or name in self.__dict__:
                raise DispatchError(f"{cls.__name__}.{name} would hide the worker group's own {name!r}")
            method = functools.partial(self._call, name, registration)
            setattr(self, name, functools.update_wrapper(method, getattr(cls, name)))

    if TYPE_CHECKING:  # the registered methods, bound by `__init__`

        def __getattr__(self, name: str) -> Any: ...

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.layout.world

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, each on its own node."""
        return self._hosts().pids

    @property
    def nodes(self) -> list[str]:
        """The node of every rank."""
        return [self._hosts().place(rank).node for rank in range(self.world_size)]

    def stacks(self) -> dict[int, str]:
        """The Python stacks of every rank, also while it computes."""
        return self._hosts().stacks()

    def states(self) -> dict[int, Any]:
        """What every rank is doing (`HostState`), also while it computes."""
        return self._hosts().states()

    def lost(self) -> CallError | None:
        """The death or hang that keeps the pool's processes from going on; None where they all answer."""
        return self.resource_pool.lost()

    def memory(self) -> dict[int, Any]:
        """The most that every rank's process has held so far (`HostMemory`)."""
        return self._hosts().memory()

    def ask(
        self, method: str, *args: Any, ranks: Sequence[int] | None = None, timeout_s: float = 30.0
    ) -> list[Any]:
        """Call a plain method of the workers on `ranks` (all), also while they compute; a value per rank.

        The method must neither compute nor communicate: it runs beside the operation. Raises WorkerError,
        WorkerDied, CallTimeout.
        """
        there = range(self.world_size) if ranks is None else ranks
        return self._hosts().ask(self.role, method, args, there, timeout_s)

    def _call(
        self,
        method: str,
        registration: Registration,
        *args: Any,
        blocking: bool | None = None,
        timeout_s: float | None = None,
        rows: Rows | None = None,
        **kwargs: Any,
    ) -> Any:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        if registration.transfer == "gives":
            if blocking:
                raise DispatchError(f"{self.role}.{method} ends when someone takes: do not wait for it")
            return Offer(self, method, registration, kwargs, limit_s)
        if args and isinstance(args[0], Offer):
            future = take(self, method, registration, args[0], kwargs, limit_s)
            return future.get() if (registration.blocking if blocking is None else blocking) else future
        feed = PartFeed() if registration.parts else None
        step = current_step()
        run = functools.partial(self._run, method, registration, args, kwargs, rows, limit_s, feed, step)
        inputs = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, DataProtoFuture)]
        future = self._submit(method, inputs, run, limit_s, feed)
        return future.get() if (registration.blocking if blocking is None else blocking) else future

    def _submit(
        self,
        method: str,
        inputs: Sequence[DataProtoFuture],
        run: Callable[[], Outcome],
        limit_s: float,
        feed: PartFeed | None = None,
    ) -> DataProtoFuture:
        call = Call(self.role, f"{self.role}.{method}", inputs, run, limit_s)
        within_s = self.resource_pool.queue.submit(call)
        return DataProtoFuture(call.result, name=call.name, fetch=fetch_batch, timeout_s=within_s, parts=feed)

    def _create(self, spec: WorkerSpec) -> Outcome:
        requests = [Request(self.role, "__init__", create=spec)] * self.world_size
        return Outcome(None, _spans(self._hosts().run(requests, self.timeout_s)))

    def _run(
        self,
        method: str,
        registration: Registration,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: Rows | None,
        limit_s: float,
        feed: PartFeed | None,
        step: int | None = None,
    ) -> Outcome:
        """On the queue's thread, when the inputs are done: dispatch, carry out, collect."""
        hosts = self._hosts()
        store = self._storing()
        keep = isinstance(registration.dispatch, CustomDispatch)  # custom functions see the caller's batches
        ready = [_resolved(value, None if keep else store) for value in args]
        named = {name: _resolved(value, None if keep else store) for name, value in kwargs.items()}
        shares = share(registration, self, ready, named, rows)
        requests = [
            Request(
                role=self.role,
                method=method,
                args=tuple(_resolved(value, store) for value in rank_args),
                kwargs={name: _resolved(value, store) for name, value in rank_kwargs.items()},
                materialize=registration.materialize_futures,
                cuts=self._cuts(shares, rank),
                parts=registration.parts,
                step=step,
            )
            for rank, (rank_args, rank_kwargs) in enumerate(zip(shares.args, shares.kwargs, strict=True))
        ]
        parts: dict[int, list[PartRef]] = {rank: [] for rank in range(len(requests))}

        def made(rank: int, part: PartRef) -> None:
            parts[rank].append(part)
            replica = self.layout.coords(rank).dp
            if feed is not None and shares.rows is not None and rank == self.layout.collect_rank(replica):
                feed.put(PartRef(tuple(shares.rows[replica][list(part.rows)].tolist()), part.ref))

        replies = hosts.run(requests, limit_s, made)
        values = [reply.value for reply in replies]
        if registration.parts:
            values = [self._joined(parts[rank], shares, rank) for rank in parts]
        return Outcome(collect(registration, self, shares, values), _spans(replies))

    def _joined(self, parts: list[PartRef], shares: Shares, rank: int) -> Any:
        """A rank's result from its parts; of a rank whose result does not count, None."""
        if rank != self.layout.collect_rank(self.layout.coords(rank).dp):
            return None
        n_made = sum(len(part.rows) for part in parts)
        rows = shares.rows
        return join_parts(parts, n_made if rows is None else len(rows[self.layout.coords(rank).dp]))

    def _hosts(self) -> HostGroup:
        return self.resource_pool.hosts(self._own_process_of)

    def _storing(self) -> Any:
        """A function that stores a batch of the driver's, once per call however many ranks it is for."""
        stored: dict[int, BatchRef] = {}

        def store(proto: DataProto) -> BatchRef:
            if id(proto) not in stored:
                stored[id(proto)] = put_batch(proto, self.resource_pool.dp_sizes)
            return stored[id(proto)]

        return store

    def _cuts(self, shares: Shares, rank: int) -> OutputCuts | None:
        if shares.rows is None:
            return None
        rows = shares.rows[self.layout.coords(rank).dp]
        return OutputCuts(rows, shares.n_rows, tuple(sorted(self.resource_pool.dp_sizes)))


def _flat(values: Any) -> list[Any]:
    """The values, and what is in lists and tuples among them."""
    return [inner for value in values for inner in (value if isinstance(value, list | tuple) else [value])]


def _resolved(value: Any, store: Any) -> Any:
    """A future's value, and batches as handles where `store` is given; also inside lists and tuples."""
    if isinstance(value, DataProtoFuture):
        return value.ref(timeout=0)
    if isinstance(value, DataProto) and store is not None:
        return store(value)
    if isinstance(value, list | tuple) and any(isinstance(v, DataProto | DataProtoFuture) for v in value):
        return type(value)(_resolved(inner, store) for inner in value)
    return value


def _spans(replies: list[Reply]) -> tuple[RankSpan, ...]:
    return tuple(
        RankSpan(rank, r.start_s, r.end_s, r.nbytes_fetched, r.kernels, r.notes)
        for rank, r in enumerate(replies)
    )
