"""One rank of a run without Ray: the workers of all roles in this process, and what is asked of them.

Rank 0 decides: it sends every other rank its part of a call (`World.call`), which that rank carries out
(`World.follow`).
Questions that a busy rank must answer go another way, through the store, to a thread of their own.
"""

from __future__ import annotations

import faulthandler
import pickle
import secrets
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rolemesh.engine.batch_ref import BatchRef
from rolemesh.engine.dispatch import OutputCuts
from rolemesh.engine.errors import CallTimeout, WorkerDied, WorkerError
from rolemesh.engine.future import RankSpan
from rolemesh.engine.parts import PartRef
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.spmd.held import fetch_batch, stored
from rolemesh.engine.worker import Worker, WorkerContext
from rolemesh.kernels.forms import record_kernels
from rolemesh.parallel.sealed import sealed, unsealed
from rolemesh.placement.layout import Layout

_STACKS_S = 30.0  # after a call's limit, for the collectives' own errors to come first
_CAUSE_S = 5.0  # for the rank that failed first to say why
_POLL_S = 0.2
_STDERR = 2


@dataclass(frozen=True)
class Request:
    """One call for one rank."""

    role: str
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    materialize: bool = True
    cuts: OutputCuts | None = None
    parts: bool = False
    limit_s: float = 1800.0


@dataclass(frozen=True)
class Reply:
    """What a rank's method returned, batches as handles, and when it ran."""

    value: Any
    span: RankSpan


