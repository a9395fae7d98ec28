"""`rolemesh plan`: the plan of a recipe, two plans side by side, other systems' configurations as recipes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rolemesh.launch.config import list_defaults, load_recipe
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.live_cluster import live_cluster
from rolemesh.launch.plan import PLANNING_ERRORS, expected_cluster, not_runnable, plan_on, read_plan_file
from rolemesh.launch.request import request_of
from rolemesh.launch.schema import Recipe
from rolemesh.placement.cluster import ClusterError, ClusterSpec
from rolemesh.placement.hardware import HardwareError, HardwareProfile, load_profile
from rolemesh.placement.importers import IMPORTERS, ForeignConfigError, import_config
from rolemesh.placement.model import ModelError, ModelShape
from rolemesh.placement.plan import PlacementPlan, device_totals
from rolemesh.placement.plan_diff import diff_plans


def plan_recipe(
    path: Path,
    overrides: Sequence[str],
    *,
    cluster: str = "",
    any_software: bool = False,
    limit_s: float = 60.0,
    profiles: Sequence[Path] = (),
) -> tuple[PlacementPlan, list[str]]:
    """The plan of a recipe and the lines that tell it.

    `cluster` is a cluster file or a preset such as `16 x h100x8`, in place of the recipe's own cluster.
    `any_software` also considers what our workers do not run yet, `limit_s` ends the search of strategy auto.
    `profiles` are files that describe device types as they were measured. Raises RecipeError.
    """
    recipe = load_recipe(path, overrides)
    shapes, notes = read_shapes(recipe)
    runnable = not any_software
    try:
        there = _cluster(recipe, cluster, shapes, runnable).with_profiles(*_measured(profiles))
        plan = plan_on(recipe, there, shapes, runnable=runnable, limit_s=limit_s)
        if unknown := _not_priced(recipe, there, plan, shapes):
            notes.append(f"no prediction: {unknown}")
        elif not plan.prediction:
            plan = _priced(recipe, there, plan, shapes, runnable)
    except PLANNING_ERRORS as error:
        hint = " (--any-software also plans what is not run yet)" if "not supported yet" in str(error) else ""
        raise RecipeError(f"placement: {error}{hint}") from error
    notes += not_runnable(plan)
    lines = [*plan.summary(), totals_line({role: layout.world for role, layout in plan.layouts.items()})]
    return plan, [*lines, *(f"note: {note}" for note in notes), *list_defaults(recipe)]


def _not_priced(
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


def _priced(
    recipe: Recipe,
    cluster: ClusterSpec,
    plan: PlacementPlan,
    shapes: Mapping[str, ModelShape],
    runnable: bool,
) -> PlacementPlan:
    """The plan with predictions for what a run of the recipe would do. Raises PlacementError if too big."""
    from rolemesh.placement.auto import plan_strategy

    priced = plan_strategy(request_of(recipe, cluster, shapes, runnable=runnable, defaults=True), plan)
    return replace(priced, proof=None)  # best among plans with these pools and layouts says nothing


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


def read_shapes(recipe: Recipe) -> tuple[dict[str, ModelShape], list[str]]:
    """The models of the roles from their config.json (weights are not needed), and a note for each without.

    Raises RecipeError for a config.json that cannot be read.
    """
    shapes, notes = {}, []
    for role in recipe.roles:
        if role == "rollout":
            continue
        path = Path(getattr(recipe, role).path)
        file = path if path.suffix == ".json" else path / "config.json"
        if not file.is_file():
            notes.append(f"{role}: no {file}, so its layout is not checked against a model")
            continue
        try:
            shapes[role] = ModelShape.from_config(json.loads(file.read_text()))
        except (json.JSONDecodeError, ModelError) as error:
            raise RecipeError(f"{role}.path: {file}: {error}") from error
    return shapes, notes


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
    if system not in IMPORTERS:
        raise RecipeError(f"--from {system}: there are importers for {', '.join(IMPORTERS)}")
    try:
        found = import_config(system, path.read_text(), overrides)
    except OSError as error:
        raise RecipeError(f"no configuration at {path}: {error.strerror}") from error
    except ForeignConfigError as error:
        raise RecipeError(f"{path}: {error}") from error
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
