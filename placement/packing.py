"""The search that packs pools onto nodes: exact, and quick where nodes are alike."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING

from rolemesh.placement.cluster import ClusterSpec, NodeSpec

if TYPE_CHECKING:
    from rolemesh.placement.pools import PoolSpec

_ROUNDING = 1e-6  # CPU and resource fractions are sums of floats


@dataclass(frozen=True)
class Room:
    """What is left of one node; equal rooms are interchangeable for the rest of the search."""

    admitted: frozenset[str]  # names of the pools that may come here
    devices: int
    cpus: float
    resources: tuple[tuple[str, float], ...]
    taken: bool = False  # by an entry of the pool that is being placed

    @classmethod
    def of(cls, node: NodeSpec, pools: Iterable[PoolSpec]) -> Room:
        """The whole of a node."""
        admitted = frozenset(pool.name for pool in pools if pool.where.admits(node))
        return cls(admitted, node.devices, node.cpus, tuple(sorted(node.resources.items())))

    def capacity(self, pool: PoolSpec) -> int:
        """Processes of `pool` that fit."""
        if self.taken or pool.name not in self.admitted:
            return 0
        fits: list[float] = [self.devices]
        if pool.cpus_per_process and math.isfinite(self.cpus):
            fits.append((self.cpus + _ROUNDING) // pool.cpus_per_process)
        left = dict(self.resources)
        for name, amount in pool.where.resources_per_worker.items():
            fits.append((left[name] + _ROUNDING) // amount)
        return max(0, int(min(fits)))

    def less(self, pool: PoolSpec, count: int) -> Room:
        """The room once `count` processes of `pool` are in it."""
        each = pool.where.resources_per_worker
        return Room(
            self.admitted,
            self.devices - count,
            round(self.cpus - count * pool.cpus_per_process, 6),
            tuple((name, round(amount - count * each.get(name, 0), 6)) for name, amount in self.resources),
            taken=True,
        )


_Rooms = dict[Room, tuple[int, ...]]  # equal rooms, and which nodes they are


def search(pools: Sequence[PoolSpec], cluster: ClusterSpec) -> dict[str, tuple[tuple[str, int], ...]] | None:
    """For each pool the (node name, processes) of its entries, or None when they do not fit.

    Depth-first over (pool, entries of one size), never again into a state that failed.
    """
    nodes = cluster.usable
    items = [(pool, size) for pool in pools for size in sorted(set(pool.process_on_nodes), reverse=True)]
    failed: set[Hashable] = set()

    def place(i: int, rooms: _Rooms) -> list[tuple[int, ...]] | None:
        """For each item from `i` on the nodes of its entries, or None."""
        if i == len(items):
            return []
        pool, size = items[i]
        if i == 0 or items[i - 1][0] is not pool:
            rooms = _merge((replace(room, taken=False), where) for room, where in rooms.items())
        state = (i, frozenset((room, len(where)) for room, where in rooms.items()))
        if state in failed:
            return None
        fitting = [room for room in rooms if room.capacity(pool) >= size]
        n_entries = pool.process_on_nodes.count(size)
        for counts in _distributions(n_entries, [len(rooms[room]) for room in fitting]):
            taking = dict(zip(fitting, counts, strict=True))
            rest = place(i + 1, _take(rooms, taking, pool, size))
            if rest is not None:
                here = sorted(node for room in fitting for node in rooms[room][: taking[room]])
                return [tuple(here), *rest]
        failed.add(state)
        return None

    placed = place(0, _merge((Room.of(node, pools), (i,)) for i, node in enumerate(nodes)))
    if placed is None:
        return None
    queues = {(pool.name, size): iter(where) for (pool, size), where in zip(items, placed, strict=True)}
    return {
        pool.name: tuple((nodes[next(queues[pool.name, size])].name, size) for size in pool.process_on_nodes)
        for pool in pools
    }


def _merge(parts: Iterable[tuple[Room, tuple[int, ...]]]) -> _Rooms:
    """Equal rooms together, ordered by their first node."""
    merged: defaultdict[Room, tuple[int, ...]] = defaultdict(tuple)
    for room, where in parts:
        merged[room] += where
    return dict(sorted(((room, tuple(sorted(where))) for room, where in merged.items()), key=itemgetter(1)))


def _take(rooms: _Rooms, taking: Mapping[Room, int], pool: PoolSpec, size: int) -> _Rooms:
    parts: list[tuple[Room, tuple[int, ...]]] = []
    for room, where in rooms.items():
        count = taking.get(room, 0)
        parts += [(room.less(pool, size), where[:count])] if count else []
        parts += [(room, where[count:])] if where[count:] else []
    return _merge(parts)


def _distributions(total: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as counts within `limits`, the first ones filled first."""
    if not limits:
        if total == 0:
            yield ()
        return
    for count in range(min(total, limits[0]), max(0, total - sum(limits[1:])) - 1, -1):
        for rest in _distributions(total - count, limits[1:]):
            yield (count, *rest)
