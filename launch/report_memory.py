"""What the plan of a run folder would hold over its step: the request is made again from recipe and plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rolemesh.launch.checkpoints import read_shapes
from rolemesh.launch.config import load_recipe
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.plan import PLANNING_ERRORS
from rolemesh.launch.request import request_of
from rolemesh.placement.cluster import ClusterSpec, NodeSpec
from rolemesh.placement.memory_over_step import PoolMemory, memory_over_step
from rolemesh.placement.plan import PlacementPlan


def cluster_of(plan: PlacementPlan) -> ClusterSpec:
    """The nodes that a plan names, with the device types that it was made for. Raises ClusterError."""
    devices: dict[str, int] = dict(plan.idle)
    kinds: dict[str, str] = {}
    for pool in plan.pools:
        for node, count in plan.nodes.get(pool.name, ()):
            devices[node] = devices.get(node, 0) + count
            kinds.setdefault(node, plan.device_types.get(pool.name, ""))
    known = next(iter(kinds.values()), "")
    nodes = (NodeSpec(name, n, device_type=kinds.get(name, known)) for name, n in devices.items())
    return ClusterSpec(tuple(nodes), plan.pools[0].device_kind)


def planned_memory(folder: Path, plan: PlacementPlan | None) -> tuple[Mapping[str, PoolMemory], str]:
    """By pool, or why it cannot be said."""
    if plan is None or not plan.nodes:
        return {}, "there is no plan with nodes"
    try:
        recipe = load_recipe(folder / "recipe.yaml")
        shapes, _ = read_shapes(recipe)
        request = request_of(recipe, cluster_of(plan), shapes, defaults=recipe.placement.strategy != "auto")
        return memory_over_step(plan, request), ""
    except (RecipeError, *PLANNING_ERRORS) as error:
        return {}, str(error).splitlines()[0]
