"""The spec of a benchmark: a matrix of strategies x models x clusters x workloads, every cell a recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from rolemesh.launch.config import parse_recipe, with_absolute_paths
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.schema import Recipe
from rolemesh.placement.cluster import ClusterError, ClusterSpec
from rolemesh.placement.hardware import HardwareError, HardwareProfile, load_profile
from rolemesh.placement.hints import did_you_mean
from rolemesh.placement.model import ModelError, ModelShape

Tree = dict[str, Any]
_KEYS = ("title", "recipe", "strategies", "models", "clusters", "workloads", "profiles", "run", "limits")
_WORKLOAD_KEYS = ("algorithm", "batch", "data", "lengths", "rollout", "reward", "schedule")
_AXES = ("placement", "cluster")
_ROLES = ("actor", "critic", "ref", "reward")
STRATEGIES = ("colocate", "split", "standalone", "auto")


@dataclass(frozen=True)
class Limits:
    """Bounds of one cell.

    Attributes:
        cell_s: seconds to plan a cell; after them its best plan so far counts, after twice as many none.
        gap: a plan that is known to be this close to the best one is good enough.
        steps: of a cell that is really run.
        run_s: seconds that such a run may take.
    """

    cell_s: float = 20.0
    gap: float = 0.02
    steps: int = 5
    run_s: float = 600.0

    def __post_init__(self) -> None:
        for name, least in (("cell_s", 0.1), ("gap", 0.0), ("steps", 1), ("run_s", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
                raise RecipeError(f"limits.{name} must be a number of at least {least:g}, got {value!r}")


@dataclass(frozen=True)
class Case:
    """One model on one cluster with one workload: what strategies are compared on.

    `recipes` are those of its cells, by strategy; `shapes` the models of the roles.
    """

    model: str
    cluster: str
    workload: str
    spec: ClusterSpec
    shapes: Mapping[str, ModelShape]
    recipes: Mapping[str, Recipe]


@dataclass(frozen=True)
class Spec:
    """A whole benchmark. `run`: the cells are really run on the devices at hand."""

    title: str
    strategies: tuple[str, ...]
    cases: tuple[Case, ...]
    run: bool = False
    limits: Limits = Limits()

    @property
    def n_cells(self) -> int:
        """Number of plans or runs."""
        return len(self.cases) * len(self.strategies)


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> Spec:
    """Read a spec file and apply `a.b=value` overrides (values are YAML).

    Paths are relative to the file's folder. Raises RecipeError for a file, key or value that cannot be used.
    """
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"no spec at {path}: give the path of a YAML file")
    try:
        tree = yaml.safe_load(path.read_text()) or {}
        for item in overrides:
            tree = merged(tree, _override(item))
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: not readable as YAML: {error}") from None
    return parse_spec(tree, path.absolute().parent, path.stem)


def parse_spec(tree: Any, folder: Path, name: str = "bench") -> Spec:
    """`load_spec` of what YAML reads."""
    _check_keys("the spec", tree, _KEYS)
    if missing := [key for key in ("models", "clusters") if not tree.get(key)]:
        raise RecipeError(f"the spec needs {' and '.join(missing)}: a list, or a mapping with names")
    run = tree.get("run", False)
    if not isinstance(run, bool):
        raise RecipeError(f"run is {run!r}, but must be true (really run) or false (simulated)")
    _check_keys("limits", tree.get("limits") or {}, [f.name for f in fields(Limits)])
    base = merged({"data": {"train_files": ["prompts.jsonl"]}}, _base(tree.get("recipe") or {}, folder))
    placements = {
        key: _placement(value) for key, value in _named("strategies", tree.get("strategies", STRATEGIES))
    }
    workloads = dict(_named("workloads", tree.get("workloads") or {"default": {}}))
    for key, value in workloads.items():
        _check_keys(f"workloads.{key}", value, _WORKLOAD_KEYS)
    models = {key: _model(key, value, folder) for key, value in _named("models", tree["models"])}
    profiles = _profiles(tree.get("profiles") or [], folder)
    clusters = {
        key: _cluster(key, value, folder).with_profiles(*profiles)
        for key, value in _named("clusters", tree["clusters"])
    }
    cases = []
    for model, paths in models.items():
        for workload, sections in workloads.items():
            cell = _with_model(base, sections, paths)
            named = model if len(workloads) == 1 else f"{model}, {workload}"

            def recipes(section: Tree, cell: Tree = cell, named: str = named) -> dict[str, Recipe]:
                trees = {name: {**cell, **section, "placement": at} for name, at in placements.items()}
                return {name: _recipe(one, folder, f"{named}, {name}") for name, one in trees.items()}

            same = recipes({}) if not run else {}  # what is simulated has its cluster beside the recipe
            for cluster, spec in clusters.items():
                mine = same or recipes({"cluster": _section_of(spec)})
                shapes = _shapes(paths, next(iter(mine.values())))
                cases.append(Case(model, cluster, workload, spec, shapes, mine))
    return Spec(
        str(tree.get("title", name)), tuple(placements), tuple(cases), run, Limits(**tree.get("limits") or {})
    )


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> Tree:
    """`one` with the values of `other`, mapping by mapping."""
    out = dict(one)
    for key, value in other.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merged(out[key], value) if both else value
    return out


def _override(item: str) -> Tree:
    name, equals, text = item.partition("=")
    if not equals:
        raise RecipeError(f"override {item!r} has no '=': write key=value, such as limits.cell_s=5")
    value = yaml.safe_load(text)
    for part in reversed(name.strip().split(".")):
        value = {part: value}
    return dict(value)


def _check_keys(what: str, tree: Any, known: Sequence[str]) -> None:
    if not isinstance(tree, Mapping):
        raise RecipeError(f"{what} is {tree!r}, but must be a mapping of keys")
    for key in tree:
        if key not in known:
            raise RecipeError(
                f"{what} has no key {key!r} (known: {', '.join(known)}){did_you_mean(key, known)}"
            )


def _named(axis: str, given: Any) -> list[tuple[str, Any]]:
    """The values of an axis with their names: a mapping has them, those of a list are found."""
    if isinstance(given, Mapping):
        return [(str(name), value) for name, value in given.items()]
    values = [given] if isinstance(given, str) else given
    if not isinstance(values, Sequence):
        raise RecipeError(f"{axis} is {given!r}, but must be a list, or a mapping with names")
    named = [(_name(axis, value), value) for value in values]
    if twice := {name for name, _ in named if [other for other, _ in named].count(name) > 1}:
        raise RecipeError(f"{axis} has {', '.join(sorted(twice))} twice: give a mapping with names")
    return named


def _name(axis: str, value: Any) -> str:
    if isinstance(value, str):
        path = Path(value)
        named = path.parent.name if path.name == "config.json" else path.stem
        return named if path.suffix in (".json", ".yaml", ".yml") else value.strip()
    raise RecipeError(f"{axis}: {value!r} has no name: write {axis} as a mapping of names")


def _base(given: Any, folder: Path) -> Tree:
    """The keys of every cell's recipe: a mapping, or a recipe file without its cluster and placement."""
    if isinstance(given, str):
        path = folder / given
        if not path.is_file():
            raise RecipeError(f"recipe: no file {path}")
        written = yaml.safe_load(path.read_text())
        given = {key: value for key, value in dict(written).items() if key not in _AXES}
        given = with_absolute_paths(given, path.absolute().parent)
    if not isinstance(given, Mapping):
        raise RecipeError(f"recipe is {given!r}, but must be a mapping of a recipe's keys, or a recipe file")
    if any(key in given for key in _AXES):
        raise RecipeError("recipe.placement and recipe.cluster are axes here: strategies and clusters")
    algorithm = given.get("algorithm")
    return dict(given) | ({"algorithm": {"name": algorithm}} if isinstance(algorithm, str) else {})


