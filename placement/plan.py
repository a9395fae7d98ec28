"""The plan: pools, which role is on which, every role's layout, order of operations, what is predicted."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.graph import StepGraph
from rolemesh.placement.hardware import canonical
from rolemesh.placement.hints import did_you_mean
from rolemesh.placement.layout import Layout, LayoutError
from rolemesh.placement.memory.items import GIB
from rolemesh.placement.model import ModelShape
from rolemesh.placement.plan_values import Prediction, RoleSettings, rounded, say_nodes
from rolemesh.placement.pools import PlacementError, PoolSpec, fit_pools
from rolemesh.placement.schedule import waits_for
from rolemesh.placement.search.plans import Proof
from rolemesh.placement.strategies import check_roles, cpus_per_process, explicit_pools, named_pools

_PROOF_FIGURES = ("bound_s", "gap", "seconds")


@dataclass(frozen=True)
class PlacementPlan:
    """Where every role runs, how its model is cut, in which order operations take turns, what that costs.

    Only pools and layouts are needed; the rest may be empty in a plan written by hand.

    Attributes:
        strategy: how it was made.
        pools: devices and the roles on them.
        layouts: of each role. The rollout is a role of its own: the layout that generates.
        nodes: for each pool the (node, processes) it was fitted on.
        idle: devices per node that no pool uses. Both describe the cluster planned for.
        device_types: of each pool's devices, where it is known.
        settings: how a role runs, where the plan and not the recipe says it.
        order: for each pool its operations in the order of a step.
        prediction: seconds and bytes.
        proof: how good the plan is known to be.

    Raises PlacementError and LayoutError when the parts do not match.
    """

    strategy: str
    pools: tuple[PoolSpec, ...]
    layouts: Mapping[str, Layout]
    nodes: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    idle: Mapping[str, int] = field(default_factory=dict)
    device_types: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, RoleSettings] = field(default_factory=dict)
    order: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prediction: Prediction = field(default_factory=Prediction)
    proof: Proof | None = None

    def __post_init__(self) -> None:
        check_roles({pool.name: pool.roles for pool in self.pools}, tuple(self.layouts))
        for role, layout in self.layouts.items():
            pool = self.pool_of(role)
            if layout.world != pool.world:
                raise LayoutError(
                    f"role {role!r}: {layout} is {layout.world} ranks, "
                    f"pool {pool.name!r} has {pool.world} devices"
                )
        if self.proof is not None:
            figures: dict[str, Any] = {
                name: rounded(getattr(self.proof, name), name) for name in _PROOF_FIGURES
            }
            object.__setattr__(self, "proof", replace(self.proof, **figures))
        self._check_names()
        self._check_nodes()
        for name, operations in self.order.items():
            if repeated := sorted({op for op in operations if operations.count(op) > 1}):
                raise PlacementError(f"pool {name!r}: order lists {', '.join(repeated)} twice", pool=name)

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

    def settings_of(self, role: str) -> RoleSettings:
        """How `role` runs; what the plan leaves to the recipe is None."""
        self._check_placed(role)
        return self.settings.get(role, RoleSettings())

    def _check_placed(self, role: str) -> None:
        if role not in self.layouts:
            raise PlacementError(
                f"role {role!r} is not in the plan (placed: {', '.join(self.roles)})"
                f"{did_you_mean(role, self.roles)}"
            )

    def _check_names(self) -> None:
        """Raise PlacementError for a part about a role, pool or operation that the plan does not have."""
        pools, told = [pool.name for pool in self.pools], self.prediction
        _check_known("settings", "role", self.settings, self.roles)
        _check_known("predicted memory", "role", [*told.memory, *told.host], self.roles)
        _check_known("predicted memory", "pool", [*told.peak, *told.limit], pools)
        _check_known("nodes, device or order", "pool", [*self.nodes, *self.device_types, *self.order], pools)
        ordered = [name for operations in self.order.values() for name in operations]
        if told.operations_s:
            _check_known("order", "operation", ordered, tuple(told.operations_s))

    def _check_nodes(self) -> None:
        for pool in self.pools:
            planned = sorted(count for _, count in self.nodes.get(pool.name, ()))
            if planned and planned != sorted(pool.process_on_nodes):
                raise PlacementError(
                    f"pool {pool.name!r}: nodes hold {planned} processes, process_on_nodes says "
                    f"{list(pool.process_on_nodes)}",
                    pool=pool.name,
                )

    def check_order(self, graph: StepGraph, staleness: int = 0) -> None:
        """Raise PlacementError unless a step of `graph` can run in the plan's order.

        Every pool that has an order lists just the operations on it, and no operation comes before one
        that it waits for, directly or over other pools. With `staleness` that is a period, see `schedule`.
        """
        pool_of = {role: pool.name for pool in self.pools for role in pool.roles}
        known = tuple(operation.name for operation in graph.operations)
        waits = {name: set(before) for name, before in waits_for(graph, staleness).items()}
        for pool, listed in self.order.items():
            _check_known(f"pool {pool!r}: order", "operation", listed, known)
            there = {op.name for op in graph.operations if pool in (pool_of.get(role) for role in op.roles)}
            if wrong := sorted(set(listed) ^ there):
                raise PlacementError(
                    f"pool {pool!r}: order and the step {graph.name!r} differ in {', '.join(wrong)}: "
                    f"on this pool run {', '.join(name for name in known if name in there)}",
                    pool=pool,
                )
            for before, after in itertools.pairwise(listed):
                waits[after].add(before)
        while ready := [name for name, before in waits.items() if not before]:
            waits = {name: before - set(ready) for name, before in waits.items() if name not in ready}
        if waits:
            stuck = "; ".join(f"{name} waits for {', '.join(sorted(on))}" for name, on in waits.items())
            raise PlacementError(f"no step can run in this order: {stuck}")

    def on(self, cluster: ClusterSpec) -> PlacementPlan:
        """This very plan on the nodes of `cluster`.

        More nodes or devices than planned for stay idle. Raises PlacementError, naming both sides, where the
        cluster has fewer devices, other device types, or lacks a label or resource that a pool asks for.
        """
        bound = self._bound(cluster)
        try:
            nodes = fit_pools(bound, cluster)
        except PlacementError as error:
            raise PlacementError(
                f"the plan does not fit this cluster. Planned for: {self._planned_for()}. {error}",
                pool=error.pool,
                wanted=error.wanted,
                present=error.present,
            ) from None
        idle = {node: count for node, count in nodes.free(cluster).items() if count}
        pools = tuple(replace(b, where=pool.where) for b, pool in zip(bound, self.pools, strict=True))
        return replace(self, pools=pools, nodes=nodes.nodes, idle=idle)

    def _bound(self, cluster: ClusterSpec) -> list[PoolSpec]:
        """Pools bound to the device types they were planned for, with no more CPUs than the nodes have.

        A cluster that does not name its devices has any type, and one that names just the chip (`A100`) any
        size of it.
        """
        there = {node.device_type for node in cluster.usable if node.device_type}
        bound = []
        for pool in self.pools:
            kind = self.device_types.get(pool.name, "")
            kind = next((name for name in there if name.lower() == kind.split("-")[0]), kind)
            binds = kind and there and pool.device_kind == "cuda" and not pool.where.device
            where = replace(pool.where, device=kind) if binds else pool.where
            cpus = min(pool.cpus_per_process, cpus_per_process(cluster))
            bound.append(replace(pool, where=where, cpus_per_process=cpus))
        return bound

    def _planned_for(self) -> str:
        parts = []
        for pool in self.pools:
            kind = canonical(self.device_types.get(pool.name) or pool.where.device or pool.device_kind)
            parts.append(f"{pool.name}: {list(pool.process_on_nodes)} x {kind}")
        return ", ".join(parts)

    def summary(self) -> list[str]:
        """Lines for a person: pools with nodes, roles with layouts, what is left over, what is predicted."""
        lines = [f"{self.strategy}: {len(self.pools)} pools, {self.n_devices} devices"]
        for pool in self.pools:
            nodes = say_nodes(self.nodes.get(pool.name, ()))
            kind = self.device_types.get(pool.name)
            lines.append(
                f"pool {pool.name}: {pool.world} devices"
                + (f" of type {kind}" if kind else "")
                + (f" ({nodes})" if nodes else "")
            )
            lines += [self._role_line(role) for role in pool.roles]
            if pool.name in self.order:
                lines.append(f"  order: {', '.join(self.order[pool.name])}")
            if pool.name in self.prediction.peak:
                limit = self.prediction.limit.get(pool.name)
                of = f" of {limit / GIB:.1f}" if limit else ""
                lines.append(f"  memory: {self.prediction.peak[pool.name] / GIB:.1f}{of} GiB at most")
        used = {name for entries in self.nodes.values() for name, _ in entries}
        for name, count in self.idle.items():
            state = f"{count} devices idle" if name in used else f"left over, {count} devices idle"
            lines.append(f"node {name}: {state}")
        return lines + self._predicted_lines()

    def _role_line(self, role: str) -> str:
        settings, memory = str(self.settings_of(role)), self.prediction.role_bytes(role)
        parts = [str(self.layouts[role]), settings, f"{memory / GIB:.1f} GiB" if memory else ""]
        return f"  {role}: " + "; ".join(part for part in parts if part)

    def _predicted_lines(self) -> list[str]:
        lines = []
        if self.prediction.step_s is not None:
            lines.append(f"step: {self.prediction.step_s:.4g} s predicted")
        lines += [f"  {name}: {seconds:.4g} s" for name, seconds in self.prediction.operations_s.items()]
        if self.proof is not None:
            known = (
                "no better plan" if self.proof.optimal else f"a better plan by at most {self.proof.gap:.1%}"
            )
            scope = f" (not looked at: {self.proof.scope})" if self.proof.scope else ""
            lines.append(
                f"proof: there is {known}{scope}; {self.proof.nodes_visited} choices visited "
                f"in {self.proof.seconds:.2g} s"
            )
        return lines

    def to_yaml(self) -> str:
        """The plan as YAML; what has its default value is left out."""
        from rolemesh.placement.plan_yaml import write_plan

        return write_plan(self)

    @classmethod
    def from_yaml(cls, text: str) -> PlacementPlan:
        """Read what `to_yaml` wrote or a person edited. Raises PlacementError for unknown or missing keys."""
        from rolemesh.placement.plan_yaml import read_plan

        return read_plan(text)


def make_plan(
    strategy: str | Mapping[str, Mapping[str, Any]],
    roles: Sequence[str],
    cluster: ClusterSpec,
    *,
    layouts: Mapping[str, Mapping[str, object]] | None = None,
    shapes: Mapping[str, ModelShape] | None = None,
    runnable: bool = True,
    engines: Collection[str] = ("rollout",),
) -> PlacementPlan:
    """Make pools, fit them on the cluster, and fill and check every role's layout.

    `strategy` is a name or the recipe's pools; `roles` are those that need devices (a function or
    HTTP reward does not); `layouts` pins sizes per role, `shapes` gives the models that are known.
    `runnable` also asks that our workers can run the layouts, not only that models can be cut so; the roles
    of `engines` are run by inference engines.
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
                ours = runnable and role not in engines  # an engine's layout is its own
                (filled[role].check if ours else filled[role].check_cut)(shapes[role])
        except LayoutError as error:
            raise LayoutError(f"role {role!r} on pool {pool.name!r}: {error}") from None
    idle = {node: count for node, count in placement.free(cluster).items() if count}
    return PlacementPlan(name, pools, filled, placement.nodes, idle, _device_types(placement.nodes, cluster))


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


def _device_types(nodes: Mapping[str, tuple[tuple[str, int], ...]], cluster: ClusterSpec) -> dict[str, str]:
    """The device type of each pool whose nodes all have the same known one; worker slots have none."""
    if cluster.device_kind == "cpu":
        return {}
    kinds = {node.name: cluster.device_type(node) for node in cluster.usable}
    found = {pool: {kinds[name] for name, _ in entries} for pool, entries in nodes.items()}
    return {pool: min(types) for pool, types in found.items() if len(types) == 1 and types != {""}}


def _check_known(what: str, kind: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise PlacementError(
                f"{what}: the plan has no {kind} {name!r} ({', '.join(known)}){did_you_mean(name, known)}"
            )
