"""Pools of devices, and fitting them onto the nodes of a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

from rolemesh.placement.cluster import ClusterSpec, DeviceKind, NodeSpec
from rolemesh.placement.hardware import canonical
from rolemesh.placement.hints import did_you_mean
from rolemesh.placement.packing import Room, search


class PlacementError(ValueError):
    """Pools that the cluster cannot hold; `wanted` and `present` count devices, `pool` names the culprit."""

    def __init__(self, message: str, *, pool: str = "", wanted: int = 0, present: int = 0) -> None:
        super().__init__(message)
        self.pool = pool
        self.wanted = wanted
        self.present = present


def check_known(what: str, keys: Iterable[str], known: Sequence[str]) -> None:
    """Raise PlacementError for the first of `keys` that is not known, naming the nearest."""
    for key in keys:
        if key not in known:
            hint = did_you_mean(key, known)
            raise PlacementError(f"{what} has no key {key!r} (known: {', '.join(known)}){hint}")


@dataclass(frozen=True)
class Where:
    """Which nodes a pool may use: device type, labels, a resource each process takes, the node's address."""

    device: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    resources_per_worker: Mapping[str, float] = field(default_factory=dict)
    node_ip: str = ""

    def __post_init__(self) -> None:
        for key in ("labels", "resources_per_worker"):
            if not isinstance(getattr(self, key), Mapping):
                raise PlacementError(f"where.{key} must be a mapping, got {getattr(self, key)!r}")
        for name, amount in self.resources_per_worker.items():
            if amount <= 0:
                raise PlacementError(f"where.resources_per_worker.{name} must be above 0, got {amount}")

    @classmethod
    def from_keys(cls, pool: str, keys: Mapping[str, Any]) -> Where:
        """`where` of a recipe's or a plan's pool. Raises PlacementError for an unknown key."""
        check_known(f"pool {pool!r}: where", keys, tuple(key.name for key in fields(cls)))
        return cls(**keys)

    def admits(self, node: NodeSpec) -> bool:
        """Whether a process may run on `node`, capacity aside."""
        return (
            node.alive
            and (not self.device or canonical(self.device) == canonical(node.device_type))
            and all(node.labels.get(key) == str(value) for key, value in self.labels.items())
            and all(node.resources.get(name, 0) > 0 for name in self.resources_per_worker)
            and (not self.node_ip or self.node_ip in (node.address, node.name))
        )


@dataclass(frozen=True)
class PoolSpec:
    """Devices that some roles share, as processes per node: each entry is a node of its own.

    One process holds one device and `cpus_per_process` CPUs. Raises PlacementError for an empty
    pool, an entry below 1 and a role listed twice.
    """

    name: str
    roles: tuple[str, ...]
    process_on_nodes: tuple[int, ...]
    device_kind: DeviceKind = "cuda"
    cpus_per_process: float = 1.0
    where: Where = Where()

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", tuple(self.roles))
        object.__setattr__(self, "process_on_nodes", tuple(self.process_on_nodes))
        counts = self.process_on_nodes
        if not counts or any(type(count) is not int or count < 1 for count in counts):
            raise PlacementError(
                f"pool {self.name!r}: process_on_nodes must be whole numbers of at least 1, got {counts}",
                pool=self.name,
            )
        if len(set(self.roles)) < len(self.roles):
            raise PlacementError(
                f"pool {self.name!r} lists a role twice: {', '.join(self.roles)}", pool=self.name
            )
        if self.cpus_per_process < 0:
            raise PlacementError(f"pool {self.name!r}: cpus_per_process is {self.cpus_per_process}, below 0")

    @property
    def world(self) -> int:
        """Processes, and devices, of the pool."""
        return sum(self.process_on_nodes)


@dataclass(frozen=True)
class Placement:
    """For each pool the (node name, processes) that its entries got, in the order of the entries."""

    nodes: Mapping[str, tuple[tuple[str, int], ...]]

    def free(self, cluster: ClusterSpec) -> dict[str, int]:
        """Devices that no pool took, per usable node."""
        left = {node.name: node.devices for node in cluster.usable}
        for assigned in self.nodes.values():
            for name, count in assigned:
                left[name] -= count
        return left


def fit_pools(pools: Sequence[PoolSpec], cluster: ClusterSpec) -> Placement:
    """Give every entry of every pool a node; exact: whatever can be packed is packed, in node order.

    Raises PlacementError with the pool, devices wanted and present, the nodes, and the nearest that fits.
    """
    names = [pool.name for pool in pools]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise PlacementError(f"several pools are named {', '.join(repeated)}", pool=repeated[0])
    for pool in pools:
        _check_alone(pool, cluster)
    if sum(pool.world for pool in pools) > cluster.n_devices:
        raise exclusive_error({pool.name: pool.world for pool in pools}, cluster)
    found = search(pools, cluster)
    if found is None:
        _raise_first_that_fails(pools, cluster)
    return Placement(found)


def exclusive_error(worlds: Mapping[str, int], cluster: ClusterSpec) -> PlacementError:
    """The error for pools (name to devices) that want more together than there is."""
    wanted, present = sum(worlds.values()), cluster.n_devices
    each = " + ".join(f"{name} {world}" for name, world in worlds.items())
    return PlacementError(
        f"pools are exclusive: {each} = {wanted} devices wanted > {present} present. Roles that may take "
        f"turns on the same devices go in one pool (colocation). Nodes:\n{cluster.table()}",
        pool=list(worlds)[-1],
        wanted=wanted,
        present=present,
    )


