"""Weights from one worker group to another, driven: both groups' methods run at the same time and meet.

The pools may be two, or one; on one pool the roles live in the same processes, or the target in its own.
"""

from __future__ import annotations

import concurrent.futures
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from rolemesh.engine.at_step import current_step
from rolemesh.engine.dispatch import DispatchError, Registration
from rolemesh.engine.errors import CallError, CallTimeout
from rolemesh.engine.future import DataProtoFuture, Outcome
from rolemesh.engine.ray.blocks import fetch_batch
from rolemesh.engine.ray.queue import Call
from rolemesh.parallel.weights.transfer_link import Meeting
from rolemesh.parallel.weights.transfer_plan import TransferError

if TYPE_CHECKING:
    from rolemesh.engine.ray.worker_group import RayWorkerGroup

_TOLD_S = 10.0  # for the other side to tell why it failed


class Offer(DataProtoFuture):
    """Weights that a group gives to the first method they are passed to; done when that has them."""

    def __init__(
        self,
        group: RayWorkerGroup,
        method: str,
        registration: Registration,
        kwargs: Mapping[str, Any],
        limit_s: float,
    ) -> None:
        self.outcome: Future[Outcome] = Future()
        super().__init__(self.outcome, name=f"{group.role}.{method}", fetch=fetch_batch, timeout_s=limit_s)
        self.group, self.method, self.limit_s = group, method, limit_s
        self._registration, self._kwargs, self._step = registration, kwargs, current_step()
        self._taken_by: str | None = None

    def taken_by(self, name: str) -> None:
        """Raise DispatchError for a second taker."""
        if self._taken_by is not None:
            raise DispatchError(
                f"{self.name} was given to {self._taken_by} already: {name} needs an offer of its own"
            )
        self._taken_by = name

    def give(self, meeting: Meeting) -> Outcome:
        """Run the giving side, on a queue's thread."""
        return self.group._run(
            self.method, self._registration, (meeting,), self._kwargs, None, self.limit_s, None, self._step
        )


def take(
    group: RayWorkerGroup,
    method: str,
    registration: Registration,
    offer: Offer,
    kwargs: Mapping[str, Any],
    limit_s: float,
) -> DataProtoFuture:
    """Let `group` take what `offer` gives. Both pools are busy with it from the moment when both are free.

    Raises DispatchError for an offer that was taken before, or a method that takes no weights.
    """
    name = f"{group.role}.{method}"
    if registration.transfer != "takes":
        raise DispatchError(f"{name} takes no weights: it is not registered with transfer='takes'")
    offer.taken_by(name)

    step = current_step()

    def receive(meeting: Meeting) -> Outcome:
        return group._run(method, registration, (meeting,), kwargs, None, limit_s, None, step)

    both = _Both(offer, group, receive, min(limit_s, offer.limit_s))
    queue = group.resource_pool.queue
    if offer.group.resource_pool is group.resource_pool:
        call = Call(group.role, name, [], both.on_one_pool, limit_s + offer.limit_s)
        call.result.add_done_callback(both.both_ended)
        within_s = queue.submit(call)
    else:
        giving = Call(offer.group.role, offer.name, [], both.giving_side, offer.limit_s, offer.outcome)
        call = Call(group.role, name, [], both.taking_side, limit_s)
        giving.result.add_done_callback(both.giving_ended)
        call.result.add_done_callback(both.taking_ended)
        within_s = offer.group.resource_pool.queue.submit(giving) + queue.submit(call)
        both.within_s.set_result(within_s)
    offer.timeout_s = within_s
    return DataProtoFuture(call.result, name=name, fetch=fetch_batch, timeout_s=within_s)


