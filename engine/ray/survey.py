"""What the nodes of a live Ray cluster have beyond what Ray counts: a small task looks on each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rolemesh.engine.machine import MachineFacts, described, look
from rolemesh.engine.ray.cluster import node_ids
from rolemesh.placement.cluster import ClusterSpec, NodeSpec

LIMIT_S = 30.0


def survey(cluster: ClusterSpec, limit_s: float = LIMIT_S) -> tuple[ClusterSpec, list[str]]:
    """The cluster as `read_cluster` gave it, with memory, host memory and device types of its nodes.

    All nodes are asked at once and have `limit_s` seconds; one that does not answer stays as Ray describes
    it, and is among the notes.
    """
    ids = node_ids()
    asked = {node.name: _ask(ids[node.name]) for node in cluster.nodes if node.name in ids}
    done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=limit_s) if asked else ([], [])
    nodes: list[NodeSpec] = []
    notes: list[str] = []
    for node in cluster.nodes:
        facts: MachineFacts | str = f"no answer within {limit_s:g} s"
        if (task := asked.get(node.name)) in done:
            facts = _answer(task)
        if isinstance(facts, str):
            notes.append(f"{node.name}: {facts}; its memory is taken from the device type")
            nodes.append(node)
        else:
            found, said = described(node, facts, cluster.device_kind)
            nodes.append(found)
            notes += said
    for task in asked.values():
        if task not in done:
            ray.cancel(task, force=True)
    return replace(cluster, nodes=tuple(nodes)), notes


def _ask(node_id: str) -> Any:
    """A task on that node and no other; it takes nothing of the node's resources."""
    place = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(look).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
    return task.remote()


def _answer(task: Any) -> MachineFacts | str:
    """What a task that has ended found, or why it found nothing."""
    try:
        facts: MachineFacts = ray.get(task, timeout=1.0)
    except RayError as error:
        return f"cannot look: {type(error).__name__}"
    return facts
