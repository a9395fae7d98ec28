"""Pools of devices on a live Ray cluster: checked against its nodes, then reserved as placement groups."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rolemesh.engine.errors import CallError, PoolBroken
from rolemesh.engine.ray.cluster import DEVICE_RESOURCE, NODE_ID_LABEL, node_ids, read_cluster
from rolemesh.engine.ray.host import HostPlace
from rolemesh.engine.ray.host_group import SILENT_S, HostGroup, Seat
from rolemesh.engine.ray.queue import PoolQueue
from rolemesh.engine.roles import Role
from rolemesh.placement.cluster import ClusterSpec, DeviceKind
from rolemesh.placement.pools import Placement, PlacementError, PoolSpec, Where, fit_pools

_FRACTION = 10_000  # Ray counts resources in units of 0.0001
_WAIT_S = 10.0
_START_S = 120.0
_POLL_S = 0.5

_log = logging.getLogger(__name__)


class ResourcePool:
    """Devices as processes per node; roles on one pool share its processes and take turns.

    Args:
        process_on_nodes: processes of each node, one device each.
        max_colocate_count: processes that may share a device, 1 unless roles ask for processes of their own;
            each gets 1 / max_colocate_count of it (a scheduling share, no limit on memory).
        name_prefix: the pool's name, in messages.
        device: "cuda" or "cpu"; None: GPUs if the cluster has any.
        where: which nodes may be used.
        cpus_per_process: None: the node's CPUs over its devices, at most one.
        collective_timeout_s: limit of every torch.distributed operation.
        fetch_timeout_s: limit for the blocks of one argument to arrive at a worker.
        silent_s: a process whose control thread answers nothing for so long is taken for dead.
        logs: folder for the log of each process; None: where Ray puts them.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        max_colocate_count: int = 1,
        name_prefix: str = "pool",
        *,
        device: DeviceKind | None = None,
        where: Where = Where(),  # noqa: B008  # frozen
        cpus_per_process: float | None = None,
        collective_timeout_s: float = 1800.0,
        fetch_timeout_s: float = 600.0,
        silent_s: float = SILENT_S,
        logs: str | None = None,
    ) -> None:
        if max_colocate_count < 1:
            raise PlacementError(f"max_colocate_count must be at least 1, got {max_colocate_count}")
        self.name = name_prefix
        self.process_on_nodes = tuple(process_on_nodes)
        self.max_colocate_count = max_colocate_count
        self.dp_sizes: set[int] = {1}  # of the roles that may read each other's results
        self._device, self._where, self._cpus = device, where, cpus_per_process
        self._collective_timeout_s, self._fetch_timeout_s = collective_timeout_s, fetch_timeout_s
        self._silent_s, self._logs = silent_s, logs
        self.placement_group: PlacementGroup | None = None
        self._seats: list[Seat] = []
        self._roles: set[str] = set()
        self._hosts: dict[str, HostGroup] = {}  # "" for the shared processes, else by role
        self.queue = PoolQueue(name_prefix)
        self._shut_down = False

    @property
    def world_size(self) -> int:
        """Processes of the pool."""
        return sum(self.process_on_nodes)

    @property
    def store(self) -> tuple[int, ...]:
        """verl's name for `process_on_nodes`."""
        return self.process_on_nodes

    @property
    def share(self) -> float:
        """Part of a device that one process takes; `max_colocate_count` of them sum to at most 1."""
        return _floor(1 / self.max_colocate_count)

    def spec(self, cluster: ClusterSpec) -> PoolSpec:
        """The pool as the placement check sees it."""
        cpus = _cpu_share(cluster) if self._cpus is None else self._cpus
        return PoolSpec(self.name, (), self.process_on_nodes, cluster.device_kind, cpus, self._where)

    def create(self, wait_s: float = _WAIT_S, report: Callable[[str], None] = _log.info) -> None:
        """Check this pool alone against the cluster and reserve it; see `create_pools`."""
        if self.placement_group is None:
            create_pools([self], wait_s, report)

    def reserve(self, nodes: Sequence[tuple[str, int]], threads: Mapping[str, int], timeout_s: float) -> None:
        """Reserve the devices on the given (node, processes), as `fit_pools` assigned them.

        Raises PlacementError with the nodes' state when Ray does not grant them within `timeout_s`.
        """
        cluster = read_cluster(self._device)
        spec, ids, device = self.spec(cluster), node_ids(), DEVICE_RESOURCE[cluster.device_kind]
        slots = [(node, local) for node, count in nodes for local in range(count)]
        if gone := [node for node, _ in nodes if node not in ids]:
            raise PlacementError(f"pool {self.name!r}: {', '.join(gone)} left the cluster")
        bundle = {"CPU": spec.cpus_per_process, device: 1, **self._where.resources_per_worker}
        group = placement_group(
            [{name: amount for name, amount in bundle.items() if amount} for _ in slots],
            strategy="PACK",
            bundle_label_selector=[{NODE_ID_LABEL: ids[node]} for node, _ in slots],
        )
        if not group.wait(timeout_s):
            remove_placement_group(group)
            raise PlacementError(
                f"pool {self.name!r}: Ray did not grant {self.world_size} devices on "
                f"{', '.join(node for node, _ in nodes)} within {timeout_s:g} s: someone else holds them "
                f"(free in the whole cluster: {ray.available_resources().get(device, 0):g} of "
                f"{cluster.n_devices}). Nodes:\n{cluster.table()}",
                pool=self.name,
                wanted=self.world_size,
                present=cluster.n_devices,
            )
        self.placement_group = group
        self._seats = [
            self._seat(group, rank, local, node, cluster.device_kind, threads[node], spec.cpus_per_process)
            for rank, (node, local) in enumerate(slots)
        ]

    def add_role(self, role: str, dp: int) -> None:
        """Note a role and the dp size in which it reads batches. Raises PlacementError for a second one."""
        if role in self._roles:
            raise PlacementError(
                f"pool {self.name!r} has a role {role!r} already: give each role its own name"
            )
        self.create()
        self._roles.add(role)
        self.dp_sizes.add(dp)

    def hosts(self, own_process_of: str | None = None, start_timeout_s: float = _START_S) -> HostGroup:
        """The processes that roles share, started when first asked for; or those of one role alone.

        Raises PoolBroken, with the first cause, when they have failed before; PlacementError when there
        would be more than `max_colocate_count` processes on a device.
        """
        if self._shut_down:
            raise PoolBroken(f"pool {self.name!r} is shut down")
        self.create()
        key = own_process_of or ""
        if key not in self._hosts:
            if len(self._hosts) == self.max_colocate_count:
                raise PlacementError(
                    f"pool {self.name!r} has {len(self._hosts)} processes on each device and "
                    f"max_colocate_count={self.max_colocate_count}: raise it to "
                    f"{len(self._hosts) + 1} (shares of 1/{len(self._hosts) + 1})"
                )
            # Known at once: `shutdown` ends it while it starts.
            self._hosts[key] = HostGroup(self._seats, self._silent_s)
            if self._shut_down:
                self._hosts[key].kill()
            self._hosts[key].connect(start_timeout_s)
        hosts = self._hosts[key]
        if hosts.broken is not None:
            cause = str(hosts.broken).partition("\n")[0]
            raise PoolBroken(f"pool {self.name!r} is broken since: {cause}") from hosts.broken
        return hosts

    def lost(self) -> CallError | None:
        """The death or hang that keeps started processes from going on; None where they all answer."""
        causes = (hosts.lost() for hosts in list(self._hosts.values()))
        return next((cause for cause in causes if cause is not None), None)

    def settles(self, within_s: float) -> bool:
        """Whether all its processes answer and are done with what they were asked, soon enough."""
        deadline = time.monotonic() + within_s
        while not any(hosts.broken for hosts in self._hosts.values()):
            if self.queue.idle:
                return self.lost() is None
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        return False

    def shutdown(self) -> None:
        """Kill the processes, fail the calls that wait, give the devices back."""
        self._shut_down = True
        self.queue.close()
        for hosts in list(self._hosts.values()):
            if hosts.broken is None:
                hosts.break_with(CallError(f"pool {self.name!r} was shut down"))
        self.release()

    def release(self) -> None:
        """Give the devices back; no process may be on them."""
        if self.placement_group is not None:
            remove_placement_group(self.placement_group)
            self.placement_group = None

    @property
    def nodes(self) -> Counter[str]:
        """Processes by node, once devices are reserved."""
        return Counter(seat.place.node for seat in self._seats)

    def _seat(
        self,
        group: PlacementGroup,
        rank: int,
        local_rank: int,
        node: str,
        kind: DeviceKind,
        threads: int,
        cpus: float,
    ) -> Seat:
        place = HostPlace(
            pool=self.name,
            rank=rank,
            world_size=self.world_size,
            local_rank=local_rank,
            node=node,
            device=kind,
            threads=threads,
            collective_timeout_s=self._collective_timeout_s,
            fetch_timeout_s=self._fetch_timeout_s,
            logs=self._logs,
        )
        options = {
            "num_cpus": _floor(cpus * self.share),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=rank, placement_group_capture_child_tasks=False
            ),
        }
        device = (
            {"num_gpus": self.share}
            if kind == "cuda"
            else {"resources": {DEVICE_RESOURCE["cpu"]: self.share}}
        )
        return Seat(place, {**options, **device})


