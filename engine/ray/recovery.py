"""Whether an error of a run comes from the loss of processes, which others may replace."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ray.exceptions import ObjectLostError, RayError

from rolemesh.engine.errors import CallError, CallTimeout, WorkerDied
from rolemesh.engine.ray.pools import ResourcePool

_SETTLE_S = 60.0  # for what a pool was asked before the loss: an engine takes longer to start


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


class Spared:
    """Pools that outlive the loss of others, with their worker groups: none of their models learns, so they
    hold nothing of the step that was lost.
    """

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}

    def take(self) -> dict[str, Any]:
        """The worker groups of spared pools, by role; whoever takes them ends them."""
        taken, self._groups = self._groups, {}
        return taken

    def keep(
        self, pools: Sequence[ResourcePool], groups: Mapping[str, Any], learning: Collection[str]
    ) -> list[ResourcePool]:
        """Spare what can be spared of a run's pools, of which `learning` names those with models that learn.
        The others are shut down, and so are those that are not soon done with what they were asked.

        Returns the pools that are left.
        """
        left, deadline = [], time.monotonic() + _SETTLE_S
        for pool in sorted(pools, key=lambda pool: pool.name not in learning):  # what waits for them fails
            if pool.name not in learning and pool.settles(deadline - time.monotonic()):
                left.append(pool)
            else:
                pool.shutdown()
        self._groups = {role: group for role, group in groups.items() if group.resource_pool in left}
        return left