def _check_alone(pool: PoolSpec, cluster: ClusterSpec) -> None:
    """Raise PlacementError when the pool would not even fit into the empty cluster."""
    if pool.device_kind != cluster.device_kind:
        raise PlacementError(
            f"pool {pool.name!r} asks {pool.device_kind} devices, the cluster has {cluster.device_kind} ones"
            f". Nodes:\n{cluster.table()}",
            pool=pool.name,
            wanted=pool.world,
        )
    alive = [node for node in cluster.nodes if node.alive]
    if alive and not any(pool.where.admits(node) for node in alive):
        raise PlacementError(
            f"pool {pool.name!r}: no node has {_missing(pool.where, alive)}. Nodes:\n{cluster.table()}",
            pool=pool.name,
            wanted=pool.world,
        )
    if search([pool], cluster) is None:
        raise _too_small(pool, Placement({}), (), cluster)


def _missing(where: Where, nodes: Sequence[NodeSpec]) -> str:
    """The constraints that no node meets, each with the values that exist; all of them when only jointly."""
    types = sorted({node.device_type for node in nodes if node.device_type})
    labels = sorted({f"{key}={value}" for node in nodes for key, value in node.labels.items()})
    resources = sorted({name for node in nodes for name in node.resources})
    addresses = [f"{node.name} {node.address}".strip() for node in nodes]
    checks = [(f"device type {where.device!r}", Where(device=where.device), "types", types)]
    checks += [
        (f"label {key}={value}", Where(labels={key: value}), "labels", labels)
        for key, value in where.labels.items()
    ]
    checks += [
        (f"resource {name!r}", Where(resources_per_worker={name: amount}), "resources", resources)
        for name, amount in where.resources_per_worker.items()
    ]
    checks += [(f"address {where.node_ip!r}", Where(node_ip=where.node_ip), "nodes", addresses)]
    unmet = [
        f"{what} (there are {kind}: {', '.join(known) or 'none'})"
        for what, part, kind, known in checks
        if not any(part.admits(node) for node in nodes)
    ]
    return ", ".join(unmet) or "all of " + ", ".join(what for what, part, _, _ in checks if part != Where())


def _raise_first_that_fails(pools: Sequence[PoolSpec], cluster: ClusterSpec) -> NoReturn:
    """Raise for the first pool that does not fit beside those listed before it."""
    before = Placement({})
    for i, pool in enumerate(pools):
        placed = search(pools[: i + 1], cluster)
        if placed is None:
            raise _too_small(pool, before, pools[:i], cluster)
        before = Placement(placed)
    raise AssertionError("pools that fit together were reported as not fitting")


def _too_small(
    pool: PoolSpec, before: Placement, others: Sequence[PoolSpec], cluster: ClusterSpec
) -> PlacementError:
    """The error for a pool that does not fit beside `others`, placed as `before` says."""
    asked = pool.where.resources_per_worker
    rooms = {node.name: Room.of(node, [pool]) for node in cluster.usable}
    for other in others:
        for name, count in before.nodes[other.name]:
            rooms[name] = replace(rooms[name].less(other, count), taken=False)
    fits = sorted((room.capacity(pool) for room in rooms.values()), reverse=True)
    present = sum(room.devices for room in rooms.values() if pool.name in room.admitted)
    short = [
        f"node {name} takes {room.capacity(pool)} of its processes ({room.devices} devices"
        + (f", {room.cpus:g} CPUs" if math.isfinite(room.cpus) else "")
        + "".join(f", {amount:g} {kind}" for kind, amount in room.resources if kind in asked)
        + f" free; needs {min(pool.process_on_nodes)})"
        for name, room in rooms.items()
        if room.capacity(pool) < min(pool.process_on_nodes)
    ]
    beside = f" beside {', '.join(other.name for other in others)}" if others else ""
    each = [f"{pool.cpus_per_process:g} CPUs"] if pool.cpus_per_process else []
    each += [f"{amount:g} {kind}" for kind, amount in asked.items()]
    takes = f" with {' and '.join(each)} each" if each else ""
    return PlacementError(
        f"pool {pool.name!r} asks {pool.world} devices on {len(pool.process_on_nodes)} nodes as "
        f"{list(pool.process_on_nodes)}{takes}; {present} present{beside}"
        + "".join(f"; {text}" for text in short[:4])
        + f". Nearest that fits: {_nearest(pool, fits)}. Nodes:\n{cluster.table()}",
        pool=pool.name,
        wanted=pool.world,
        present=present,
    )


def _nearest(pool: PoolSpec, fits: Sequence[int]) -> list[int] | str:
    """Equal entries, as many devices as possible but no more than asked, on about as many nodes as asked."""
    asked = len(pool.process_on_nodes)
    options = [[min(fit, pool.world // n)] * n for n, fit in enumerate(fits, start=1)]
    options = [option for option in options if all(option)]
    return max(options, key=lambda option: (sum(option), -abs(len(option) - asked)), default=[]) or "none"
