"""Whether an error of a run comes from the loss of processes, which others may replace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.exceptions import ObjectLostError, RayError

from rolemesh.engine.errors import CallError, CallTimeout, WorkerDied


def lost_workers(error: BaseException, groups: Mapping[str, Any]) -> CallError | None:
    """The death or hang that `error` comes from; None where an operation raised of its own accord.

    `groups` are the run's worker groups, whose processes are asked: who loses a partner in a collective
    raises, too, and may be heard first.
    """
    if isinstance(error, WorkerDied | CallTimeout):
        return error
    if not isinstance(error, CallError | RayError):
        return None
    pools = {id(group.resource_pool): group for group in groups.values()}
    causes = (group.lost() for group in pools.values())
    if (cause := next((cause for cause in causes if cause is not None), None)) is not None:
        return cause
    for lost in (error, error.__cause__):
        if isinstance(lost, ObjectLostError):
            return CallError(f"a batch was lost with the node that held it: {lost}")
    return None
