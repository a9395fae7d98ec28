"""The worker group of a role whose ranks are the processes of this very program: rank 0 calls it."""

from __future__ import annotations

import concurrent.futures
import functools
import resource
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from rolemesh.engine.future import DataProtoFuture, Outcome
from rolemesh.engine.parts import join_parts
from rolemesh.engine.spmd.held import fetch_batch, given
from rolemesh.engine.spmd.rank import Request, World
from rolemesh.engine.worker import Worker
from rolemesh.parallel.weights.transfer_link import Meeting
from rolemesh.placement.layout import Layout


@dataclass(frozen=True)
class Everywhere:
    """What worker groups have for a pool: all ranks."""

    name: str = "all"


@dataclass(frozen=True)
class PeakMemory:
    """The most that a process has held so far."""

    peak_bytes: int
    what: str = "resident memory of rank 0, libraries included"


class Offer(DataProtoFuture):
    """Weights that a group gives to the first method they are passed to; done when it has given them."""

    def __init__(self, name: str, n_ranks: int, give: Callable[[Meeting], Outcome], limit_s: float) -> None:
        self.outcome: concurrent.futures.Future[Outcome] = concurrent.futures.Future()
        super().__init__(self.outcome, name=name, fetch=fetch_batch, timeout_s=limit_s)
        self.n_ranks, self._give = n_ranks, give

    def give(self, meeting: Meeting) -> None:
        """Let every rank give. Raises what it raises."""
        try:
            self.outcome.set_result(self._give(meeting))
        except Exception as error:
            self.outcome.set_exception(error)
            raise


class SpmdWorkerGroup:
    """As `RayWorkerGroup`, for a role that every rank of `world` (or rank 0 alone, for a layout of one rank)
    has created. A call runs at once, so a future that it gives is done.
    """

    def __init__(
        self,
        world: World,
        cls: type[Worker],
        *,
        layout: Layout,
        role: str,
        pool: Everywhere,
        dp_sizes: Sequence[int],
        timeout_s: float,
    ) -> None:
        self.world, self.layout, self.role, self.resource_pool = world, layout, role, pool
        self.timeout_s = timeout_s
        self._dp_sizes = tuple(sorted(dp_sizes))
        self._meetings: dict[str, Meeting] = {}  # by whose weights come
        for name, registration in registered_methods(cls).items():
            method = functools.partial(self._call, name, registration)
            setattr(self, name, functools.update_wrapper(method, getattr(cls, name)))

    if TYPE_CHECKING:  # the registered methods, bound by `__init__`

        def __getattr__(self, name: str) -> Any: ...

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.layout.world

    def ask(
        self, method: str, *args: Any, ranks: Sequence[int] | None = None, timeout_s: float = 30.0
    ) -> list[Any]:
        """Call a plain method of the workers on `ranks` (all), also while they compute; a value per rank."""
        there = range(self.world_size) if ranks is None else ranks
        return self.world.ask(self.role, method, args, there, timeout_s)

    def memory(self) -> dict[int, PeakMemory]:
        """The most that rank 0's process has held so far."""
        return {0: PeakMemory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)}

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
        name = f"{self.role}.{method}"
        if registration.transfer == "gives":
            give = lambda meeting: self._run(method, registration, (meeting,), kwargs, None, limit_s)  # noqa: E731
            return Offer(name, self.world_size, give, limit_s)
        result: concurrent.futures.Future[Outcome] = concurrent.futures.Future()
        try:
            if registration.transfer == "takes":
                args = (self._given(name, *args),)
            result.set_result(self._run(method, registration, args, kwargs, rows, limit_s))
        except Exception as error:
            result.set_exception(error)
        future = DataProtoFuture(result, name=name, fetch=fetch_batch, timeout_s=limit_s)
        return future.get() if (registration.blocking if blocking is None else blocking) else future

    def _given(self, name: str, offer: Offer) -> Meeting:
        """Where the weights of an offer are, given: roles share their processes."""
        if offer.n_ranks != self.world_size:
            raise DispatchError(
                f"{name} is {self.world_size} ranks, {offer.name} {offer.n_ranks}: without Ray they must be "
                "the same processes"
            )
        if offer.name not in self._meetings:
            address, port = self.world.meets_at
            self._meetings[offer.name] = Meeting(
                pair=f"{offer.name}>{name}",
                id=uuid.uuid4().hex,
                address=address,
                port=port,
                n_sources=offer.n_ranks,
                n_targets=self.world_size,
                together=True,
                limit_s=self.world.limit_s,
            )
        offer.give(self._meetings[offer.name])
        return self._meetings[offer.name]

    def _run(
        self,
        method: str,
        registration: Registration,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: Rows | None,
        limit_s: float,
    ) -> Outcome:
        keep: Callable[[Any], Any] = given
        if isinstance(registration.dispatch, CustomDispatch):  # custom functions see the caller's batches
            keep = lambda value: value.ref(timeout=0) if isinstance(value, DataProtoFuture) else value  # noqa: E731
        shares = share(
            registration,
            self,
            [keep(value) for value in args],
            {name: keep(value) for name, value in kwargs.items()},
            rows,
        )
        requests = [
            Request(
                role=self.role,
                method=method,
                args=tuple(given(value) for value in rank_args),
                kwargs={name: given(value) for name, value in rank_kwargs.items()},
                materialize=registration.materialize_futures,
                cuts=self._cuts(shares, rank),
                parts=registration.parts,
                limit_s=limit_s,
            )
            for rank, (rank_args, rank_kwargs) in enumerate(zip(shares.args, shares.kwargs, strict=True))
        ]
        replies = self.world.call(requests)
        values = [reply.value for reply in replies]
        if registration.parts:
            values = [self._joined(parts, shares, rank) for rank, parts in enumerate(values)]
        return Outcome(collect(registration, self, shares, values), tuple(reply.span for reply in replies))

    def _joined(self, parts: Any, shares: Shares, rank: int) -> Any:
        """A rank's result from its parts."""
        n_made, rows = sum(len(part.rows) for part in parts), shares.rows
        return join_parts(parts, n_made if rows is None else len(rows[self.layout.coords(rank).dp]))

    def _cuts(self, shares: Shares, rank: int) -> OutputCuts | None:
        if shares.rows is None:
            return None
        return OutputCuts(shares.rows[self.layout.coords(rank).dp], shares.n_rows, self._dp_sizes)
