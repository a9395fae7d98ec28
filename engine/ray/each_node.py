"""A function on every node that has devices, once on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rolemesh.engine.ray.cluster import node_ids, read_cluster
from rolemesh.placement.cluster import DeviceKind


def on_each_node(
    function: Callable[..., Any], *args: Any, device_kind: DeviceKind, limit_s: float
) -> dict[str, Any]:
    """What `function(*args)` gives on each node with devices of the kind, by the node's name.

    Raises what it raises there, and TimeoutError naming the nodes that took longer than `limit_s`.
    """
    ids = node_ids()
    names = [node.name for node in read_cluster(device_kind).nodes if node.devices]
    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    running = {
        name: remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(ids[name], soft=False)
        ).remote(*args)
        for name in names
    }
    _, late = ray.wait(list(running.values()), num_returns=len(running), timeout=limit_s)
    if late:
        slow = ", ".join(name for name, answer in running.items() if answer in late)
        for answer in late:
            ray.cancel(answer, force=True)
        raise TimeoutError(f"{function.__name__} took longer than {limit_s:g} s on {slow}")
    try:
        return {name: ray.get(answer) for name, answer in running.items()}
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
