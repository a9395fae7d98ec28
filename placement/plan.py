"""The plan: pools, which role is on which, and every role's layout; a YAML file that a person can read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import yaml

from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.hints import did_you_mean
from rolemesh.placement.layout import Layout, LayoutError
from rolemesh.placement.model import ModelShape
from rolemesh.placement.pools import PlacementError, PoolSpec, Where, check_known, fit_pools
from rolemesh.placement.strategies import check_roles, explicit_pools, named_pools


@dataclass(frozen=True)
class PlacementPlan:
    """Where every role runs and how its model is cut.

    `nodes` tells for each pool the (node, processes) it was fitted on, `idle` the devices per node
    that no pool uses; both describe the planned cluster and may be empty in a plan written by hand.
    Raises PlacementError and LayoutError when pools, roles and layouts do not match.
    """

    strategy: str
    pools: tuple[PoolSpec, ...]
    layouts: Mapping[str, Layout]
    nodes: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    idle: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_roles({pool.name: pool.roles for pool in self.pools}, tuple(self.layouts))
        for role, layout in self.layouts.items():
            pool = self.pool_of(role)
            if layout.world != pool.world:
                raise LayoutError(
                    f"role {role!r}: {layout} is {layout.world} ranks, "
                    f"pool {pool.name!r} has {pool.world} devices"
                )

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that have devices."""
        return tuple(self.layouts)

    @property
    def n_devices(self) -> int:
        """Devices of all pools."""
        return sum(pool.world for pool in self.pools)

    def layout_of(self, role: str) -> Layout:
        """The layout of `role`. Raises PlacementError for a role that is not placed."""
        self._check_placed(role)
        return self.layouts[role]

    def pool_of(self, role: str) -> PoolSpec:
        """The pool of `role`. Raises PlacementError for a role that is not placed."""
        self._check_placed(role)
        return next(pool for pool in self.pools if role in pool.roles)

    def _check_placed(self, role: str) -> None:
        if role not in self.layouts:
            raise PlacementError(
                f"role {role!r} is not in the plan (placed: {', '.join(self.roles)})"
                f"{did_you_mean(role, self.roles)}"
            )

    def summary(self) -> list[str]:
        """Lines for a person: pools with their nodes, roles with their layouts, what is left over."""
        lines = [f"{self.strategy}: {len(self.pools)} pools, {self.n_devices} devices"]
        for pool in self.pools:
            nodes = ", ".join(f"{name}: {count}" for name, count in self.nodes.get(pool.name, ()))
            lines.append(f"pool {pool.name}: {pool.world} devices" + (f" ({nodes})" if nodes else ""))
            lines += [f"  {role}: {self.layouts[role]}" for role in pool.roles]
        used = {name for entries in self.nodes.values() for name, _ in entries}
        for name, count in self.idle.items():
            state = f"{count} devices idle" if name in used else f"left over, {count} devices idle"
            lines.append(f"node {name}: {state}")
        return lines

    def to_yaml(self) -> str:
        """The plan as YAML; what has its default value is left out."""
        plan: dict[str, Any] = {
            "strategy": self.strategy,
            "pools": {pool.name: self._pool_keys(pool) for pool in self.pools},
            "layouts": {role: _layout_keys(layout) for role, layout in self.layouts.items()},
        }
        if self.idle:
            plan["idle"] = dict(self.idle)
        return yaml.safe_dump(plan, sort_keys=False, default_flow_style=None, width=100)

    def _pool_keys(self, pool: PoolSpec) -> dict[str, Any]:
        keys: dict[str, Any] = {
            "roles": list(pool.roles),
            "process_on_nodes": list(pool.process_on_nodes),
            "device_kind": pool.device_kind,
            "cpus_per_process": pool.cpus_per_process,
        }
        if where := {key: value for key, value in asdict(pool.where).items() if value}:
            keys["where"] = where
        if pool.name in self.nodes:
            keys["nodes"] = dict(self.nodes[pool.name])
        return keys

    @classmethod
    def from_yaml(cls, text: str) -> PlacementPlan:
        """Read what `to_yaml` wrote or a person edited. Raises PlacementError for unknown or missing keys."""
        plan = _mapping("plan", yaml.safe_load(text), ("strategy", "pools", "layouts"), ("idle",))
        pools, nodes = [], {}
        for name, given in _mapping("pools", plan["pools"]).items():
            optional = ("device_kind", "cpus_per_process", "where", "nodes")
            keys = _mapping(f"pool {name!r}", given, ("roles", "process_on_nodes"), optional)
            if "nodes" in keys:
                nodes[name] = tuple(_mapping(f"pool {name!r}: nodes", keys.pop("nodes")).items())
            pools.append(PoolSpec(name, **{**keys, "where": Where.from_keys(name, keys.get("where", {}))}))
        axes = tuple(axis.name for axis in fields(Layout))
        layouts = {
            role: Layout(**_mapping(f"layout of {role!r}", keys, (), axes))
            for role, keys in _mapping("layouts", plan["layouts"]).items()
        }
        return cls(plan["strategy"], tuple(pools), layouts, nodes, plan.get("idle", {}))


