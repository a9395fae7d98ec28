"""Random small placement problems, and their best plan by trying everything, apart from the search."""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rolemesh.placement.cluster import ClusterSpec, NodeSpec
from rolemesh.placement.costs import DeviceSet, RoleCost, RoleOption
from rolemesh.placement.graph import StepGraph
from rolemesh.placement.layout import Layout
from rolemesh.placement.search import Pin
from rolemesh.placement.steps import step_graph

TICK = 1 / 64  # seconds are whole ticks, so that sums are exact in any order
Pools = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class RandomCosts:
    """Seconds and bytes drawn by role and devices; more devices are not faster, and layouts mean nothing."""

    graph: StepGraph
    seed: int
    n_options: int
    memory: float  # of a device; what is resident or works is between 0 and 10

    def options(self, role: str, devices: DeviceSet) -> list[RoleCost]:
        rng = random.Random(f"{self.seed} {role} {devices.device_type} {devices.counts}")
        own = [op.name for op in self.graph.operations if op.role == role and op.kind != "transfer"]
        moved = [op.name for op in self.graph.operations if op.kind == "transfer" and role in op.roles]
        return [
            RoleCost(
                RoleOption(Layout(tp=rng.randint(1, 3)), micro_batch=i, offload=rng.random() < 0.3),
                {name: rng.randint(1, 640) * TICK for name in own},
                resident=rng.randint(0, 10),
                working={name: rng.randint(0, 10) for name in own + moved},
                host=rng.randint(0, 10),
                items={"weights": 1.0},
            )
            for i in range(rng.randint(0 if rng.random() < 0.2 else 1, self.n_options))
        ]

    def transfer_s(self, operation, source, source_devices, target, target_devices, *, together) -> float:
        ends = [
            (cost.option.layout.tp, cost.option.offload, on.device_type, on.counts)
            for cost, on in ((source, source_devices), (target, target_devices))
        ]
        return random.Random(f"{self.seed} {operation} {ends} {together}").randint(0, 128) * TICK

    def device_bytes(self, device_type: str) -> float:
        return self.memory + len(device_type)

    def host_bytes(self, device_type: str) -> float:
        return self.memory


@dataclass(frozen=True)
class FlooredCosts(RandomCosts):
    """The same, and floors between half of the least seconds and all of them."""

    def floor_s(self, role: str, devices: DeviceSet) -> dict[str, float]:
        share = random.Random(f"{self.seed} floor {role} {devices}").choice([0.5, 0.9, 1.0])
        options = self.options(role, devices)
        names = [op.name for op in self.graph.operations if op.role == role and op.kind != "transfer"]
        return {name: share * min((cost.seconds[name] for cost in options), default=0.0) for name in names}


@dataclass(frozen=True)
class Instance:
    graph: StepGraph
    roles: tuple[str, ...]
    cluster: ClusterSpec
    costs: RandomCosts
    pins: tuple[Pin, ...] = ()
    staleness: int = 0


def random_instance(seed: int, most_rows: int, *, pinned: bool = False) -> Instance:
    """Four roles (three without a critic) on up to 16 devices, with at most `most_rows` combinations."""
    rng = random.Random(seed)
    if rng.random() < 0.75:
        graph = step_graph("ppo", reference=True, reward="function", kl_in=rng.choice(["reward", "loss"]))
    else:
        graph = step_graph("grpo", reference=True, reward="model", kl_in="loss")
    roles = tuple(role for role in graph.roles() if role != "reward" or graph.name == "grpo")
    n_options = 0
    while n_options < 3:  # clusters with too many placements for that are drawn anew
        cluster = random_cluster(rng)
        places = sum(1 for pools in partitions(roles) for _ in placements(cluster, len(pools)))
        n_options = min(12, int((most_rows / max(1, places)) ** (1 / len(roles))))
    pins = random_pins(rng, roles) if pinned else ()
    memory = rng.choice([12.0, 20.0, 30.0, 45.0])
    costs = (FlooredCosts if rng.random() < 0.5 else RandomCosts)(graph, seed, n_options, memory)
    return Instance(graph, roles, cluster, costs, pins, rng.choice([0, 0, 0, 1]))


def random_cluster(rng: random.Random) -> ClusterSpec:
    nodes: list[NodeSpec] = []
    while not nodes or (rng.random() < 0.7 and sum(node.devices for node in nodes) < 16):
        left = 16 - sum(node.devices for node in nodes)
        devices = min(left, rng.choice([1, 2, 3, 4, 6, 8]))
        labels = {"rack": rng.choice("ab")}
        nodes.append(NodeSpec(f"n{len(nodes)}", devices, device_type=rng.choice(["a", "bb"]), labels=labels))
    return ClusterSpec(tuple(nodes))