class ResourcePoolManager:
    """The pools of a run and which role is on which.

    `resource_pool_spec`: processes per node by pool name; `mapping`: pool name by role. Other arguments are
    those of `ResourcePool`, for every pool; `where` is by pool name.
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[Role, str],
        *,
        max_colocate_count: int = 1,
        device: DeviceKind | None = None,
        where: Mapping[str, Where] | None = None,
    ) -> None:
        unknown = sorted({pool for pool in mapping.values() if pool not in resource_pool_spec})
        if unknown:
            raise PlacementError(f"mapping names pools {unknown}; there are {sorted(resource_pool_spec)}")
        self.resource_pool_spec = dict(resource_pool_spec)
        self.mapping = dict(mapping)
        self._device = device
        wheres = where or {}
        self.resource_pool_dict = {
            name: ResourcePool(
                counts, max_colocate_count, name, device=device, where=wheres.get(name, Where())
            )
            for name, counts in self.resource_pool_spec.items()
        }

    def create_resource_pool(
        self, wait_s: float = _WAIT_S, report: Callable[[str], None] = _log.info
    ) -> dict[str, ResourcePool]:
        """Check all pools together against the cluster, then reserve them; see `create_pools`."""
        create_pools(list(self.resource_pool_dict.values()), wait_s, report)
        return self.resource_pool_dict

    def get_resource_pool(self, role: Role) -> ResourcePool:
        """The pool of a role."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Devices of all pools."""
        return sum(pool.world_size for pool in self.resource_pool_dict.values())

    def shutdown(self) -> None:
        """End every pool."""
        for pool in self.resource_pool_dict.values():
            pool.shutdown()