class _Both:
    """The two sides of one transfer on the driver: they start together, and one's failure is told to both.

    `within_s` is how long the two pools may take to be free and done.
    """

    def __init__(
        self, offer: Offer, group: RayWorkerGroup, receive: Callable[[Meeting], Outcome], limit_s: float
    ) -> None:
        self._offer, self._group, self._receive, self._limit_s = offer, group, receive, limit_s
        self._start = threading.Barrier(2)
        self._given: Future[Outcome] = Future()
        self._taken: Future[Outcome] = Future()
        self.within_s: Future[float] = Future()

    def giving_side(self) -> Outcome:
        """On the source pool's queue."""
        self._wait_for(self._group, self._taken)
        return self._gives(self._meeting())

    def taking_side(self) -> Outcome:
        """On the target pool's queue."""
        self._wait_for(self._offer.group, self._given)
        return self._takes(self._meeting())

    def on_one_pool(self) -> Outcome:
        """On the queue of a pool that has both: at the same time in two sets of processes, or one after the
        other in the same processes, where the target's turn does the work.
        """
        meeting = self._meeting()
        if meeting.together:
            given = self._gives(meeting)
            taken = self._takes(meeting)
        else:
            with ThreadPoolExecutor(1, thread_name_prefix="transfer") as beside:
                giving = beside.submit(self._gives, meeting)
                taken = self._takes(meeting)
                given = giving.result()
        self._offer.outcome.set_result(given)
        return taken

    def giving_ended(self, ended: Future[Outcome]) -> None:
        """Tell the other side, which may still wait for its turn."""
        _copy(ended, self._given)
        if ended.exception() is not None:
            self._start.abort()

    def taking_ended(self, ended: Future[Outcome]) -> None:
        """Tell the other side, which may still wait for its turn."""
        _copy(ended, self._taken)
        if ended.exception() is not None:
            self._start.abort()

    def both_ended(self, ended: Future[Outcome]) -> None:
        """On one pool the giving side has no call of its own that would end."""
        _copy(ended, self._offer.outcome)

    def _wait_for(self, other: RayWorkerGroup, ended: Future[Outcome]) -> None:
        within_s = self.within_s.result(_TOLD_S)
        try:
            self._start.wait(within_s)
        except threading.BrokenBarrierError:
            if (failure := _failure(ended)) is not None:
                raise CallError(f"{self._offer.name}: {other.role} failed: {failure}") from failure
            raise CallTimeout(
                f"{self._offer.name}: pool {other.resource_pool.name!r} of {other.role} was not free within "
                f"{within_s:g} s"
            ) from None

    def _gives(self, meeting: Meeting) -> Outcome:
        return self._carry_out(self._offer.give, meeting, self._given, self._taken)

    def _takes(self, meeting: Meeting) -> Outcome:
        return self._carry_out(self._receive, meeting, self._taken, self._given)

    def _carry_out(
        self,
        run: Callable[[Meeting], Outcome],
        meeting: Meeting,
        own: Future[Outcome],
        other: Future[Outcome],
    ) -> Outcome:
        """Run one side. Where it failed for want of the other, the other's own error is the one to raise."""
        try:
            outcome = run(meeting)
        except CallError as error:
            own.set_exception(error)
            self._group.meetings.pop(meeting.pair, None)  # the processes have closed their links
            cause = _failure(other) if isinstance(error.__cause__, TransferError) else None
            if cause is not None and not isinstance(cause.__cause__, TransferError):
                raise cause from error
            raise
        own.set_result(outcome)
        return outcome

    def _meeting(self) -> Meeting:
        """Where the two groups' processes meet: as at the last transfer, unless they are others."""
        source, target = self._offer.group, self._group
        giving, taking = source._hosts(), target._hosts()
        pair = f"{source.resource_pool.name}.{source.role}>{target.resource_pool.name}.{target.role}"
        with target.meetings_lock:
            known = target.meetings.get(pair)
            if known is None or known[:2] != (giving, taking):
                assert giving.store is not None, "processes that are connected have a store"
                limits_s = [hosts.place(0).collective_timeout_s for hosts in (giving, taking)]
                meeting = Meeting(
                    pair=pair,
                    id=uuid.uuid4().hex,
                    address=giving.store[0],
                    port=giving.store[1],
                    n_sources=source.world_size,
                    n_targets=target.world_size,
                    together=giving is taking,
                    limit_s=min(self._limit_s, *limits_s),
                )
                known = target.meetings[pair] = (giving, taking, meeting)
            return known[2]


def _failure(of: Future[Outcome]) -> BaseException | None:
    """What a side failed with, given a moment to find out."""
    concurrent.futures.wait([of], timeout=_TOLD_S)
    return of.exception() if of.done() else None


def _copy(ended: Future[Outcome], to: Future[Outcome]) -> None:
    """Let `to` end as `ended` has, unless it has ended."""
    if to.done():
        return
    if (error := ended.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(ended.result())
