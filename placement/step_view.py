"""One step as lanes: what each pool runs, how long it is idle, what it waits for, and the critical path."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rolemesh.placement.timeline import Span

_SHORT = 1e-9  # of a step: what is shorter is rounding, not a gap


@dataclass(frozen=True)
class Piece:
    """An operation on a lane: from its first rank's start to its last rank's end."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Gap:
    """Time in which a lane runs nothing; `waits_for` is the operation whose end it waits for."""

    start_s: float
    end_s: float
    waits_for: str


@dataclass(frozen=True)
class Lane:
    """A pool, or a role without devices, over one step."""

    name: str
    pieces: tuple[Piece, ...]
    gaps: tuple[Gap, ...]
    idle: float  # part of the step

    def waits(self) -> dict[str, float]:
        """Seconds of waiting by the operation waited for, longest first."""
        seconds: dict[str, float] = {}
        for gap in self.gaps:
            seconds[gap.waits_for] = seconds.get(gap.waits_for, 0.0) + gap.end_s - gap.start_s
        return dict(sorted(seconds.items(), key=lambda entry: -entry[1]))


@dataclass(frozen=True)
class StepView:
    """A step of `length_s` from 0. `critical_path` are operations that each waited for the one before."""

    length_s: float
    lanes: tuple[Lane, ...]
    critical_path: tuple[str, ...]
    path_s: float  # seconds that the path's operations cover


def step_view(
    spans: Sequence[Span], waits: Mapping[str, Collection[str]], lanes: Iterable[str] = ()
) -> StepView:
    """The spans of one step, in which every operation runs once, seen as lanes.

    `waits` names for each operation those it waits for (`schedule.waits_for`); beside these it waits for its
    pools. `lanes` gives an order; other pools follow as they appear. Times are shifted to begin at 0.
    """
    if not spans:
        return StepView(0.0, (), (), 0.0)
    zero = min(span.start_s for span in spans)
    length_s = max(span.end_s for span in spans) - zero
    pieces: dict[str, dict[str, Piece]] = {name: {} for name in lanes}
    for span in spans:
        mine = pieces.setdefault(span.pool, {})
        start_s, end_s = span.start_s - zero, span.end_s - zero
        if span.name in mine:
            start_s, end_s = min(start_s, mine[span.name].start_s), max(end_s, mine[span.name].end_s)
        mine[span.name] = Piece(span.name, start_s, end_s)
    whole: dict[str, Piece] = {}
    for mine in pieces.values():
        for name, piece in mine.items():
            known = whole.get(name, piece)
            whole[name] = Piece(name, min(piece.start_s, known.start_s), max(piece.end_s, known.end_s))
    ordered = {
        lane: sorted(mine.values(), key=lambda piece: (piece.start_s, piece.end_s))
        for lane, mine in pieces.items()
        if mine
    }
    before = _before(ordered, whole, waits)
    path = _critical(whole, before)
    return StepView(
        length_s,
        tuple(_lane(lane, mine, whole, before, length_s) for lane, mine in ordered.items()),
        tuple(path),
        _covered([whole[name] for name in path]),
    )


def _before(
    lanes: Mapping[str, Sequence[Piece]],
    whole: Mapping[str, Piece],
    waits: Mapping[str, Collection[str]],
) -> dict[str, set[str]]:
    """For each operation what it waited for: by the graph, and on its lanes those that ran before it."""
    before = {name: {other for other in waits.get(name, ()) if other in whole} for name in whole}
    for mine in lanes.values():
        for i, piece in enumerate(mine):
            before[piece.name] |= {other.name for other in mine[:i] if other.end_s <= piece.start_s}
    # What started later is of another step, and was not waited for.
    return {
        name: {
            other
            for other in others
            if whole[other].start_s < whole[name].start_s or whole[other].end_s <= whole[name].start_s
        }
        for name, others in before.items()
    }


def _critical(whole: Mapping[str, Piece], before: Mapping[str, set[str]]) -> list[str]:
    """Back from the operation that ends last, always to the one that let go last."""
    path = [max(whole, key=lambda name: whole[name].end_s)]
    while others := before[path[-1]] - {*path}:
        path.append(max(sorted(others), key=lambda name: whole[name].end_s))
    return path[::-1]


def _lane(
    name: str,
    mine: Sequence[Piece],
    whole: Mapping[str, Piece],
    before: Mapping[str, set[str]],
    length_s: float,
) -> Lane:
    gaps, until = [], 0.0
    for piece in mine:
        if piece.start_s - until > _SHORT * length_s:
            others = sorted(before[piece.name], key=lambda other: whole[other].end_s)
            gaps.append(Gap(until, piece.start_s, others[-1] if others else "the controller"))
        until = max(until, piece.end_s)
    if length_s - until > _SHORT * length_s:
        gaps.append(Gap(until, length_s, max(whole, key=lambda other: whole[other].end_s)))
    idle_s = sum(gap.end_s - gap.start_s for gap in gaps)
    return Lane(name, tuple(mine), tuple(gaps), idle_s / length_s if length_s else 0.0)


def _covered(pieces: Iterable[Piece]) -> float:
    """Seconds in which at least one of the pieces runs."""
    total, until = 0.0, 0.0
    for piece in sorted(pieces, key=lambda piece: piece.start_s):
        total += max(0.0, piece.end_s - max(piece.start_s, until))
        until = max(until, piece.end_s)
    return total
