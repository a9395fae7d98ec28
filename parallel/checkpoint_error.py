"""What is wrong with a folder of weights, and how it is said; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable


class CheckpointError(ValueError):
    """A checkpoint that is incomplete, damaged or of another model; the message names tensors or files."""


def listed(names: Iterable[str], limit: int = 8) -> str:
    """Sorted names for a message, the first `limit` of them and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
