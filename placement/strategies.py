"""From roles to pools: strategies by name, and the pools that a recipe writes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.hints import did_you_mean
from rolemesh.placement.packing import Room
from rolemesh.placement.pools import PlacementError, PoolSpec, Where, check_known, fit_pools

Strategy = Callable[[Sequence[str], ClusterSpec], tuple[PoolSpec, ...]]
_STRATEGIES: dict[str, Strategy] = {}  # filled by the decorator while the module loads
_SIZE_KEYS = (("share",), ("devices",), ("nodes", "per_node"))
_POOL_KEYS = ("roles", "share", "devices", "nodes", "per_node", "where", "cpus_per_process")


def register_strategy(name: str) -> Callable[[Strategy], Strategy]:
    """Make the decorated function the strategy `name`. Raises PlacementError when it is taken."""

    def register(strategy: Strategy) -> Strategy:
        if name in _STRATEGIES:
            raise PlacementError(f"strategy {name!r} is registered already")
        _STRATEGIES[name] = strategy
        return strategy

    return register


def named_pools(strategy: str, roles: Sequence[str], cluster: ClusterSpec) -> tuple[PoolSpec, ...]:
    """Pools of the strategy `strategy` for the roles that need devices.

    Raises PlacementError for an unknown name, a cluster without devices, and what the strategy refuses.
    """
    if strategy not in _STRATEGIES:
        raise PlacementError(
            f"no strategy {strategy!r} (registered: {', '.join(sorted(_STRATEGIES))})"
            f"{did_you_mean(strategy, _STRATEGIES)}"
        )
    if not cluster.usable:
        raise PlacementError(f"no node has a device. Nodes:\n{cluster.table()}")
    return _STRATEGIES[strategy](roles, cluster)


@register_strategy("colocate")
def colocate(roles: Sequence[str], cluster: ClusterSpec) -> tuple[PoolSpec, ...]:
    """All roles on all devices, taking turns."""
    return (_pool("all", roles, [node.devices for node in cluster.usable], cluster),)


@register_strategy("split")
def split(roles: Sequence[str], cluster: ClusterSpec) -> tuple[PoolSpec, ...]:
    """The actor's side and the critic's side (without a critic: the reference's), on one half each."""
    name, second = (
        ("critic_side", ("critic", "reward")) if "critic" in roles else ("ref_side", ("ref", "reward"))
    )
    sides = [role for role in roles if role not in second], [role for role in roles if role in second]
    if not all(sides):
        raise PlacementError(
            f"split needs roles on both sides; {', '.join(roles)} are all on one: use colocate"
        )
    if cluster.n_devices == 1:
        raise PlacementError(f"a single device cannot be split: use colocate. Nodes:\n{cluster.table()}")
    halves = _halves([node.devices for node in cluster.usable])
    return _pool("actor_side", sides[0], halves[0], cluster), _pool(name, sides[1], halves[1], cluster)


@register_strategy("standalone")
def standalone(roles: Sequence[str], cluster: ClusterSpec) -> tuple[PoolSpec, ...]:
    """Each role alone on devices of its own, in a pool named after it, as evenly as whole nodes allow.

    With at least as many nodes as roles everyone gets whole nodes, the first roles one more where they do
    not divide. With fewer, roles are spread over the nodes, each on the node where most devices are left for
    it, and share that node evenly, the first ones one device more.
    """
    if cluster.n_devices < len(roles):
        raise PlacementError(
            f"standalone gives each of the {len(roles)} roles ({', '.join(roles)}) a device of its own, "
            f"there are {cluster.n_devices}: use colocate or split. Nodes:\n{cluster.table()}",
            wanted=len(roles),
            present=cluster.n_devices,
        )
    nodes = [node.devices for node in cluster.usable]
    if len(nodes) >= len(roles):
        ends = [sum(_even(len(nodes), len(roles))[: i + 1]) for i in range(len(roles))]
        counts = [nodes[first:end] for first, end in zip([0, *ends], ends, strict=False)]
    else:
        counts = _shared_nodes(nodes, len(roles))
    return tuple(_pool(role, [role], entry, cluster) for role, entry in zip(roles, counts, strict=True))


def _even(total: int, parts: int) -> list[int]:
    """`total` in `parts` whole numbers that differ by at most 1, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def _shared_nodes(nodes: Sequence[int], n_roles: int) -> list[list[int]]:
    """Devices of each role where nodes are fewer than roles: consecutive roles on a node."""
    on = [0] * len(nodes)
    for _ in range(n_roles):
        best = max(range(len(nodes)), key=lambda i: (nodes[i] / (on[i] + 1), -i))
        on[best] += 1
    return [[count] for devices, n in zip(nodes, on, strict=True) if n for count in _even(devices, n)]


def explicit_pools(
    pools: Mapping[str, Mapping[str, Any]], roles: Sequence[str], cluster: ClusterSpec
) -> tuple[PoolSpec, ...]:
    """The pools of a recipe: `roles`, a size (`share`, `devices`, or `nodes` with `per_node`), `where`.

    `share` is a part of the devices that `where` admits. Pools with a node count take their nodes
    first; the others follow in order, each on one node where it fits whole. Raises PlacementError
    for an unknown key, a size that is no whole number, and a role in no pool or in two.
    """
    for name, request in pools.items():
        _check_keys(name, request)
    check_roles({name: _roles(request) for name, request in pools.items()}, roles)
    fixed = {
        name: _requested(
            name, request, [_count(name, request, "per_node")] * _count(name, request, "nodes"), cluster
        )
        for name, request in pools.items()
        if "nodes" in request
    }
    free = fit_pools(list(fixed.values()), cluster).free(cluster)
    made = []
    for name, request in pools.items():
        if name in fixed:
            made.append(fixed[name])
            continue
        where = Where.from_keys(name, request.get("where", {}))
        admitted = [node for node in cluster.usable if where.admits(node)]
        size = _size(name, request, sum(node.devices for node in admitted))
        one = _requested(name, request, [1], cluster)
        most = {node.name: Room.of(node, [one]).capacity(one) for node in admitted}
        counts = _allocate(size, most, free)
        made.append(_requested(name, request, counts, cluster))
    return tuple(made)


def check_roles(pools: Mapping[str, Sequence[str]], roles: Sequence[str]) -> None:
    """Raise PlacementError unless each of `roles` is in exactly one pool and no pool holds another role."""
    for role in roles:
        holders = [name for name, held in pools.items() if role in held]
        if not holders:
            raise PlacementError(f"role {role!r} is in no pool (pools: {', '.join(pools) or 'none'})")
        if len(holders) > 1:
            raise PlacementError(f"role {role!r} is in several pools: {', '.join(holders)}")
    for name, held in pools.items():
        for role in held:
            if role not in roles:
                raise PlacementError(
                    f"pool {name!r} holds role {role!r}, which needs no devices in this run "
                    f"(roles: {', '.join(roles)}){did_you_mean(role, roles)}"
                )


def _pool(name: str, roles: Sequence[str], counts: Sequence[int], cluster: ClusterSpec) -> PoolSpec:
    return PoolSpec(name, tuple(roles), tuple(counts), cluster.device_kind, cpus_per_process(cluster))


def cpus_per_process(cluster: ClusterSpec) -> float:
    """One CPU per process, or an equal fraction where a node has fewer CPUs than devices."""
    fraction = min((node.cpus / node.devices for node in cluster.usable), default=1.0)
    return 1.0 if fraction >= 1 else math.floor(fraction * 10_000) / 10_000  # Ray counts in 1/10000


def _halves(devices: Sequence[int]) -> tuple[list[int], list[int]]:
    """Processes per node of each half; an odd node is halved where its devices are even, else left over."""
    n, middle = len(devices), len(devices) // 2
    if n == 1:
        return [devices[0] // 2], [devices[0] // 2]
    if n % 2 == 0:
        return list(devices[:middle]), list(devices[middle:])
    even = [i for i in range(n) if devices[i] % 2 == 0]
    if not even:
        return list(devices[:middle]), list(devices[middle : n - 1])
    shared = min(even, key=lambda i: abs(i - middle))
    others, half = [*devices[:shared], *devices[shared + 1 :]], devices[shared] // 2
    return [*others[:middle], half], [half, *others[middle:]]


def _check_keys(name: str, request: Mapping[str, Any]) -> None:
    check_known(f"pool {name!r}", request, _POOL_KEYS)
    given = tuple(key for keys in _SIZE_KEYS for key in keys if key in request)
    if given not in _SIZE_KEYS:
        raise PlacementError(
            f"pool {name!r} needs exactly one size: share, devices, or nodes with per_node "
            f"(given: {', '.join(given) or 'none'})",
            pool=name,
        )


def _roles(request: Mapping[str, Any]) -> tuple[str, ...]:
    roles = request.get("roles", ())
    return (roles,) if isinstance(roles, str) else tuple(roles)


def _requested(
    name: str, request: Mapping[str, Any], counts: Sequence[int], cluster: ClusterSpec
) -> PoolSpec:
    cpus = float(request.get("cpus_per_process", cpus_per_process(cluster)))
    where = Where.from_keys(name, request.get("where", {}))
    return PoolSpec(name, _roles(request), tuple(counts), cluster.device_kind, cpus, where)


def _count(name: str, request: Mapping[str, Any], key: str) -> int:
    value = request[key]
    if type(value) is not int or value < 1:
        raise PlacementError(
            f"pool {name!r}: {key} must be a whole number of at least 1, got {value!r}", pool=name
        )
    return value


def _size(name: str, request: Mapping[str, Any], total: int) -> int:
    """Devices that `share` or `devices` asks for, out of `total`."""
    if "devices" in request:
        return _count(name, request, "devices")
    if not total:
        return 1  # no node is admitted: the fit refuses any size, naming what is missing
    try:
        share = Fraction(str(request["share"]))
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share <= 1:
        raise PlacementError(
            f"pool {name!r}: share must be like 1/2, above 0 and at most 1, got {request['share']!r}"
        )
    size = share * total
    if size.denominator != 1:
        whole = ", ".join(f"1/{n}" for n in range(1, total + 1) if total % n == 0)
        raise PlacementError(
            f"pool {name!r}: share {share} of {total} devices is {float(size):.2f}, not whole; "
            f"shares that are: {whole}",
            pool=name,
        )
    return int(size)


def _allocate(size: int, most: Mapping[str, int], free: dict[str, int]) -> list[int]:
    """Processes per node for `size` devices, taken from `free`: one node that holds all, else in node order.

    `most` is how many a node can hold, by its CPUs and other resources too.
    Where too little is free the whole size comes back as one entry, for the fit to refuse with its numbers.
    """
    room = {name: min(free[name], count) for name, count in most.items()}
    whole = next((name for name in room if room[name] >= size), None)
    takes: dict[str, int] = {}
    for name in room if whole is None else [whole]:
        takes[name] = min(room[name], size - sum(takes.values()))
    if sum(takes.values()) < size:
        return [size]
    for name, count in takes.items():
        free[name] -= count
    return [count for count in takes.values() if count]