def random_pins(rng: random.Random, roles: Sequence[str]) -> tuple[Pin, ...]:
    made = []
    for _ in range(rng.randint(1, 3)):
        what = rng.choice(["together", "apart", "device_type", "label", "devices", "tp", "offload"])
        values = {
            "device_type": ["a", "bb"],
            "label": ["rack=a", "rack=b"],
            "devices": [1, 2, 4],
            "tp": [1, 2, 3],
            "offload": [False, True],
        }
        who = tuple(rng.sample(roles, 2)) if what in ("together", "apart") else (rng.choice(roles),)
        value = rng.choice(values[what]) if what in values else None
        weight = rng.choice([0.125, 0.25])
        made.append(Pin(who, what, value, rng.choice(["must", "prefer", "avoid"]), weight))
    return tuple(made)


def partitions(items: Sequence[str]) -> Iterator[Pools]:
    if not items:
        yield ()
        return
    for smaller in partitions(items[1:]):
        for k in range(len(smaller)):
            yield (*smaller[:k], (items[0], *smaller[k]), *smaller[k + 1 :])
        yield ((items[0],), *smaller)


def placements(cluster: ClusterSpec, n_pools: int) -> Iterator[tuple[tuple[DeviceSet, frozenset[str]], ...]]:
    """Devices, and racks of the nodes, for so many pools; nodes that look the same are told apart once."""
    nodes = cluster.usable
    choices = []
    for k in range(1, len(nodes) + 1):
        for some in itertools.combinations(nodes, k):
            if len({node.device_type for node in some}) == 1:
                choices.append({node.name: node.devices for node in some})
    for node in nodes:
        shares = [n for n in range(1, node.devices) if n in (1, 2, 4, 8) or node.devices % n == 0]
        choices += [{node.name: share} for share in shares]
    by_name = {node.name: node for node in nodes}
    seen = set()

    def extend(free: Mapping[str, int], taken: tuple) -> Iterator[tuple]:
        if len(taken) == n_pools:
            if taken not in seen:
                seen.add(taken)
                yield taken
            return
        for choice in choices:
            if all(free[name] >= count for name, count in choice.items()):
                kind = by_name[next(iter(choice))].device_type
                devices = DeviceSet(kind, tuple(sorted(choice.values(), reverse=True)))
                racks = frozenset(by_name[name].labels["rack"] for name in choice)
                left = {name: count - choice.get(name, 0) for name, count in free.items()}
                yield from extend(left, (*taken, (devices, racks)))

    yield from extend({node.name: node.devices for node in nodes}, ())


def best_by_trying(instance: Instance) -> float:
    """The least objective over every partition, placement and choice of options; inf when nothing fits."""
    best = np.inf
    names = [op.name for op in instance.graph.operations]
    for pools in partitions(instance.roles):
        if not all(pools_keep(pin, pools) for pin in instance.pins if pin.strength == "must"):
            continue
        extensions = distinct_orders(instance, pools)
        rows, weights, waiting = [], [], 0
        for placed in placements(instance.cluster, len(pools)):
            made = combinations(instance, names, pools, placed)
            if made is not None:
                rows.append(made[0])
                weights.append(made[1])
                waiting += len(made[0])
            if waiting > 100_000:
                best = min(best, least(instance, names, pools, extensions, rows, weights))
                rows, weights, waiting = [], [], 0
        if rows:
            best = min(best, least(instance, names, pools, extensions, rows, weights))
    return float(best)