def _placement(value: Any) -> Tree:
    """A strategy as a recipe's placement section."""
    if isinstance(value, str) and value not in STRATEGIES:
        if Path(value).suffix not in (".yaml", ".yml"):
            hint = did_you_mean(value, STRATEGIES) or f" ({', '.join(STRATEGIES)})"
            raise RecipeError(f"strategies: {value!r} is neither a strategy nor a plan file{hint}")
        return {"plan": value}
    return {"strategy": value} if isinstance(value, str) else dict(value)


def _section_of(cluster: ClusterSpec) -> Tree:
    """The cluster as a recipe's section, for a run."""
    sizes = {node.devices for node in cluster.usable}
    device = {cluster.device_type(node) for node in cluster.usable}
    if len(sizes) != 1 or len(device) != 1:
        raise RecipeError(f"a run needs equal nodes of one device type; the cluster has\n{cluster.table()}")
    return {"nodes": len(cluster.usable), "device": device.pop(), "per_node": sizes.pop()}


def _recipe(tree: Tree, folder: Path, where: str) -> Recipe:
    try:
        return parse_recipe(yaml.safe_dump(tree, sort_keys=False), folder)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def _cluster(name: str, value: Any, folder: Path) -> ClusterSpec:
    try:
        if isinstance(value, str) and (folder / value).is_file():
            return ClusterSpec.from_yaml((folder / value).read_text())
        return ClusterSpec.from_keys(value)
    except ClusterError as error:
        raise RecipeError(f"clusters: {name}: {error}") from None


