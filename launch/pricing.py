"""A plan with its predictions: what each operation of a run of the recipe would take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rolemesh.launch.request import request_of
from rolemesh.launch.schema import Recipe
from rolemesh.placement.cluster import ClusterError, ClusterSpec
from rolemesh.placement.model import ModelShape
from rolemesh.placement.plan import PlacementPlan


def priced(
    recipe: Recipe,
    cluster: ClusterSpec,
    plan: PlacementPlan,
    shapes: Mapping[str, ModelShape],
    *,
    runnable: bool = True,
) -> tuple[PlacementPlan, str]:
    """The plan with predictions for what a run of the recipe would do, or as it is and why there are none.

    Raises PlacementError where it is too big.
    """
    if plan.prediction:
        return plan, ""
    if unknown := _unknown(recipe, cluster, plan, shapes):
        return plan, unknown
    from rolemesh.placement.auto import plan_strategy

    found = plan_strategy(request_of(recipe, cluster, shapes, runnable=runnable, defaults=True), plan)
    return replace(found, proof=None), ""  # best among plans with these pools and layouts says nothing


def _unknown(
    recipe: Recipe, cluster: ClusterSpec, plan: PlacementPlan, shapes: Mapping[str, ModelShape]
) -> str:
    """Why the models cannot price the plan; empty when they can, or have."""
    if unknown := [role for role in recipe.roles if role != "rollout" and role not in shapes]:
        return f"the model of {', '.join(unknown)} is not there"
    kinds = {node.name: cluster.device_type(node) for node in cluster.usable}
    for pool, entries in plan.nodes.items():
        there = sorted({kinds[name] for name, _ in entries})
        if there == [""]:
            return "the device type is not known (cluster.device)"
        if len(there) > 1:
            return f"pool {pool} mixes {', '.join(there)}"
        try:
            cluster.profile(there[0])
        except ClusterError as error:
            return str(error)
    return ""
