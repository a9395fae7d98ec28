"""The best few plans of a request, and which of them is taken where the model cannot tell them apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rolemesh.launch.fields import RecipeError
from rolemesh.launch.request import pins_of, request_of
from rolemesh.launch.schema import Recipe
from rolemesh.placement.auto import plan_auto, plan_of, search_plan
from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.model import ModelShape
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.search.plans import Assignment, SearchResult

TIE = 0.03  # plans that differ by less are ranked by chance: docs/prediction.md


def best_plans(
    recipe: Recipe,
    cluster: ClusterSpec,
    shapes: Mapping[str, ModelShape],
    *,
    top: int,
    runnable: bool = True,
    limit_s: float = 60.0,
) -> tuple[PlacementPlan, list[str]]:
    """The plan to take and a line for each of the `top` best, by grouping of roles.

    Of plans whose steps differ by less than the model's error the one with the fewest pools is taken. Raises
    RecipeError for another strategy than auto, PlacementError where nothing fits, and PinError.
    """
    if recipe.placement.strategy != "auto":
        raise RecipeError("--top compares what strategy auto finds: set placement.strategy=auto")
    request, pins = request_of(recipe, cluster, shapes, runnable=runnable), pins_of(recipe)
    found = search_plan(request, pins=pins, time_limit_s=limit_s)
    if not isinstance(found, SearchResult):
        return plan_auto(request, pins=pins, time_limit_s=limit_s), []  # raises, with the explanation
    others = [other for other in (*found.strategies.values(), *found.runners_up) if other.plan is not None]
    ranked: list[Assignment] = [found.best]
    for plan in sorted((o.plan for o in others if o.plan is not None), key=lambda plan: plan.objective_s):
        if all(_groups(plan) != _groups(known) for known in ranked):
            ranked.append(plan)
    near = [plan for plan in ranked if plan.objective_s <= found.best.objective_s * (1 + TIE)]
    taken = min(near, key=lambda plan: len(plan.pools))  # the first, and so the fastest, of equals
    reasons = {_groups(other.plan): other.reason for other in others if other.plan is not None}
    lines = [f"the best {min(top, len(ranked))} ways to share devices:"]
    for rank, plan in enumerate(ranked[:top], 1):
        slower = plan.objective_s / found.best.objective_s - 1
        why = "" if plan is found.best else f", {reasons[_groups(plan)]}"
        mark = " <- taken" if plan is taken else ""
        lines.append(f"  {rank}. {_say(plan)}: {plan.makespan_s:.4g} s (+{slower:.1%}){why}{mark}")
    if len(near) > 1:
        lines.append(f"tie within {TIE:.0%}, which predictions do not tell apart: simpler one chosen")
    proof = found.proof if taken is found.best else replace(found.proof, gap=_gap(found, taken))
    return plan_of(request, taken, "auto", proof, pins=pins), lines


def _groups(plan: Assignment) -> frozenset[frozenset[str]]:
    return frozenset(frozenset(pool.roles) for pool in plan.pools)


def _say(plan: Assignment) -> str:
    return " | ".join(f"{'+'.join(pool.roles)} on {pool.devices.world}" for pool in plan.pools)


def _gap(found: SearchResult, taken: Assignment) -> float:
    return max(0.0, 1 - found.proof.bound_s / taken.objective_s)
