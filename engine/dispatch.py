"""How a worker method's arguments are shared out over ranks, and its results collected.

A method says so itself, with `@register(dispatch_mode=...)`. `share` computes what every rank receives and
`collect` what the caller gets; both are pure, work on handles (`BatchRef`) and move no data. The DP modes cut
a batch over `dp` only: the tp x pp ranks of a replica receive one and the same shard, and a replica's result
is taken once, from its collect rank. Programming model after verl's `single_controller` decorators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rolemesh.engine.batch_ref import BatchRef
from rolemesh.engine.columns import row_bounds
from rolemesh.placement.layout import Layout

Rows = Sequence[Sequence[int]] | Callable[[BatchRef, Layout], Sequence[Sequence[int]]]
Transfer = Literal["gives", "takes"]
Method = TypeVar("Method", bound=Callable[..., Any])

_REGISTERED = "_rolemesh_registration"
_MOST_CUTS = 128


class DispatchError(ValueError):
    """Arguments or results that do not fit the method's dispatch mode; the message holds the sizes."""


class Dispatch(Enum):
    """What each rank receives, and what the caller gets back."""

    RANK_ZERO = auto()  # rank 0 alone runs; its value
    ONE_TO_ALL = auto()  # the same arguments for every rank; a value per rank
    ALL_TO_ALL = auto()  # every argument is a list with one entry per rank; a value per rank
    DP_COMPUTE = auto()  # every argument is a list with one entry per replica (or rank); a value per replica
    DP_COMPUTE_PROTO = (
        auto()
    )  # batches are cut over dp, the rest is repeated; one batch in the caller's order
    DP_COMPUTE_PROTO_WITH_FUNC = auto()  # the same, and the first argument is a function
    DP_COMPUTE_METRIC = auto()  # batches are cut over dp; a value per replica that had rows
    MEGATRON_COMPUTE_PROTO = auto()  # verl's name for DP_COMPUTE_PROTO under a layout with tp or pp


_CUTS_BATCHES = {
    Dispatch.DP_COMPUTE_PROTO,
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC,
    Dispatch.DP_COMPUTE_METRIC,
    Dispatch.MEGATRON_COMPUTE_PROTO,
}
_GIVES_BATCHES = _CUTS_BATCHES - {Dispatch.DP_COMPUTE_METRIC}
_BY_REPLICA = _CUTS_BATCHES | {Dispatch.DP_COMPUTE}


class Execute(Enum):
    """Which ranks run a method."""

    ALL = auto()
    RANK_ZERO = auto()


class WorkerGroup(Protocol):
    """What dispatch needs to know of a worker group; custom functions receive it too."""

    @property
    def world_size(self) -> int: ...

    @property
    def layout(self) -> Layout: ...


@dataclass(frozen=True)
class CustomDispatch:
    """A user's own pair.

    `dispatch_fn(group, *args, **kwargs)` returns (args, kwargs) in which every value is a list with one entry
    per rank; `collect_fn(group, values)` gets the value of every rank that ran. Results and chained inputs
    are `BatchRef` handles there: `slice`, `take`, `chunk`, `concat` move no data.
    """

    dispatch_fn: Callable[..., tuple[Sequence[Sequence[Any]], Mapping[str, Sequence[Any]]]]
    collect_fn: Callable[[WorkerGroup, list[Any]], Any]


@dataclass(frozen=True)
class Registration:
    """What `@register` says about a method."""

    dispatch: Dispatch | CustomDispatch
    execute: Execute
    blocking: bool
    materialize_futures: bool
    rows: Rows | None
    parts: bool = False
    transfer: Transfer | None = None


@dataclass(frozen=True)
class OutputCuts:
    """Where a replica cuts its result into blocks, so that consumers of `dp_sizes` fetch whole blocks.

    `rows`: the rows of the batch of `n_rows` that the replica works on.
    """

    rows: NDArray[np.int64]
    n_rows: int
    dp_sizes: tuple[int, ...]

    def of(self, n_out: int) -> tuple[int, ...]:
        """Ascending cuts of a result of `n_out` rows: wherever the next row goes to another consumer.

        Only a result with k rows per row of the batch can be foreseen so; a partition that scatters rows
        so much that the blocks would be tiny is not cut either.
        """
        ratio = n_out // len(self.rows) if len(self.rows) else 0
        if ratio == 0 or n_out != ratio * len(self.rows):
            return ()
        places = (self.rows[:, None] * ratio + np.arange(ratio)).ravel()
        changes = np.zeros(n_out - 1, dtype=bool)
        for dp in self.dp_sizes:
            consumer = np.searchsorted(row_bounds(self.n_rows * ratio, dp), places, side="right")
            changes |= np.diff(consumer) != 0
        cuts = np.flatnonzero(changes) + 1
        return tuple(cuts.tolist()) if len(cuts) <= _MOST_CUTS else ()

    def at(self, rows: Sequence[int]) -> OutputCuts:
        """The same for a part of the replica's rows, given by their places among them."""
        return replace(self, rows=self.rows[np.asarray(rows, dtype=np.int64)])