def _profiles(given: Any, folder: Path) -> list[HardwareProfile]:
    """Measured profiles, from the files that `rolemesh calibrate` writes."""
    try:
        return [load_profile(folder / path) for path in ([given] if isinstance(given, str) else given)]
    except HardwareError as error:
        raise RecipeError(f"profiles: {error}") from None


Model = dict[str, str | Mapping[str, Any]]  # role to a path, or a configuration as it stands in config.json


def _model(name: str, value: Any, folder: Path) -> Model:
    """The models of the roles: one for all of them, or each role's own."""
    if isinstance(value, Mapping) and "model_type" not in value:
        _check_keys(f"models.{name}", value, _ROLES)
        if "actor" not in value:
            raise RecipeError(f"models.{name} needs actor (or is one configuration, with model_type)")
        given = dict(value)
    else:
        given = {"actor": value}
    found: Model = {}
    for role, model in given.items():
        if isinstance(model, str) and not (folder / model).exists() and re.fullmatch(r"[\w.-]+", model):
            preset = folder / "models" / f"{model}.json"
            model = f"models/{model}.json" if preset.is_file() else model
        if not isinstance(model, str | Mapping):
            raise RecipeError(f"models.{name}.{role} is {model!r}: give a config.json or its content")
        if isinstance(model, str) and ".py:" not in model and not (folder / model).exists():
            known = sorted(path.stem for path in (folder / "models").glob("*.json"))
            raise RecipeError(
                f"models.{name}.{role}: no {folder / model}{did_you_mean(Path(model).stem, known)}"
            )
        found[role] = str((folder / model).resolve()) if isinstance(model, str) else model
    return found


def _with_model(base: Tree, sections: Tree, model: Model) -> Tree:
    """The keys of a cell with the paths of its step's models: the actor's where a role has none of its own.

    What a workload says of its rewards goes first, and a reward function stays unless the model has its own.
    """
    cell = merged(base, sections)
    kl = (cell.get("algorithm") or {}).get("kl") or {}
    scored_by = str(_section(cell.get("reward") or {}).get("path", ""))
    asked = "path" in _section(sections.get("reward") or {}) or (
        ".py:" in scored_by and "reward" not in model
    )
    roles = {
        "actor": True,
        "critic": (cell.get("algorithm") or {}).get("name", "ppo") == "ppo",
        "ref": kl.get("in", "none") != "none" and "ref" in model,
        "reward": not asked,
    }
    for role in (role for role, there in roles.items() if there):
        given = model.get(role, model["actor"])
        path = given if isinstance(given, str) else f"{role}/config.json"
        cell[role] = {**_section(cell.get(role) or {}), "path": path}
    return cell


def _section(value: Any) -> Tree:
    return dict(value) if isinstance(value, Mapping) else {"path": value}


def _shapes(model: Model, recipe: Recipe) -> dict[str, ModelShape]:
    """Shapes of the roles that hold a model; critic and reward have one value per token as their head."""
    shapes = {}
    for role in (role for role in recipe.roles if role != "rollout"):
        given = model.get(role, model["actor"])
        shape = _shape(role, given)
        if role in ("critic", "reward") and role not in recipe.engine_roles and shape.n_labels is None:
            shape = replace(shape, n_labels=1, label_bias=False)
        shapes[role] = shape
    return shapes


def _shape(role: str, given: str | Mapping[str, Any]) -> ModelShape:
    try:
        if isinstance(given, Mapping):
            return ModelShape.from_config(given)
        path = Path(given)
        file = path if path.suffix == ".json" else path / "config.json"
        return ModelShape.from_config(json.loads(file.read_text()))
    except (OSError, json.JSONDecodeError, ModelError) as error:
        raise RecipeError(f"models: {role}: {error}") from None
