"""Where a recipe's roles run: its placement and layouts as a plan on a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from rolemesh.launch.fields import RecipeError
from rolemesh.launch.schema import Pool, Recipe
from rolemesh.placement.cluster import ClusterSpec, DeviceKind
from rolemesh.placement.layout import Layout, LayoutError
from rolemesh.placement.model import ModelShape
from rolemesh.placement.plan import PlacementPlan, make_plan
from rolemesh.placement.pools import PlacementError

MOST_SLOTS = 64  # worker slots tried on a CPU node whose recipe doesn't say how many


def plan_on(recipe: Recipe, cluster: ClusterSpec, shapes: Mapping[str, ModelShape]) -> PlacementPlan:
    """Pools, nodes and layouts of the recipe on `cluster`; `shapes` are the models of the roles.

    Raises PlacementError or LayoutError with the numbers.
    """
    pools = recipe.placement.pools
    strategy = {name: _request(pool) for name, pool in pools.items()} or str(recipe.placement.strategy)
    layouts = {role: getattr(recipe, role).layout.pins for role in recipe.roles}
    return make_plan(strategy, recipe.roles, cluster, layouts=layouts, shapes=shapes)


def expected_cluster(
    recipe: Recipe, kind: DeviceKind, shapes: Mapping[str, ModelShape], gpus: int = 0
) -> ClusterSpec:
    """The cluster that the recipe describes; `gpus` are those of this machine, where that is known.

    On CPU without `cluster.per_node`: the fewest worker slots with which the recipe can be placed.
    Raises RecipeError when the size isn't known, PlacementError or LayoutError when no size will do.
    """
    nodes = recipe.cluster.nodes

    def uniform(per_node: int) -> ClusterSpec:
        return ClusterSpec.uniform(nodes, per_node, device_kind=kind, device_type=recipe.cluster.device or "")

    if per_node := recipe.cluster.per_node or gpus:
        return uniform(per_node)
    if kind == "cuda":
        raise RecipeError("cluster.per_node is missing: how many GPUs has a node?")
    for slots in range(1, MOST_SLOTS + 1):
        with contextlib.suppress(PlacementError, LayoutError):
            plan_on(recipe, uniform(slots), shapes)
            return uniform(slots)
    pinned = max(_pinned_world(recipe, role, shapes) for role in recipe.roles)
    n_pools = len(recipe.placement.pools) or {"split": 2}.get(str(recipe.placement.strategy), 1)
    plan_on(recipe, uniform(pinned * n_pools), shapes)  # says what is wrong, on a cluster of the size meant
    raise RecipeError(f"cluster.per_node is missing, and up to {MOST_SLOTS} worker slots are too few")


def _pinned_world(recipe: Recipe, role: str, shapes: Mapping[str, ModelShape]) -> int:
    """Ranks of the sizes that the role pins. Raises LayoutError when its model can't be cut so."""
    layout = Layout(**getattr(recipe, role).layout.pins)
    if role in shapes:
        layout.check(shapes[role])
    return layout.world


def _request(pool: Pool) -> dict[str, Any]:
    """The pool in the words of `make_plan`: only the keys that say something."""
    where = {name: value for name, value in vars(pool.where).items() if value}
    keys = {"roles": pool.roles, **{n: getattr(pool, n) for n in ("share", "devices", "nodes", "per_node")}}
    return {name: value for name, value in {**keys, "where": where}.items() if value}