def create_pools(
    pools: Sequence[ResourcePool],
    wait_s: float = _WAIT_S,
    report: Callable[[str], None] = _log.info,
    *,
    patient: bool = False,
    beside: Sequence[ResourcePool] = (),
) -> None:
    """Fit pools to the cluster's nodes, devices and CPUs, waiting for nodes still to join; reserve them.

    `beside` are pools that have their devices. `report` is told what is waited for. Raises PlacementError,
    after `wait_s` seconds at most where devices are missing and at once where more of them would not help;
    `patient` waits for other nodes then, too, and where those that seemed free are not granted.
    """
    deadline = time.monotonic() + wait_s
    while True:
        cluster, placement = _fit(pools, deadline, wait_s, report, patient, beside)
        try:
            _reserve(pools, cluster, placement, max(_WAIT_S, 0.0 if patient else wait_s), beside)
            return
        except PlacementError as error:
            if not patient or time.monotonic() >= deadline:
                raise
            for pool in pools:
                pool.release()
            report(str(error).partition("\n")[0])


def _reserve(
    pools: Sequence[ResourcePool],
    cluster: ClusterSpec,
    placement: Placement,
    timeout_s: float,
    beside: Sequence[ResourcePool],
) -> None:
    workers = _held(beside)
    for nodes in placement.nodes.values():
        workers.update(dict(nodes))
    cpus = {node.name: node.cpus for node in cluster.nodes}
    threads = {node: _threads(cpus[node], count) for node, count in workers.items()}
    dp_sizes = set.union(*(pool.dp_sizes for pool in (*pools, *beside)))
    for pool in (*pools, *beside):
        pool.dp_sizes = dp_sizes
    for pool in pools:
        pool.reserve(placement.nodes[pool.name], threads, timeout_s)


def _fit(
    pools: Sequence[ResourcePool],
    deadline: float,
    wait_s: float,
    report: Callable[[str], None],
    patient: bool,
    beside: Sequence[ResourcePool],
) -> tuple[ClusterSpec, Placement]:
    held, reported = _held(beside), -1
    wanted = sum(pool.world_size for pool in (*pools, *beside))
    while True:
        cluster = read_cluster(pools[0]._device)
        specs = [pool.spec(cluster) for pool in pools]
        nodes = tuple(replace(node, devices=max(0, node.devices - held[node.name])) for node in cluster.nodes)
        try:
            return cluster, fit_pools(specs, replace(cluster, nodes=nodes))
        except PlacementError:
            if (cluster.n_devices >= wanted and not patient) or time.monotonic() >= deadline:
                raise
        if cluster.n_devices != reported:
            reported = cluster.n_devices
            report(
                f"{reported}/{wanted} devices, waiting up to {wait_s:g} s for nodes to join; nodes:\n"
                f"{cluster.table()}"
            )
        time.sleep(_POLL_S)


def _held(pools: Sequence[ResourcePool]) -> Counter[str]:
    """Processes by node of pools that have their devices."""
    return sum((pool.nodes for pool in pools), Counter[str]())


def _threads(cpus: float, workers: int) -> int:
    """Threads of a process: the user's OMP_NUM_THREADS, else an equal part of the node's cores."""
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, int(cpus) // workers))


def _cpu_share(cluster: ClusterSpec) -> float:
    """CPUs that every device of every node can have, at most one."""
    shares = [node.cpus / node.devices for node in cluster.usable if math.isfinite(node.cpus)]
    return _floor(min([1.0, *shares]))


def _floor(amount: float) -> float:
    return math.floor(amount * _FRACTION) / _FRACTION