def make_plan(
    strategy: str | Mapping[str, Mapping[str, Any]],
    roles: Sequence[str],
    cluster: ClusterSpec,
    *,
    layouts: Mapping[str, Mapping[str, object]] | None = None,
    shapes: Mapping[str, ModelShape] | None = None,
) -> PlacementPlan:
    """Make pools, fit them on the cluster, and fill and check every role's layout.

    `strategy` is a name or the recipe's pools; `roles` are those that need devices (a function or
    HTTP reward does not); `layouts` pins sizes per role, `shapes` gives the models that are known.
    Raises PlacementError, and LayoutError naming role and pool.
    """
    layouts, shapes = layouts or {}, shapes or {}
    for role in layouts:
        if role not in roles:
            raise LayoutError(
                f"a layout for {role!r}, which needs no devices in this run (roles: {', '.join(roles)})"
                f"{did_you_mean(role, roles)}"
            )
    if isinstance(strategy, str):
        name, pools = strategy, named_pools(strategy, roles, cluster)
    else:
        name, pools = "explicit", explicit_pools(strategy, roles, cluster)
    placement = fit_pools(pools, cluster)
    filled = {}
    for role in roles:
        pool = next(pool for pool in pools if role in pool.roles)
        try:
            filled[role] = Layout.fill(layouts.get(role, {}), pool.world)
            if role in shapes:
                filled[role].check(shapes[role])
        except LayoutError as error:
            raise LayoutError(f"role {role!r} on pool {pool.name!r}: {error}") from None
    idle = {node: count for node, count in placement.free(cluster).items() if count}
    return PlacementPlan(name, pools, filled, placement.nodes, idle)


def devices_needed(demands: Mapping[str, int], groups: Iterable[Iterable[str]]) -> int:
    """Devices that roles want when those of a group share them: the largest demand of each group."""
    return sum(max(demands[role] for role in group) for group in groups)


def device_totals(demands: Mapping[str, int]) -> dict[str, int]:
    """Total devices of the usual groupings, from each role's own demand: what would my flags need?"""
    pairs = (("actor", "ref"), ("critic", "reward"))
    sides = (("actor", "rollout", "ref"), ("critic", "reward"))
    return {
        name: devices_needed(demands, _grouped(demands, groups))
        for name, groups in {
            "each role on its own": (),
            "actor+ref, critic+reward": pairs,
            "split": sides,
            "colocate": (tuple(demands),),
        }.items()
    }


def _grouped(demands: Mapping[str, int], groups: Iterable[Sequence[str]]) -> list[list[str]]:
    """`groups` cut down to the roles there are, and each role they leave out on its own."""
    kept = [[role for role in group if role in demands] for group in groups]
    alone = [[role] for role in demands if not any(role in group for group in kept)]
    return [group for group in kept if group] + alone


def _layout_keys(layout: Layout) -> dict[str, int | bool]:
    return {
        name: value
        for name, value in asdict(layout).items()
        if name in ("tp", "pp", "dp") or value != getattr(Layout(), name)
    }


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