class World:
    """All ranks, seen from one. torch.distributed is initialised; `store` is shared by the ranks, and a
    TCPStore that they all reach is at `meets_at`.
    """

    def __init__(
        self,
        store: dist.Store,
        ask_store: dist.Store,
        *,
        node: str,
        device: str,
        local_rank: int,
        limit_s: float,
        meets_at: tuple[str, int],
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.node, self.device, self.local_rank, self.limit_s = node, device, local_rank, limit_s
        self.meets_at = meets_at
        self.workers: dict[str, Worker] = {}
        self._notes: dict[str, Any] = {}
        self._shared: dict[str, Any] = {}
        self._store: Any = store  # its types know values of text only
        self._ask_store: Any = ask_store
        self._asks = 0
        self._ask_lock = threading.Lock()
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_s + _STACKS_S))
        self._calls = 0
        self._secret = self.share_setup(secrets.token_bytes(32) if self.rank == 0 else None)
        if self.rank:
            threading.Thread(target=self._answer, name="questions", daemon=True).start()

    def create(
        self,
        role: str,
        cls: type[Worker],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        layout: Layout,
        device: str | None = None,
    ) -> None:
        """Make this rank's worker of a role; every rank of the role does so, roles in the same order."""
        worker = object.__new__(cls)
        worker.context = WorkerContext(
            role=role,
            pool="all",
            rank=self.rank,
            world_size=layout.world,
            local_rank=self.local_rank,
            node=self.node,
            device=device or self.device,
            layout=layout,
            collective_timeout_s=self.limit_s,
            fetch=fetch_batch,
            notes=self._notes,
            shared=self._shared,
        )
        worker.__init__(*args, **kwargs)  # type: ignore[misc]
        self.workers[role] = worker

    def share_setup(self, setup: Any = None) -> Any:
        """What rank 0 gives to every rank before the first call."""
        sent = [setup]
        if self.size > 1:
            dist.broadcast_object_list(sent, src=0, group=self._control)
        return sent[0]

    def call(self, requests: Sequence[Request]) -> list[Reply]:
        """On rank 0: ranks 0 to len(requests) - 1 carry out one request each; their replies.

        Raises WorkerError with the first rank that raised, WorkerDied for one that is gone.
        """
        self._calls += 1
        if len(requests) == 1:  # nothing that the others take part in
            return [self._own(requests[0])]
        own: list[Any] = [None]
        try:
            dist.scatter_object_list(own, [None, *map(self._sent, requests[1:])], src=0, group=self._control)
        except RuntimeError as error:
            raise self._cause(requests[0], error) from error
        reply = self._own(requests[0])
        replies: list[Any] = [None] * self.size
        try:
            dist.gather_object(None, replies, dst=0, group=self._control)
        except RuntimeError as error:
            raise self._cause(requests[0], error) from error
        return [reply, *(pickle.loads(other) for other in replies[1:])]

    def follow(self) -> None:
        """On the other ranks: carry out what rank 0 sends, until it says that all is done.

        Raises what a request raised here, after rank 0 can know it.
        """
        while True:
            sent: list[Any] = [None]
            dist.scatter_object_list(sent, None, src=0, group=self._control)
            if sent[0] is None:
                return
            self._calls += 1
            reply = self._own(pickle.loads(sent[0]))
            dist.gather_object(pickle.dumps(reply), None, dst=0, group=self._control)

    def end(self) -> None:
        """On rank 0: let the others go."""
        if self.size > 1:
            nothing: list[Any] = [None] * self.size
            dist.scatter_object_list([None], nothing, src=0, group=self._control)

    def ask(
        self, role: str, method: str, args: tuple[Any, ...], ranks: Sequence[int], limit_s: float
    ) -> list[Any]:
        """Call a method that neither computes nor communicates on `ranks`, also while they compute.

        Raises WorkerError, CallTimeout.
        """
        with self._ask_lock:  # one connection, one question at a time
            self._asks += 1
            number = self._asks
            for rank in ranks:
                if rank:
                    self._put(self._ask_store, f"ask/{rank}/{number}", (role, method, args))
                else:
                    self._put(self._ask_store, f"answer/0/{number}", self._asked(role, method, args))
            for rank in range(1, self.size):
                if rank not in ranks:
                    self._put(self._ask_store, f"ask/{rank}/{number}", None)
            return [self._answer_of(rank, number, role, method, limit_s) for rank in ranks]

    def _answer_of(self, rank: int, number: int, role: str, method: str, limit_s: float) -> Any:
        key = f"answer/{rank}/{number}"
        try:
            self._ask_store.wait([key], timedelta(seconds=limit_s))
        except RuntimeError as error:
            raise CallTimeout(f"{role}.{method} not answered within {limit_s:g} s by rank {rank}") from error
        value, trace = self._got(self._ask_store, key)
        self._ask_store.delete_key(key)
        if trace is not None:
            raise WorkerError(role, rank, self.node, method, trace)
        return value

    def _answer(self) -> None:
        """The thread that answers questions, in the order of their numbers."""
        number = 1
        while True:
            key = f"ask/{self.rank}/{number}"
            try:
                while not self._ask_store.check([key]):
                    time.sleep(_POLL_S)
                asked = self._got(self._ask_store, key)
                self._ask_store.delete_key(key)
                if asked is not None:
                    self._put(self._ask_store, f"answer/{self.rank}/{number}", self._asked(*asked))
            except RuntimeError:
                return  # rank 0, which has the store, is gone
            number += 1

    def _asked(self, role: str, method: str, args: tuple[Any, ...]) -> tuple[Any, str | None]:
        try:
            return getattr(self.workers[role], method)(*args), None
        except Exception:
            return None, traceback.format_exc()

    def _put(self, store: Any, key: str, value: Any) -> None:
        store.set(key, sealed(value, self._secret, key))

    def _got(self, store: Any, key: str) -> Any:
        return unsealed(store.get(key), self._secret, key)

    def _sent(self, request: Request) -> bytes:
        return pickle.dumps(request)

    def _own(self, request: Request) -> Reply:
        """Carry out a request here; one that takes too long ends the process with its Python stacks."""
        faulthandler.dump_traceback_later(request.limit_s + _STACKS_S, exit=True, file=_STDERR)
        try:
            return self._carried_out(request)
        except BaseException as error:
            trace = traceback.format_exc()
            self._put(self._store, f"error/{self.rank}", (time.time(), request.role, request.method, trace))
            if self.rank == 0:
                raise self._cause(request, error) from error
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _carried_out(self, request: Request) -> Reply:
        start_s, fetched = time.time(), _Fetched()
        self._notes.clear()
        args = [fetched.resolved(value, request.materialize) for value in request.args]
        kwargs = {
            name: fetched.resolved(value, request.materialize) for name, value in request.kwargs.items()
        }
        with record_kernels() as kernels:
            value = getattr(self.workers[request.role], request.method)(*args, **kwargs)
            value = _parts(value, request.cuts) if request.parts else _kept(value, request.cuts)
        names = tuple(sorted(kernels))
        span = RankSpan(self.rank, start_s, time.time(), fetched.nbytes, names, dict(self._notes))
        return Reply(value, span)

    def _cause(self, request: Request, error: BaseException) -> Exception:
        """The first failure among the ranks; the others fail because it has left them."""
        deadline, found = time.monotonic() + _CAUSE_S, []
        while time.monotonic() < deadline:
            said = [rank for rank in range(self.size) if self._store.check([f"error/{rank}"])]
            found = [(*self._got(self._store, f"error/{rank}"), rank) for rank in said]
            if any(rank for *_, rank in found):
                break
            if not isinstance(error, RuntimeError):
                break  # not what a collective raises whose other side is gone
            time.sleep(_POLL_S)
        if not found:
            return WorkerDied(
                request.role,
                -1,
                self.node,
                request.method,
                f"a rank is gone or late: {error}",
                "see its output",
            )
        _, role, method, trace, rank = min(found)
        return WorkerError(role, rank, self.node, method, trace)


@dataclass
class _Fetched:
    nbytes: int = 0

    def resolved(self, value: Any, materialize: bool) -> Any:
        if isinstance(value, BatchRef) and materialize:
            self.nbytes += value.fetch_nbytes
            return fetch_batch(value)
        return value


def _kept(value: Any, cuts: OutputCuts | None) -> Any:
    if isinstance(value, DataProto):
        return stored(value, cuts.of(len(value)) if cuts else ())
    return value


def _parts(value: Any, cuts: OutputCuts | None) -> list[PartRef]:
    made = []
    for part in value:
        rows = tuple(int(row) for row in part.rows)
        made.append(PartRef(rows, stored(part.data, cuts.at(rows).of(len(rows)) if cuts else ())))
    return made
