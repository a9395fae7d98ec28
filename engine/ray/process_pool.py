"""A process beside the pools, for a role that runs no model: a user's reward function."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rolemesh.engine.ray.host import HostPlace
from rolemesh.engine.ray.host_group import Seat
from rolemesh.engine.ray.pools import ResourcePool

_log = logging.getLogger(__name__)


class ProcessPool(ResourcePool):
    """One process on the driver's node that holds no device and no CPU of the cluster; worker groups see a
    pool.
    """

    def __init__(self, name_prefix: str, **options: Any) -> None:
        """`options` are those of `ResourcePool`."""
        super().__init__([1], name_prefix=name_prefix, device="cpu", **options)

    def create(self, wait_s: float = 0.0, report: Callable[[str], None] = _log.info) -> None:
        """Nothing is reserved, so nothing is waited for."""
        if self._seats:
            return
        place = HostPlace(
            pool=self.name,
            rank=0,
            world_size=1,
            local_rank=0,
            node=ray.util.get_node_ip_address(),
            device="cpu",
            threads=1,
            collective_timeout_s=self._collective_timeout_s,
            fetch_timeout_s=self._fetch_timeout_s,
            logs=self._logs,
        )
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._seats = [Seat(place, {"num_cpus": 0, "scheduling_strategy": here})]
