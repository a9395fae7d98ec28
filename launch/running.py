"""How many responses were really being written at a time, from a step's spans."""

from __future__ import annotations

from collections.abc import Sequence

from rolemesh.placement.timeline import Span

OPERATION, NOTE = "generate", "running"


def running_requests(spans: Sequence[Span]) -> tuple[tuple[float, int], ...]:
    """(seconds since generation began, responses still being written), summed over the replicas that noted
    it; empty where none did. A number holds until the next.
    """
    changes: list[tuple[float, int]] = []
    for span in spans:
        before = 0
        for seconds, left in span.args.get(NOTE, ()) if span.name == OPERATION else ():
            changes.append((span.start_s + seconds, left - before))
            before = left
    if not changes:
        return ()
    changes.sort()
    began, left = changes[0][0], 0
    found: dict[float, int] = {}
    for at, change in changes:
        left += change
        found[at - began] = left
    return tuple(found.items())
