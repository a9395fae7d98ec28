"""What becomes of meta information when batches are put together; batches and handles on batches share it."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from rolemesh.engine.columns import ProtoError, values_equal


def merge_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The meta information of a concat: a deep copy of what all parts say.

    `metrics` (a dict, or a list of dicts, per part) becomes one dict of lists over the parts, as in verl.
    `timing` and every name that starts so (`timing.gen`, `timing_s/gen`) takes the largest value: parts run
    side by side, and the slowest one is what the call took. Any other name must be equal wherever it appears.

    Raises:
        ProtoError: naming the key and the values that differ.
    """
    merged: dict[str, Any] = {}
    for meta in metas:
        for name, value in meta.items():
            if name == "metrics":
                merged[name] = _metric_lists([merged.get(name), value])
            elif name not in merged:
                merged[name] = value
            elif name.startswith("timing"):
                merged[name] = _slowest(merged[name], value)
            elif not values_equal(merged[name], value):
                raise ProtoError(
                    f"Conflicting values for meta_info key {name!r}: {merged[name]!r} and {value!r}"
                )
    return copy.deepcopy(merged)


def union_meta(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The meta information of a union: equal on both sides counts once, the rest is as in `merge_meta`."""
    news = {k: v for k, v in theirs.items() if k not in mine or not values_equal(mine[k], v)}
    clashing = {k: v for k, v in mine.items() if k in news}
    return {**copy.deepcopy(dict(mine)), **merge_meta([clashing, news])}


def _metric_lists(parts: Sequence[Any]) -> dict[str, list]:
    """Dicts (also in lists; None counts as no metrics) to one dict of lists; lists are joined, not nested."""
    lists: dict[str, list] = {}
    for part in parts:
        for record in part if isinstance(part, list) else [part or {}]:
            for name, value in record.items():
                lists.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return lists


def _slowest(left: Any, right: Any) -> Any:
    """The larger of two durations, name by name where they are dicts."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return {**left, **{k: _slowest(left[k], v) if k in left else v for k, v in right.items()}}
    return max(left, right)
