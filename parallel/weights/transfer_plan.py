"""Which numbers of which Hugging Face tensor go from which rank to which: computed from sizes alone.

Each side says what its ranks hold as cuts of Hugging Face tensors (`transfer_sides`); the plan follows from
the overlaps. Every number that a target rank holds comes to it once, from one source rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from rolemesh.parallel.weights.pieces import Piece
from rolemesh.parallel.weights.transfer_sides import Side

Distance = Callable[[int, int], int]
"""How far apart a source and a target rank are: SAME process, NEAR (shared memory), FAR (a network)."""

SAME, NEAR, FAR = 0, 1, 2
ALIGN_BYTES = 8


class TransferError(RuntimeError):
    """Weights that cannot be, or were not, brought from one role to another; says which, whose and why."""


class Box(NamedTuple):
    """Numbers `start` to `stop` of an array, along each axis."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(high - low for low, high in zip(self.start, self.stop, strict=True))

    def meet(self, other: Box) -> Box | None:
        """What both hold, or None."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return None if any(low >= high for low, high in zip(start, stop, strict=True)) else Box(start, stop)

    def without(self, hole: Box) -> Iterator[Box]:
        """The rest of this box around `hole`, which lies in it, as disjoint boxes."""
        start, stop = list(self.start), list(self.stop)
        for axis in range(len(start)):
            if start[axis] < hole.start[axis]:
                yield Box(tuple(start), (*stop[:axis], hole.start[axis], *stop[axis + 1 :]))
            if hole.stop[axis] < stop[axis]:
                yield Box((*start[:axis], hole.stop[axis], *start[axis + 1 :]), tuple(stop))
            start[axis], stop[axis] = hole.start[axis], hole.stop[axis]

    def split(self, most: int) -> Iterator[Box]:
        """The box in parts of at most `most` numbers, cut along the outermost axes."""
        shape = self.shape
        if prod(shape) <= most:
            yield self
            return
        axis = next(axis for axis, size in enumerate(shape) if size > 1)
        step = max(1, most // prod(shape[axis + 1 :]))
        for low in range(self.start[axis], self.stop[axis], step):
            high = min(low + step, self.stop[axis])
            part = Box(
                (*self.start[:axis], low, *self.start[axis + 1 :]),
                (*self.stop[:axis], high, *self.stop[axis + 1 :]),
            )
            yield from part.split(most)


class Landing(NamedTuple):
    """Where a box goes on a target rank: from `start` of its tensor `name`."""

    rank: int
    name: str
    start: tuple[int, ...]


class Move(NamedTuple):
    """`box` of a Hugging Face tensor, from `start` of the source rank's tensor `name`, to every landing."""

    tensor: str
    box: Box
    source: int
    name: str
    start: tuple[int, ...]
    to: tuple[Landing, ...]

    @property
    def n_numbers(self) -> int:
        return prod(self.box.shape)

    def split(self, most: int) -> Iterator[Move]:
        """The move in parts of at most `most` numbers."""
        for box in self.box.split(most):
            by = tuple(a - b for a, b in zip(box.start, self.box.start, strict=True))
            to = tuple(landing._replace(start=_plus(landing.start, by)) for landing in self.to)
            yield self._replace(box=box, start=_plus(self.start, by), to=to)


@dataclass(frozen=True)
class TransferPlan:
    """The moves, in the order in which they are made: pipeline stages send side by side."""

    source: Side
    target: Side
    moves: tuple[Move, ...]

    def wire(self, tensor: str) -> torch.dtype:
        """The type in which a tensor's numbers travel: the smaller one of the two sides'."""
        source, target = self.source.dtype_of(tensor), self.target.dtype_of(tensor)
        return source if source.itemsize < target.itemsize else target

    def n_bytes(self, move: Move) -> int:
        """Bytes of a move on its way."""
        return move.n_numbers * self.wire(move.tensor).itemsize

    def sent_bytes(self) -> list[int]:
        """Bytes that leave each source rank, a copy for each target rank."""
        sent = [0] * self.source.n_ranks
        for move in self.moves:
            sent[move.source] += self.n_bytes(move) * len(move.to)
        return sent

    def received_bytes(self) -> list[int]:
        """Bytes that come to each target rank."""
        received = [0] * self.target.n_ranks
        for move in self.moves:
            for landing in move.to:
                received[landing.rank] += self.n_bytes(move)
        return received

    def table(self, most: int = 40) -> str:
        """The first `most` moves, then what each rank sends and receives."""
        rows = [("tensor", "numbers", "from rank", "of", "to rank", "MiB")]
        for move in self.moves[:most]:
            numbers = ", ".join(f"{a}:{b}" for a, b in zip(*move.box, strict=True))
            targets = " ".join(str(landing.rank) for landing in move.to)
            size = f"{self.n_bytes(move) / 2**20:.2f}"
            rows.append((move.tensor, f"[{numbers}]", str(move.source), move.name, targets, size))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if len(self.moves) > most:
            lines.append(f"... {len(self.moves) - most} more")
        for what, by_rank in (("sends", self.sent_bytes()), ("receives", self.received_bytes())):
            lines += [f"rank {rank} {what} {n / 2**20:.2f} MiB" for rank, n in enumerate(by_rank)]
        return "\n".join(lines)


class _Held(NamedTuple):
    """A box of a tensor in a rank's memory: from `start` of its own tensor `name`."""

    rank: int
    name: str
    start: tuple[int, ...]


