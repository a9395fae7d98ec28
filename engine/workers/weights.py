"""The two ends of a weight transfer, as workers use them.

A method that gives weights is marked `@gives_weights`, one that takes them `@takes_weights`; their first
argument is the `Meeting` with the other side's ranks, and they call `give` or `take` with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from rolemesh.engine.dispatch import Dispatch, Transfer, register
from rolemesh.engine.worker import Worker
from rolemesh.parallel.weights.transfer import Lend, Links
from rolemesh.parallel.weights.transfer_exchange import Land
from rolemesh.parallel.weights.transfer_link import Meeting
from rolemesh.parallel.weights.transfer_sides import Side

Method = TypeVar("Method", bound=Callable[..., Any])

_LINKS = "weight links"


def gives_weights(method: Method) -> Method:
    """Mark a method that gives weights to another group; it runs on every rank when they are taken."""
    return _one_side(method, "gives")


def takes_weights(method: Method) -> Method:
    """Mark a method that takes what another group gives; it runs on every rank."""
    return _one_side(method, "takes")


def _one_side(method: Method, transfer: Transfer) -> Method:
    @functools.wraps(method)
    def run(worker: Worker, meeting: Meeting, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(worker, meeting, *args, **kwargs)
        except BaseException:
            if isinstance(meeting, Meeting):  # whatever failed here: the others must not wait for this rank
                _links(worker).end(meeting)
            raise

    marked: Any = register(Dispatch.ONE_TO_ALL, transfer=transfer)(run)
    return marked


def give(worker: Worker, meeting: Meeting, side: Side, lend: Lend) -> None:
    """Send this rank's tensors, named as `side` holds them, to who meets it. See `Links.give`."""
    links = _links(worker)
    worker.context.phase("sending weights")
    links.give(meeting, worker.rank, worker.name, side, lend)
    worker.context.phase("")
    _note(worker, links, meeting)


def take(
    worker: Worker, meeting: Meeting, side: Side, land: Land | None = None
) -> Iterator[tuple[str, Tensor]]:
    """What comes to this rank: (name, tensor) pairs, each when it is whole. See `Links.take`."""
    links = _links(worker)
    worker.context.phase("receiving weights")
    yield from links.take(meeting, worker.rank, worker.name, side, land)
    worker.context.phase("")
    _note(worker, links, meeting)


def _links(worker: Worker) -> Links:
    """One for all roles of the process."""
    links: Links = worker.context.shared.setdefault(_LINKS, Links())
    return links


def _note(worker: Worker, links: Links, meeting: Meeting) -> None:
    """Show with the call's span what went through this rank, and what it holds to send and receive."""
    report, link = links.report, links.link(meeting)
    if link is None:  # roles of one process: the taker's turn moves the weights
        return
    worker.context.notes.update(
        sent_bytes=report.sent_bytes,
        received_bytes=report.received_bytes,
        copied_bytes=report.copied_bytes,
        buffer_bytes=link.buffer_bytes,
        transfer_s=report.seconds,
        **{f"received_bytes/{route}": n_bytes for route, n_bytes in report.by_route.items()},
    )