@dataclass(frozen=True)
class Shares:
    """What every running rank receives, and whose results count.

    `rows` holds, for each replica, which rows of the batch it has; None when no batch was cut.
    """

    args: list[tuple[Any, ...]]  # [rank]
    kwargs: list[dict[str, Any]]  # [rank]
    rows: list[NDArray[np.int64]] | None = None  # [dp]
    n_rows: int = 0


def register(
    dispatch_mode: Dispatch | Mapping[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    rows: Rows | None = None,
    parts: bool = False,
    transfer: Transfer | None = None,
) -> Callable[[Method], Method]:
    """Make a worker method callable on its worker group.

    `dispatch_mode`: a `Dispatch`, or {"dispatch_fn": ..., "collect_fn": ...} (see `CustomDispatch`).
    `blocking`: the call returns the result instead of a future; every call may choose for itself.
    `materialize_futures`: the method receives batches as DataProto; otherwise as handles that it fetches
    in parts, `self.context.fetch(handle.select([...]))`.
    `rows`: which rows of the batch each replica gets, when not an even cut in order (see `share`).
    `parts`: the method is a generator of `Part`s, each stored and told to the future as it is made; the
    call's result is all of them in the caller's order.
    `transfer`: the method gives weights to another group's ranks, or takes them from there; its first
    argument is their `Meeting`. The caller passes what the giving method returns to the one that takes; both
    run then, at the same time.
    """
    if isinstance(dispatch_mode, Mapping):
        if set(dispatch_mode) != {"dispatch_fn", "collect_fn"}:
            raise DispatchError(
                f"custom dispatch needs exactly dispatch_fn and collect_fn, got {sorted(dispatch_mode)}"
            )
        dispatch: Dispatch | CustomDispatch = CustomDispatch(**dispatch_mode)
    else:
        dispatch = Dispatch(dispatch_mode)
    if dispatch is Dispatch.RANK_ZERO:
        execute_mode = Execute.RANK_ZERO
    if parts and dispatch not in _GIVES_BATCHES:
        raise DispatchError(
            "parts=True needs a mode that cuts batches over dp and returns one, such as "
            f"DP_COMPUTE_PROTO; this method has {dispatch}"
        )
    if transfer == "gives":
        blocking = False  # nothing can be waited for before someone takes
    registration = Registration(
        dispatch, Execute(execute_mode), blocking, materialize_futures, rows, parts, transfer
    )

    def mark(method: Method) -> Method:
        setattr(method, _REGISTERED, registration)
        return method

    return mark


def registered_methods(cls: type) -> dict[str, Registration]:
    """Name and registration of every registered method of a worker class, inherited ones too.

    A method that takes the place of a registered one is registered as that was, unless it says otherwise.
    """
    found: dict[str, Registration] = {}
    for name in dir(cls):
        owners = (vars(owner)[name] for owner in cls.__mro__ if name in vars(owner))
        marks = [mark for method in owners if (mark := getattr(method, _REGISTERED, None)) is not None]
        if marks and callable(getattr(cls, name)):
            found[name] = marks[0]
    return found


def share(
    registration: Registration,
    group: WorkerGroup,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rows: Rows | None = None,
) -> Shares:
    """What every rank that runs receives.

    `rows` (the DP modes that cut batches) gives each replica its rows: a list of indices per replica, or a
    function of (batch, layout) that returns one; rows left out are not processed. Without it the batch is cut
    in order into parts that differ by at most one row. Replicas without rows get a batch of 0 rows.
    Raises DispatchError when sizes do not fit.
    """
    dispatch = registration.dispatch
    rows = registration.rows if rows is None else rows
    if rows is not None and dispatch not in _CUTS_BATCHES:
        raise DispatchError(f"rows= needs a mode that cuts batches over dp, this method has {dispatch}")
    n_ranks = group.world_size if registration.execute is Execute.ALL else 1
    if isinstance(dispatch, CustomDispatch):
        lists, named = dispatch.dispatch_fn(group, *args, **kwargs)
        return _per_rank(lists, named, n_ranks, lambda entries: _entries(entries, (group.world_size,)))
    if dispatch is Dispatch.ALL_TO_ALL:
        return _per_rank(args, kwargs, n_ranks, lambda entries: _entries(entries, (group.world_size,)))
    if dispatch is Dispatch.DP_COMPUTE:
        return _per_rank(args, kwargs, n_ranks, lambda entries: _by_replica(entries, group.layout))
    if dispatch in _CUTS_BATCHES:
        return _share_batches(dispatch, group.layout, args, kwargs, rows, n_ranks)
    return _per_rank(args, kwargs, n_ranks, lambda value: [value] * group.world_size)


def collect(registration: Registration, group: WorkerGroup, shares: Shares, values: Sequence[Any]) -> Any:
    """The result of a call from the values of the ranks that ran, in rank order."""
    dispatch = registration.dispatch
    if isinstance(dispatch, CustomDispatch):
        return dispatch.collect_fn(group, list(values))
    if registration.execute is Execute.RANK_ZERO:
        return values[0]
    if dispatch not in _BY_REPLICA:
        return list(values)
    results = [values[group.layout.collect_rank(replica)] for replica in range(group.layout.dp)]
    if shares.rows is not None and shares.n_rows:
        busy = [replica for replica, rows in enumerate(shares.rows) if len(rows)]
        results, rows = [results[i] for i in busy], [shares.rows[i] for i in busy]
        if dispatch is not Dispatch.DP_COMPUTE_METRIC and all(isinstance(r, BatchRef) for r in results):
            return _in_order(results, rows)
    elif dispatch in _GIVES_BATCHES and isinstance(results[0], BatchRef):
        return BatchRef.concat(results)
    return results


def even_rows(n_rows: int, dp: int) -> list[NDArray[np.int64]]:
    """Rows of each replica: in order, parts that differ by at most one row."""
    return np.array_split(np.arange(n_rows), dp)


def _per_rank(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    n_ranks: int,
    spread: Callable[[Any], Sequence[Any]],
) -> Shares:
    """Shares in which rank i receives entry i of `spread(argument)`."""
    positional = [spread(value) for value in args]
    named = {name: spread(value) for name, value in kwargs.items()}
    return Shares(
        args=[tuple(entries[rank] for entries in positional) for rank in range(n_ranks)],
        kwargs=[{name: entries[rank] for name, entries in named.items()} for rank in range(n_ranks)],
    )


def _entries(entries: Any, sizes: tuple[int, ...]) -> Sequence[Any]:
    if not isinstance(entries, list | tuple) or len(entries) not in sizes:
        got = f"{len(entries)}" if isinstance(entries, list | tuple) else f"a {type(entries).__name__}"
        wanted = " or ".join(str(size) for size in sizes)
        raise DispatchError(f"this dispatch mode takes lists of {wanted} entries, got {got}")
    return entries


def _by_replica(entries: Any, layout: Layout) -> Sequence[Any]:
    """One entry per rank from a list with one per replica, or already one per rank."""
    entries = _entries(entries, (layout.dp, layout.world))
    if len(entries) == layout.world:
        return entries
    return [entries[layout.coords(rank).dp] for rank in range(layout.world)]


def _share_batches(
    dispatch: Dispatch | CustomDispatch,
    layout: Layout,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rows: Rows | None,
    n_ranks: int,
) -> Shares:
    if dispatch is Dispatch.DP_COMPUTE_PROTO_WITH_FUNC and not (args and callable(args[0])):
        raise DispatchError("DP_COMPUTE_PROTO_WITH_FUNC takes a function as its first argument")
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, BatchRef)]
    if not batches:
        return _per_rank(args, kwargs, n_ranks, lambda value: [value] * layout.world)
    n_rows = batches[0].n_rows
    if any(batch.n_rows != n_rows for batch in batches):
        raise DispatchError(f"batches of one call differ in rows: {[batch.n_rows for batch in batches]}")
    parts = even_rows(n_rows, layout.dp) if rows is None else _checked_rows(rows, batches[0], layout)

    def spread(value: Any) -> Sequence[Any]:
        if not isinstance(value, BatchRef):
            return [value] * layout.world
        shards = [value.take(part) for part in parts]
        return [shards[layout.coords(rank).dp] for rank in range(layout.world)]

    shares = _per_rank(args, kwargs, n_ranks, spread)
    return Shares(shares.args, shares.kwargs, parts, n_rows)


