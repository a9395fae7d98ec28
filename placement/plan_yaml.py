"""Plans as YAML that a person can read, edit and diff; amounts of memory in GiB."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import yaml

from rolemesh.placement.layout import Layout
from rolemesh.placement.memory.items import GIB
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.plan_values import Prediction, RoleSettings
from rolemesh.placement.pools import PlacementError, PoolSpec, Where, check_known
from rolemesh.placement.search.plans import Proof

_PLAN_KEYS = ("idle", "settings", "predicted", "proof")
_POOL_KEYS = ("device", "device_kind", "cpus_per_process", "where", "nodes", "order")
_PREDICTED_KEYS = ("step_s", "operations_s", "memory_gib", "host_gib", "peak_gib", "limit_gib")


def write_plan(plan: PlacementPlan) -> str:
    """The plan as YAML; `read_plan` gives an equal one. What has its default value is left out."""
    keys: dict[str, Any] = {
        "strategy": plan.strategy,
        "pools": {pool.name: _pool_keys(plan, pool) for pool in plan.pools},
        "layouts": {role: _layout_keys(layout) for role, layout in plan.layouts.items()},
    }
    if plan.settings:
        keys["settings"] = {role: _given(settings) for role, settings in plan.settings.items()}
    if plan.idle:
        keys["idle"] = dict(plan.idle)
    if plan.prediction:
        keys["predicted"] = _predicted_keys(plan.prediction)
    if plan.proof is not None:
        keys["proof"] = {name: value for name, value in asdict(plan.proof).items() if value != ""}
    return yaml.safe_dump(keys, sort_keys=False, default_flow_style=None, width=100)


def read_plan(text: str) -> PlacementPlan:
    """Read what `write_plan` wrote or a person edited.

    Raises PlacementError for what is not YAML, keys that are unknown, missing or there twice, and values of
    the wrong kind; LayoutError for layouts that do not match their pool.
    """
    try:
        loaded = yaml.load(text, _Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise PlacementError(f"the plan is not YAML: {error}") from None
    keys = _mapping("plan", loaded, ("strategy", "pools", "layouts"), _PLAN_KEYS)
    if not isinstance(keys["strategy"], str):
        raise PlacementError(f"strategy must be text, got {keys['strategy']!r}")
    given = {
        name: _mapping(f"pool {name!r}", pool, ("roles", "process_on_nodes"), _POOL_KEYS)
        for name, pool in _mapping("pools", keys["pools"]).items()
    }
    return PlacementPlan(
        keys["strategy"],
        tuple(_pool(name, pool) for name, pool in given.items()),
        {role: _layout(role, axes) for role, axes in _mapping("layouts", keys["layouts"]).items()},
        {name: _nodes(name, pool["nodes"]) for name, pool in given.items() if "nodes" in pool},
        {name: _count(f"idle.{name}", n) for name, n in _mapping("idle", keys.get("idle", {})).items()},
        {name: _text(f"pool {name!r}: device", p["device"]) for name, p in given.items() if "device" in p},
        {
            role: _settings(role, said)
            for role, said in _mapping("settings", keys.get("settings", {})).items()
        },
        {
            name: tuple(_texts(f"pool {name!r}: order", pool["order"]))
            for name, pool in given.items()
            if "order" in pool
        },
        _prediction(keys.get("predicted", {})),
        _proof(keys["proof"]) if "proof" in keys else None,
    )


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, where YAML would keep the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if isinstance(name, Hashable) and name in seen:
                raise PlacementError(f"the plan has {name!r} twice (line {key.start_mark.line + 1})")
            seen.add(name)
        return super().construct_mapping(node, deep)


def _pool_keys(plan: PlacementPlan, pool: PoolSpec) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "roles": list(pool.roles),
        "process_on_nodes": list(pool.process_on_nodes),
        "device_kind": pool.device_kind,
        "cpus_per_process": pool.cpus_per_process,
    }
    if device := plan.device_types.get(pool.name):
        keys["device"] = device
    if where := {key: value for key, value in asdict(pool.where).items() if value}:
        keys["where"] = where
    if pool.name in plan.nodes:
        keys["nodes"] = dict(plan.nodes[pool.name])
    if pool.name in plan.order:
        keys["order"] = list(plan.order[pool.name])
    return keys


def _layout_keys(layout: Layout) -> dict[str, int | bool | list[int]]:
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(layout).items()
        if name in ("tp", "pp", "dp") or value != getattr(Layout(), name)
    }


def _given(settings: RoleSettings) -> dict[str, Any]:
    return {name: value for name, value in asdict(settings).items() if value is not None}


def _predicted_keys(told: Prediction) -> dict[str, Any]:
    keys: dict[str, Any] = {} if told.step_s is None else {"step_s": told.step_s}
    if told.operations_s:
        keys["operations_s"] = dict(told.operations_s)
    if told.memory:
        keys["memory_gib"] = {role: _gib(items) for role, items in told.memory.items()}
    return keys | {f"{name}_gib": _gib(getattr(told, name)) for name in _AMOUNTS if getattr(told, name)}


_AMOUNTS = ("host", "peak", "limit")


def _gib(amounts: Mapping[str, float]) -> dict[str, float]:
    return {name: amount / GIB for name, amount in amounts.items()}


def _pool(name: object, keys: Mapping[str, Any]) -> PoolSpec:
    what = f"pool {name!r}"
    own = {key: value for key, value in keys.items() if key not in ("device", "nodes", "order", "where")}
    own["roles"] = tuple(_texts(f"{what}: roles", own["roles"]))
    if not isinstance(own["process_on_nodes"], list):
        raise PlacementError(f"{what}: process_on_nodes must be a list, got {own['process_on_nodes']!r}")
    if own.get("device_kind", "cuda") not in ("cuda", "cpu"):
        raise PlacementError(f"{what}: device_kind is cuda or cpu, got {own['device_kind']!r}")
    cpus = own.get("cpus_per_process", 1.0)
    if isinstance(cpus, bool) or not isinstance(cpus, int | float):
        raise PlacementError(f"{what}: cpus_per_process must be a number, got {cpus!r}")
    where = Where.from_keys(str(name), _mapping(f"{what}: where", keys.get("where", {})))
    return PoolSpec(_text("a pool's name", name), **own, where=where)


def _layout(role: str, keys: object) -> Layout:
    axes = tuple(axis.name for axis in fields(Layout))
    return Layout(**_mapping(f"layout of {role!r}", keys, (), axes))


def _nodes(pool: str, keys: object) -> tuple[tuple[str, int], ...]:
    entries = _mapping(f"pool {pool!r}: nodes", keys)
    return tuple((str(node), _count(f"pool {pool!r}: nodes.{node}", n)) for node, n in entries.items())


def _settings(role: str, keys: object) -> RoleSettings:
    known = tuple(part.name for part in fields(RoleSettings))
    given = _mapping(f"settings of {role!r}", keys, (), known)
    try:
        return RoleSettings(**given)
    except PlacementError as error:
        raise PlacementError(f"settings of {role!r}: {error}") from None


def _prediction(keys: object) -> Prediction:
    given = _mapping("predicted", keys, (), _PREDICTED_KEYS)
    amounts = {name: _bytes(f"{name}_gib", given.get(f"{name}_gib", {})) for name in _AMOUNTS}
    memory = _mapping("memory_gib", given.get("memory_gib", {}))
    return Prediction(
        given.get("step_s"),
        _mapping("operations_s", given.get("operations_s", {})),
        {role: _bytes(f"memory_gib.{role}", items) for role, items in memory.items()},
        **amounts,
    )


def _bytes(what: str, keys: object) -> dict[str, Any]:
    """Amounts in GiB as bytes; what is no number is left for the value to refuse."""
    return {
        name: amount * GIB if type(amount) in (int, float) else amount
        for name, amount in _mapping(what, keys).items()
    }


def _proof(keys: object) -> Proof:
    given = _mapping("proof", keys, ("bound_s", "gap", "nodes_visited", "seconds"), ("scope",))
    return Proof(**{**given, "nodes_visited": _count("proof.nodes_visited", given["nodes_visited"])})


def _count(what: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise PlacementError(f"{what} must be a whole number of at least 0, got {value!r}")
    return value


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise PlacementError(f"{what} must be text, got {value!r}")
    return value


def _texts(what: str, values: object) -> list[str]:
    if not isinstance(values, list):
        raise PlacementError(f"{what} must be a list, got {values!r}")
    return [_text(f"an entry of {what}", value) for value in values]


def _mapping(
    what: str, given: object, required: Sequence[str] = (), optional: Sequence[str] = ()
) -> dict[str, Any]:
    """`given` as a mapping with these keys (any keys where none are named)."""
    if not isinstance(given, Mapping):
        raise PlacementError(f"{what}: expected a mapping, got {given!r}")
    known = (*required, *optional)
    if known:
        check_known(what, given, known)
    if missing := [key for key in required if key not in given]:
        raise PlacementError(f"{what} lacks {', '.join(missing)}")
    return dict(given)
