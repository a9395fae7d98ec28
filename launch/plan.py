"""Where a recipe's roles run: its placement and layouts as a plan on a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rolemesh.launch.engine_check import engine_problems
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.request import graph_of, longest_tokens, pins_of, request_of
from rolemesh.launch.roles import LayoutPins
from rolemesh.launch.schema import Placement, Pool, Recipe
from rolemesh.placement.cluster import ClusterError, ClusterSpec, DeviceKind
from rolemesh.placement.layout import Layout, LayoutError
from rolemesh.placement.lengths import LengthsError
from rolemesh.placement.model import ModelShape
from rolemesh.placement.plan import PlacementPlan, make_plan
from rolemesh.placement.pools import PlacementError
from rolemesh.placement.roles import RequestError
from rolemesh.placement.search.pins import PinError
from rolemesh.placement.workload import WorkloadError

MOST_SLOTS = 64  # worker slots tried on a CPU node whose recipe doesn't say how many
PLANNING_ERRORS = (
    PlacementError, LayoutError, ClusterError, RequestError, PinError, WorkloadError, LengthsError,
)  # fmt: skip


def plan_on(
    recipe: Recipe,
    cluster: ClusterSpec,
    shapes: Mapping[str, ModelShape],
    *,
    runnable: bool = True,
    limit_s: float = 60.0,
) -> PlacementPlan:
    """Pools, nodes and layouts of the recipe on `cluster`; `shapes` are the models of the roles.

    `runnable` asks for what our workers can run, not only for what can be planned; a search for the best
    plan ends after `limit_s` with what it has, and how far that may be from the best.
    Raises RecipeError or one of PLANNING_ERRORS with the numbers.
    """
    placement = recipe.placement
    if placement.plan:
        return _from_file(recipe, placement.plan, shapes, runnable).on(cluster)
    if placement.strategy == "auto":
        from rolemesh.placement.auto import plan_auto

        request = request_of(recipe, cluster, shapes, runnable=runnable)
        return plan_auto(request, pins=pins_of(recipe), time_limit_s=limit_s)
    strategy = requested_pools(recipe) or str(placement.strategy)
    layouts = {role: getattr(recipe, role).layout.pins for role in recipe.roles}
    return make_plan(
        strategy,
        recipe.roles,
        cluster,
        layouts=layouts,
        shapes=shapes,
        runnable=runnable,
        engines=recipe.engine_roles,
    )


def plan_on_what_is_left(
    recipe: Recipe, cluster: ClusterSpec, shapes: Mapping[str, ModelShape]
) -> PlacementPlan:
    """A plan for a cluster that has lost devices: the recipe's own placement where that fits, else what
    strategy auto finds with the recipe's layouts, else with any.

    Raises PlacementError with what each of them lacks.
    """
    auto = replace(recipe, placement=Placement(strategy="auto", pin=recipe.placement.pin))
    unpinned = {role: replace(getattr(recipe, role), layout=LayoutPins()) for role in recipe.roles}
    free = replace(recipe, placement=Placement(strategy="auto"), **unpinned)
    reasons = []
    for what, tried in (("as the recipe says", recipe), ("auto", auto), ("auto, any layout", free)):
        try:
            plan = plan_on(tried, cluster, shapes)
        except (RecipeError, *PLANNING_ERRORS) as error:
            reasons.append(f"{what}: {error}")
            continue
        problems = [*not_runnable(plan), *engine_problems(recipe, plan, shapes["actor"])]
        if not problems:
            return plan
        reasons.append(f"{what}: {'; '.join(problems)}")
    raise PlacementError(
        f"nothing fits the {cluster.n_devices} devices that are left:\n" + "\n".join(reasons),
        present=cluster.n_devices,
    )


def read_plan_file(path: str | Path) -> PlacementPlan:
    """The plan in a file. Raises RecipeError for none, PlacementError or LayoutError for its text."""
    try:
        return PlacementPlan.from_yaml(Path(path).read_text())
    except OSError as error:
        raise RecipeError(f"no plan at {path}: {error.strerror}") from error
    except (PlacementError, LayoutError) as error:
        raise type(error)(f"{path}: {error}") from error


def _from_file(recipe: Recipe, path: str, shapes: Mapping[str, ModelShape], runnable: bool) -> PlacementPlan:
    """The plan in a file, checked against roles, models, layouts and step of the recipe."""
    plan = read_plan_file(path)
    if set(plan.roles) != set(recipe.roles):
        raise RecipeError(
            f"the plan {path} places {', '.join(plan.roles)}; "
            f"the recipe's roles are {', '.join(recipe.roles)}"
        )
    for role in recipe.roles:
        layout = plan.layouts[role]
        for name, value in getattr(recipe, role).layout.pins.items():
            if getattr(layout, name) != value:
                raise RecipeError(
                    f"{role}.layout.{name} is {value}, the plan {path} says {getattr(layout, name)}: "
                    "leave it out of the recipe, or change the plan"
                )
        if role in shapes:
            try:
                ours = runnable and role not in recipe.engine_roles
                (layout.check if ours else layout.check_cut)(shapes[role])
            except LayoutError as error:
                raise LayoutError(f"role {role!r} of the plan {path}: {error}") from None
    plan.check_order(graph_of(recipe), recipe.schedule.staleness)
    return plan


def not_runnable(plan: PlacementPlan) -> Iterator[str]:
    """What the plan asks of our workers that this version does not do."""
    for role, settings in plan.settings.items():
        if settings.offload and role == "rollout":
            yield "the plan offloads rollout, but an engine's memory is the engine's: leave it out"


def as_planned(recipe: Recipe, plan: PlacementPlan) -> Recipe:
    """The recipe with the settings of the plan: micro-batches (at the longest sequence) and recomputation."""
    changed: dict[str, Any] = {}
    for role, settings in plan.settings.items():
        section, new = getattr(recipe, role), dict[str, Any]()
        if settings.micro_batch is not None:
            key = "max_batch_tokens" if role in recipe.engine_roles else "micro_batch_tokens"
            new[key] = settings.micro_batch * longest_tokens(recipe, role)
        if settings.recompute is not None and hasattr(section, "recompute"):
            new["recompute"] = settings.recompute
        if settings.offload is not None and hasattr(section, "offload"):
            new["offload"] = settings.offload
        changed[role] = replace(section, **new)
    return replace(recipe, **changed)


def expected_cluster(
    recipe: Recipe,
    kind: DeviceKind,
    shapes: Mapping[str, ModelShape],
    gpus: int = 0,
    *,
    runnable: bool = True,
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
    if recipe.placement.strategy == "auto":
        raise RecipeError("cluster.per_node is missing: how many worker slots may strategy auto use?")
    for slots in range(1, MOST_SLOTS + 1):
        with contextlib.suppress(PlacementError, LayoutError):
            plan_on(recipe, uniform(slots), shapes, runnable=runnable)
            return uniform(slots)
    # None will do: say what is wrong on a cluster of the size meant.
    if recipe.placement.plan:
        n_devices = read_plan_file(recipe.placement.plan).n_devices
    else:
        n_pools = len(recipe.placement.pools) or {"split": 2, "standalone": len(recipe.roles)}.get(
            str(recipe.placement.strategy), 1
        )
        n_devices = max(_pinned_world(recipe, role, shapes) for role in recipe.roles) * n_pools
    plan_on(recipe, uniform(n_devices), shapes, runnable=runnable)
    raise RecipeError(f"cluster.per_node is missing, and up to {MOST_SLOTS} worker slots are too few")


def _pinned_world(recipe: Recipe, role: str, shapes: Mapping[str, ModelShape]) -> int:
    """Ranks of the sizes that the role pins. Raises LayoutError when its model can't be cut so."""
    layout = Layout(**getattr(recipe, role).layout.pins)
    if role in shapes:
        layout.check(shapes[role])
    return layout.world


def requested_pools(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The recipe's pools in the words of `make_plan`; empty where a strategy makes them."""
    return {name: _request(pool) for name, pool in recipe.placement.pools.items()}


def _request(pool: Pool) -> dict[str, Any]:
    """The pool in the words of `make_plan`: only the keys that say something."""
    where = {name: value for name, value in vars(pool.where).items() if value}
    keys = {"roles": pool.roles, **{n: getattr(pool, n) for n in ("share", "devices", "nodes", "per_node")}}
    return {name: value for name, value in {**keys, "where": where}.items() if value}