def plan_transfer(source: Side, target: Side, distance: Distance = lambda s, t: FAR) -> TransferPlan:
    """The moves that give every target rank all that it holds.

    Of several ranks that hold a box (replicas, and what is on every tp rank) the nearest sends it, and among
    equally near ones the one that has least to send so far; what is NEAR is packed once for all its readers.

    Raises TransferError naming a tensor that the source does not have, or has not whole.
    """
    held: dict[str, dict[Box, list[_Held]]] = defaultdict(lambda: defaultdict(list))
    for tensor, box, at in _pieces(source):
        held[tensor][box].append(at)
    wanted: dict[str, list[tuple[Box, _Held]]] = defaultdict(list)
    for tensor, box, at in _pieces(target):
        wanted[tensor].append((box, at))
    if absent := [name for name in wanted if name not in held]:
        raise TransferError(
            f"{target} needs {len(absent)} tensors that {source} does not have: {', '.join(absent[:5])}"
        )
    order = _interleaved({tensor: boxes for tensor, boxes in held.items() if tensor in wanted})
    choose, moves = _Chooser(source.n_ranks, distance), list[Move]()
    for tensor in order:
        moves += _moves(tensor, held[tensor], wanted[tensor], choose)
    return TransferPlan(source, target, tuple(moves))


def rounds(
    plan: TransferPlan, bucket_bytes: int, landings: Callable[[Move], tuple[Landing, ...]] = lambda m: m.to
) -> list[list[Move]]:
    """The plan's moves in rounds, in which no rank packs or receives more than `bucket_bytes`.

    `landings` gives those of a move that count: what stays in a process needs no room.
    """
    made: list[list[Move]] = [[]]
    room: dict[tuple[str, int], int] = {}
    for whole in plan.moves:
        n_bytes = plan.n_bytes(whole)
        for move in whole.split(max(1, bucket_bytes * whole.n_numbers // n_bytes)):
            size, targets = aligned(plan.n_bytes(move)), {landing.rank for landing in landings(move)}
            keys = [("source", move.source), *(("target", rank) for rank in targets)] if targets else []
            if any(room.get(key, bucket_bytes) < size for key in keys):
                made.append([])
                room.clear()
            for key in keys:
                room[key] = room.get(key, bucket_bytes) - size
            made[-1].append(move)
    return [moves for moves in made if moves]


def aligned(n_bytes: int) -> int:
    """`n_bytes` rounded up, so that numbers of any type may follow."""
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


class _Chooser:
    """Which of several ranks sends a box, so that what they send is even."""

    def __init__(self, n_sources: int, distance: Distance) -> None:
        self._load, self._distance = [0] * n_sources, distance

    def pick(self, holders: list[_Held], target: int, n_numbers: int, packed: set[int]) -> _Held:
        """`packed` are the ranks that pack this very box already."""
        far = {at.rank: self._distance(at.rank, target) for at in holders}
        chosen = min(
            holders,
            key=lambda at: (
                far[at.rank],
                far[at.rank] == NEAR and at.rank not in packed,
                self._load[at.rank],
                at.rank,
            ),
        )
        if far[chosen.rank] == FAR or (far[chosen.rank] == NEAR and chosen.rank not in packed):
            self._load[chosen.rank] += n_numbers
        if far[chosen.rank] != SAME:
            packed.add(chosen.rank)
        return chosen


def _moves(
    tensor: str, held: dict[Box, list[_Held]], wanted: Iterable[tuple[Box, _Held]], choose: _Chooser
) -> list[Move]:
    found: dict[tuple[Box, _Held], list[Landing]] = defaultdict(list)
    packed: dict[Box, set[int]] = defaultdict(set)
    for want, at in wanted:
        rest = [want]
        for box, holders in held.items():
            left = list[Box]()
            for part in rest:
                if (common := part.meet(box)) is None:
                    left.append(part)
                    continue
                left += part.without(common)
                chosen = choose.pick(holders, at.rank, prod(common.shape), packed[common])
                start = _plus(chosen.start, _minus(common.start, box.start))
                landing = Landing(at.rank, at.name, _plus(at.start, _minus(common.start, want.start)))
                found[common, chosen._replace(start=start)].append(landing)
            if not (rest := left):
                break
        if rest:
            raise TransferError(
                f"no source rank holds numbers {rest[0].start} to {rest[0].stop} of {tensor}, which target "
                f"rank {at.rank} needs"
            )
    return [Move(tensor, box, at.rank, at.name, at.start, tuple(to)) for (box, at), to in found.items()]


def _interleaved(held: dict[str, dict[Box, list[_Held]]]) -> list[str]:
    """The tensors' names, so that ranks which hold different ones (pipeline stages, experts) all send from
    the start: each stage's tensors stay in order, and all stages are equally far at any time.
    """
    sizes = {name: sum(prod(box.shape) for box in boxes) for name, boxes in held.items()}
    owner = {name: min(at.rank for holders in held[name].values() for at in holders) for name in held}
    totals, done = defaultdict[int, int](int), defaultdict[int, int](int)
    for name, size in sizes.items():
        totals[owner[name]] += size
    place = {}
    for i, (name, size) in enumerate(sizes.items()):
        place[name] = ((done[owner[name]] + size / 2) / totals[owner[name]], i)
        done[owner[name]] += size
    return sorted(place, key=lambda name: place[name])


def _pieces(side: Side) -> Iterator[tuple[str, Box, _Held]]:
    boxed: dict[int, tuple[Box, tuple[int, ...]]] = {}  # replicas share their cuts
    for rank, holding in enumerate(side.holdings()):
        for name, cut in holding.items():
            for piece in cut.pieces:
                if id(piece) not in boxed:
                    boxed[id(piece)] = (_box(piece), tuple(s.start for s in piece.target))
                box, start = boxed[id(piece)]
                yield piece.tensor, box, _Held(rank, name, start)


def _box(piece: Piece) -> Box:
    return Box(tuple(s.start for s in piece.source), tuple(s.stop for s in piece.source))


def _plus(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _minus(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))