def combinations(instance: Instance, names, pools, placed):
    """Seconds [rows, operations] and objective factors [rows] of all that fits, or None."""
    where = {role: placed[k] for k, pool in enumerate(pools) for role in pool}
    options = {}
    for role in instance.roles:
        devices, racks = where[role]
        options[role] = [
            cost
            for cost in instance.costs.options(role, devices)
            if all(
                option_keeps(pin, role, cost, devices, racks)
                for pin in instance.pins
                if pin.strength == "must"
            )
        ]
    counts = [len(options[role]) for role in instance.roles]
    if not all(counts):
        return None
    grid = np.indices(counts).reshape(len(counts), -1)
    index = dict(zip(instance.roles, grid, strict=True))

    def column(role: str, values) -> np.ndarray:
        return np.array(values, dtype=float)[index[role]]

    fits = np.ones(grid.shape[1], dtype=bool)
    for pool, (devices, _) in zip(pools, placed, strict=True):
        resident = sum(column(role, [c.resident for c in options[role]]) for role in pool)
        host = sum(column(role, [c.host for c in options[role]]) for role in pool)
        works = [
            sum(column(role, [c.working.get(name, 0.0) for c in options[role]]) for role in pool)
            for name in names
        ]
        fits &= resident + np.max(works, axis=0) <= instance.costs.device_bytes(devices.device_type)
        fits &= host <= instance.costs.host_bytes(devices.device_type)
    if not fits.any():
        return None
    rows = np.zeros((grid.shape[1], len(names)))
    for k, name in enumerate(names):
        op = instance.graph[name]
        if op.kind == "transfer":
            (source,) = op.roles - {op.role}
            together = any(source in pool and op.role in pool for pool in pools)
            on, to = where[source][0], where[op.role][0]
            table = [
                [instance.costs.transfer_s(name, a, on, b, to, together=together) for b in options[op.role]]
                for a in options[source]
            ]
            rows[:, k] = np.array(table)[index[source], index[op.role]]
        elif op.role in instance.roles:
            rows[:, k] = column(op.role, [cost.seconds[name] for cost in options[op.role]])
        else:
            rows[:, k] = FIXED_S
    factor = np.ones(grid.shape[1])
    for pin in instance.pins:
        if pin.strength == "must":
            continue
        unmet = pin.strength == "prefer"
        if pin.what in ("together", "apart"):
            factor += pin.weight * (pools_keep(pin, pools) != unmet)
            continue
        for role in pin.roles:
            devices, racks = where[role]
            kept = [option_keeps(pin, role, cost, devices, racks) for cost in options[role]]
            factor += pin.weight * (column(role, kept) != unmet)
    return rows[fits], factor[fits]


FIXED_S = 3.0  # of the reward, when it is a function


def pools_keep(pin: Pin, pools: Pools) -> bool:
    if pin.what == "together":
        return any(set(pin.roles) <= set(pool) for pool in pools)
    if pin.what == "apart":
        return all(len(set(pin.roles) & set(pool)) <= 1 for pool in pools)
    return True


def option_keeps(pin: Pin, role: str, cost: RoleCost, devices: DeviceSet, racks: frozenset[str]) -> bool:
    if role not in pin.roles:
        return True
    said = {
        "device_type": devices.device_type == pin.value,
        "devices": sum(devices.counts) == pin.value,
        "label": racks == {str(pin.value).removeprefix("rack=")},
        "tp": cost.option.layout.tp == pin.value,
        "offload": cost.option.offload == pin.value,
    }
    return said.get(pin.what, True)


def waits(instance: Instance) -> dict[str, set[str]]:
    """What each operation waits for; one step off, the batch of this step's generation is no matter, nor its
    scores where they are made sample by sample.
    """
    found = {name: set(others) for name, others in instance.graph.dependencies().items()}
    if instance.staleness:
        for name in found:
            if name != "sync_weights":  # which replaces the weights that generation uses
                found[name] -= {"generate"} if "reward" in instance.roles else {"generate", "reward"}
    return found


def distinct_orders(instance: Instance, pools: Pools) -> list[tuple[str, ...]]:
    """One linear extension of the graph for every set of orders on the pools."""
    needed = waits(instance)
    kept: dict[tuple, tuple[str, ...]] = {}

    def extend(done: tuple[str, ...]) -> None:
        if len(done) == len(needed):
            signature = tuple(
                tuple(name for name in done if instance.graph[name].roles & set(pool)) for pool in pools
            )
            kept.setdefault(signature, done)
            return
        for name in needed:
            if name not in done and needed[name] <= set(done):
                extend((*done, name))

    extend(())
    return list(kept.values())


def least(instance: Instance, names, pools, orders, rows, weights) -> float:
    """The least makespan times factor over rows and orders, each operation as early as its turn allows."""
    seconds, factor = np.concatenate(rows), np.concatenate(weights)
    needed = waits(instance)
    best = np.full(len(seconds), np.inf)
    for order in orders:
        free = dict.fromkeys(pools, 0.0)
        end = {}
        for name in order:
            mine = [pool for pool in pools if instance.graph[name].roles & set(pool)]
            start = np.zeros(len(seconds))
            for other in needed[name]:
                start = np.maximum(start, end[other])
            for pool in mine:
                start = np.maximum(start, free[pool])
            end[name] = start + seconds[:, names.index(name)]
            for pool in mine:
                free[pool] = end[name]
        best = np.minimum(best, np.max(list(end.values()), axis=0))
    return float((best * factor).min())
