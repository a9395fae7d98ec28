"""`rolemesh plan`: the plan of a recipe, two plans side by side, other systems' configurations as recipes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rolemesh.launch.checkpoints import read_shapes
from rolemesh.launch.config import list_defaults, load_recipe, mention_defaults
from rolemesh.launch.dry_run import dry_run_plan
from rolemesh.launch.fields import InfeasibleError, RecipeError
from rolemesh.launch.import_command import read_foreign
from rolemesh.launch.live_cluster import live_cluster
from rolemesh.launch.pictures.ascii_map import map_lines, step_lines
from rolemesh.launch.pictures.cells import rows_of
from rolemesh.launch.plan import PLANNING_ERRORS, expected_cluster, not_runnable, plan_on, read_plan_file
from rolemesh.launch.plan_choice import TIE, best_plans
from rolemesh.launch.plan_html import map_page, plan_page
from rolemesh.launch.plan_notes import assumed_lengths, length_overrides, profile_sources, with_pins
from rolemesh.launch.plan_view import planned_step, view_of
from rolemesh.launch.pricing import priced
from rolemesh.launch.request import pins_of, request_of
from rolemesh.launch.schema import Recipe
from rolemesh.placement.cluster import ClusterError, ClusterSpec
from rolemesh.placement.compare import Compared, compare_strategies
from rolemesh.placement.hardware import HardwareError, HardwareProfile, load_profile
from rolemesh.placement.length_range import LengthRange, length_range
from rolemesh.placement.model import ModelShape
from rolemesh.placement.plan import PlacementPlan, device_totals
from rolemesh.placement.plan_diff import diff_plans
from rolemesh.placement.pools import PlacementError
from rolemesh.placement.roles import PlanRequest

# Seconds of computing for the usual strategies and for other mean lengths, as printed and for pictures; for
# pictures also for other numbers of devices.
_PRINTED_S, _DRAWN_S, _COUNTS_S = (1.5, 1.2), (10.0, 8.0), 10.0


def plan_recipe(
    path: Path,
    overrides: Sequence[str],
    *,
    cluster: str = "",
    any_software: bool = False,
    limit_s: float = 60.0,
    profiles: Sequence[Path] = (),
    dry_run: bool = False,
    pins: Sequence[str] = (),
    lengths_from: Path | None = None,
    top: int = 0,
    show_map: bool = False,
    html: Path | None = None,
    defaults: bool = False,
) -> tuple[PlacementPlan, list[str]]:
    """The plan of a recipe and the lines that tell it.

    `cluster` is a cluster file or a preset such as `16 x h100x8`, in place of the recipe's own cluster.
    `any_software` also considers what our workers do not run yet, `limit_s` ends the search of strategy auto.
    `profiles` are files that describe device types as they were measured. `pins` fix keys, as
    `actor.layout.tp=8`, or placements, as `actor+ref together` (auto alone). `lengths_from` is a run folder,
    `top` the number of plans to compare (auto alone). `dry_run` builds every distinct rank without memory and
    follows the checkpoints' tensors to where they land. `show_map` adds devices and step as text; `html` is a
    file to write with pictures. `defaults` lists every key left to its default, not only those of sizes.

    Raises RecipeError, and of those InfeasibleError where the recipe is in order and does not fit.
    """
    lengths = length_overrides(lengths_from)
    recipe = with_pins(lambda pinned: load_recipe(path, [*overrides, *pinned, *lengths]), pins)
    shapes, notes = read_shapes(recipe)
    runnable = not any_software
    try:
        there = _cluster(recipe, cluster, shapes, runnable).with_profiles(*_measured(profiles))
        if top:
            plan, best = best_plans(recipe, there, shapes, top=top, runnable=runnable, limit_s=limit_s)
        else:
            plan, best = plan_on(recipe, there, shapes, runnable=runnable, limit_s=limit_s), []
        plan, unknown = priced(recipe, there, plan, shapes, runnable=runnable)
        notes += [f"no prediction: {unknown}"] if unknown else []
    except PLANNING_ERRORS as error:
        hint = " (--any-software also plans what is not run yet)" if "not run yet" in str(error) else ""
        kind = InfeasibleError if isinstance(error, PlacementError) else RecipeError
        raise kind(f"placement: {error}{hint}") from error
    notes += [*assumed_lengths(recipe), *profile_sources(there, plan)]
    looked = None if unknown or not plan.prediction else _look(recipe, there, shapes, plan, runnable, html)
    if looked:
        notes += [_said_of_lengths(looked), *_simpler(plan, looked.compared)]
    notes += not_runnable(plan)
    lines = [*plan.summary(), totals_line({role: layout.world for role, layout in plan.layouts.items()})]
    lines += dry_run_plan(recipe, plan, shapes) if dry_run else []
    lines += map_lines(plan, rows_of(plan, there, coarse=True)) if show_map else []
    lines += step_lines(planned_step(plan, looked.request), plan) if show_map and looked else []
    lines += [*best, *(f"note: {note}" for note in notes)]
    lines += list_defaults(recipe) if defaults else mention_defaults(recipe)
    if html is not None:
        html.write_text(_page(path, plan, there, looked, recipe, lines), encoding="utf-8")
    return plan, lines


@dataclass(frozen=True)
class _Looked:
    """The plan's request, one that leaves to the planner what the recipe does not say, the usual strategies
    under it, and for which lengths the plan stays best.
    """

    request: PlanRequest
    free: PlanRequest
    compared: Compared
    lengths: LengthRange | None


def _look(
    recipe: Recipe,
    cluster: ClusterSpec,
    shapes: Mapping[str, ModelShape],
    plan: PlacementPlan,
    runnable: bool,
    html: Path | None,
) -> _Looked | None:
    """Compare the plan with the usual strategies, longer where pictures are drawn; None for one that its
    request cannot price.
    """
    compare_s, lengths_s = _DRAWN_S if html else _PRINTED_S
    mine = () if html else (frozenset(frozenset(pool.roles) for pool in plan.pools),)
    try:
        free = request_of(recipe, cluster, shapes, runnable=runnable)
        compared = compare_strategies(free, pins=pins_of(recipe), known=mine, limit_s=compare_s)
        as_run = recipe.placement.strategy != "auto" and not recipe.placement.plan  # as `priced` does
        own = request_of(recipe, cluster, shapes, runnable=runnable, defaults=as_run)
        found = length_range(plan, own, compared, tie=TIE, own_pools=html is not None, limit_s=lengths_s)
        return _Looked(own, free, compared, found)
    except PLANNING_ERRORS:
        return None


def _said_of_lengths(looked: _Looked) -> str:
    if looked.lengths:
        return str(looked.lengths)
    in_time = looked.compared.unknown or looked.compared.plans
    why = "no other strategy was priced in time" if in_time else "no other strategy fits"
    return f"for which response lengths the plan stays best was not looked at: {why}"


def _simpler(plan: PlacementPlan, compared: Compared) -> Iterator[str]:
    """Strategies with fewer pools that predictions do not tell from the plan."""
    step_s = plan.prediction.step_s or 0.0
    for name, other in compared.plans.items():
        if len(other.pools) < len(plan.pools) and abs(other.makespan_s - step_s) <= TIE * step_s:
            took = f"{other.makespan_s:.4g} s, within {TIE:.0%}"
            yield f"tie with {name} ({took}), which has fewer pools: --top takes the simpler one"


def _page(
    path: Path,
    plan: PlacementPlan,
    cluster: ClusterSpec,
    looked: _Looked | None,
    recipe: Recipe,
    lines: list[str],
) -> str:
    if looked is None:
        return map_page(path.stem, plan, cluster, lines)
    view = view_of(
        plan,
        looked.request,
        looked.compared,
        free=looked.free,
        pins=pins_of(recipe),
        lengths=looked.lengths,
        limit_s=_COUNTS_S,
    )
    return plan_page(path.stem, view, lines)


def _measured(files: Sequence[Path]) -> list[HardwareProfile]:
    """Profiles from what `rolemesh calibrate` wrote. Raises RecipeError."""
    try:
        return [load_profile(file) for file in files]
    except HardwareError as error:
        raise RecipeError(f"--profile: {error}") from error


def totals_line(demands: Mapping[str, int]) -> str:
    """How many devices roles of these sizes take under the usual groupings."""
    totals = ", ".join(f"{name}: {count}" for name, count in device_totals(demands).items())
    return f"devices for roles of these sizes: {totals}"


def diff_files(one: Path, other: Path) -> list[str]:
    """The lines in which two plan files differ. Raises RecipeError for a file that holds no plan."""
    try:
        return diff_plans(read_plan_file(one), read_plan_file(other), (str(one), str(other)))
    except PLANNING_ERRORS as error:
        raise RecipeError(str(error)) from error


def imported(system: str, path: Path, overrides: Sequence[str]) -> str:
    """Another system's configuration as a recipe in YAML, with comments: sizes and what had to be ignored.

    Raises RecipeError for a system, a file or values that cannot be read.
    """
    try:
        found = read_foreign(system, path, overrides)
    except RecipeError as error:
        raise RecipeError(f"--from {error}") from error
    lines = [f"# {totals_line(found.demands)}", f"# {system} takes {found.n_devices}"]
    lines += [f"# ignored: {setting}" for setting in found.ignored]
    return "\n".join([f"# from {path}", found.to_yaml().rstrip(), *lines])


def _cluster(recipe: Recipe, given: str, shapes: Mapping[str, ModelShape], runnable: bool) -> ClusterSpec:
    if given:
        return _given_cluster(given)
    if recipe.run.address is not None:
        return live_cluster(recipe.run.address)
    cpu = recipe.run.device == "cpu" or recipe.cluster.device in (None, "cpu")
    kind = "cpu" if cpu and recipe.run.device != "cuda" else "cuda"
    return expected_cluster(recipe, "cpu" if kind == "cpu" else "cuda", shapes, runnable=runnable)


def _given_cluster(given: str) -> ClusterSpec:
    if Path(given).is_file():
        try:
            return ClusterSpec.from_yaml(Path(given).read_text())
        except ClusterError as error:
            raise RecipeError(f"--cluster {given}: {error}") from error
    try:
        return ClusterSpec.preset(given)
    except ClusterError as error:
        raise RecipeError(f"--cluster {given}: neither a file nor a preset: {error}") from error
