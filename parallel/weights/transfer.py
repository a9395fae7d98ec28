"""Weights from the ranks of one role to those of another: a process's end of every transfer it takes part in.

The source's ranks call `Links.give`, the target's ranks iterate over `Links.take`; where both roles live in
the same processes, every process gives first and `take` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from rolemesh.parallel.weights.transfer_exchange import Exchange, Land, TransferReport
from rolemesh.parallel.weights.transfer_link import Link, Meeting, Member
from rolemesh.parallel.weights.transfer_plan import TransferError
from rolemesh.parallel.weights.transfer_sides import Side

Lend = Callable[[], AbstractContextManager[Mapping[str, Tensor]]]
"""Makes a source's tensors, by their names there, stay where they are for as long as they are read."""


@dataclass(frozen=True)
class _Given:
    """A source that waits in this process for the target's turn."""

    side: Side
    lend: Lend


class Links:
    """A process's links, by the pair of roles; each is made at the first transfer and serves the later ones.

    `report` says what the last transfer moved through this process.
    """

    def __init__(self) -> None:
        self.report = TransferReport()
        self._links: dict[str, Link] = {}
        self._given: dict[str, _Given] = {}

    def give(self, meeting: Meeting, rank: int, what: str, side: Side, lend: Lend) -> None:
        """Send what `lend` gives, named as `side` holds it, from source rank `rank` to whoever takes it.

        `what` names this process in messages. Returns when all is sent and read; where source and target
        share processes it returns at once, and `take` does it.

        Raises TransferError when another process does not come within the meeting's limit, or is lost.
        """
        self.report = TransferReport()
        if meeting.together:
            self._given[meeting.pair] = _Given(side, lend)
            return
        member = Member(what, _gpu(), source=side if rank == 0 else None)
        link = self._link(meeting, meeting.source_process(rank), member)
        for _ in self._run(link, lend, None):
            raise AssertionError("a source receives nothing")

    def take(
        self, meeting: Meeting, rank: int, what: str, side: Side, land: Land | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all that target rank `rank` holds, by the names of `side`'s holdings, each as
        soon as it is whole. The iterator must be exhausted.

        A tensor has the shape that the holding says, and the rank's own part of it is filled in. It lies
        where `land` puts it, else in new memory that is given up with it.

        Raises TransferError as `give`, and when the source lacks a tensor.
        """
        self.report = TransferReport()
        given = None
        if meeting.together and (given := self._given.pop(meeting.pair, None)) is None:
            raise TransferError(f"transfer {meeting.pair}: nothing was given in the process of {what}")
        described = given.side if given is not None and rank == 0 else None
        member = Member(what, _gpu(), source=described, target=side if rank == 0 else None)
        link = self._link(meeting, meeting.target_process(rank), member)
        yield from self._run(link, given.lend if given else _nothing, land or _new_memory)

    def link(self, meeting: Meeting) -> Link | None:
        """This process's end of the transfers of `meeting`; None before the first."""
        link = self._links.get(meeting.pair)
        return link if link is not None and link.meeting.id == meeting.id else None

    def end(self, meeting: Meeting) -> None:
        """End this process's part in the transfers of `meeting`: who waits for it learns of that at once."""
        self._given.pop(meeting.pair, None)
        if (link := self._links.pop(meeting.pair, None)) is not None:
            link.close()

    def close(self) -> None:
        """End every link of this process."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._given.clear()

    def _run(self, link: Link, lend: Lend, land: Land | None) -> Iterator[tuple[str, Tensor]]:
        whole = False
        try:
            with lend() as tensors:
                exchange = Exchange(link, tensors, land)
                self.report = exchange.report
                yield from exchange.run()
            whole = True
        finally:
            if not whole:  # an error here, or in who iterates: the others must not wait for this process
                self.end(link.meeting)

    def _link(self, meeting: Meeting, process: int, member: Member) -> Link:
        link = self._links.get(meeting.pair)
        if link is not None and link.meeting.id == meeting.id:
            return link
        if link is not None:
            del self._links[meeting.pair]
            link.close()
        link = self._links[meeting.pair] = Link.meet(meeting, process, member)
        return link


def _gpu() -> str | None:
    """Which GPU this process uses, by its own identity; None for a process on the CPU."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _nothing() -> AbstractContextManager[Mapping[str, Tensor]]:
    return nullcontext({})


def _new_memory(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu" if _gpu() is None else "cuda")