def _checked_rows(rows: Rows, batch: BatchRef, layout: Layout) -> list[NDArray[np.int64]]:
    parts = [np.asarray(part, dtype=np.int64) for part in (rows(batch, layout) if callable(rows) else rows)]
    if len(parts) != layout.dp:
        raise DispatchError(f"rows= has {len(parts)} parts, the layout has dp={layout.dp}")
    everything = np.concatenate(parts)
    if len(np.unique(everything)) != len(everything):
        raise DispatchError("rows= gives a row to more than one place")
    if len(everything) and not 0 <= everything.min() <= everything.max() < batch.n_rows:
        raise DispatchError(
            f"rows= goes from {everything.min()} to {everything.max()}, the batch has {batch.n_rows} rows"
        )
    return parts


def _in_order(results: Sequence[BatchRef], rows: Sequence[NDArray[np.int64]]) -> BatchRef:
    """One batch of the replicas' results, in the order of the rows they came from.

    A replica may return k rows for each of its own (samples per prompt), the same k everywhere, or none.
    """
    joined = BatchRef.concat(list(results))
    n_out, n_in = [result.n_rows for result in results], [len(part) for part in rows]
    ratio = n_out[0] // n_in[0]
    order = np.argsort(np.concatenate(rows), kind="stable")
    if (order == np.arange(len(order))).all() or not any(n_out):
        return joined
    if n_out != [ratio * n for n in n_in]:
        raise DispatchError(
            f"replicas of {n_in} rows returned {n_out}: results cannot go back in the caller's order "
            f"unless each row gives the same number of rows"
        )
    return joined.take((order[:, None] * ratio + np.arange(ratio)).ravel())
