"""The ways to give a pool devices of a cluster, equal ones counted once, and fitting several onto its nodes.

A pool gets whole nodes of one device type, or a share of one node: a power of two, or a divisor of the
node's devices. Nodes that agree in type, device count, labels that matter and topology group are
interchangeable, and so are groups of as many such nodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rolemesh.placement.cluster import ClusterSpec, NodeSpec
from rolemesh.placement.costs import DeviceSet

_MOST_SHAPES = 4096  # of one device type; beyond, only the packed and the evenly spread ones
Nodes = tuple[tuple[str, int], ...]  # (node, devices) of a pool


@dataclass(frozen=True)
class NodeClass:
    """Nodes that differ in their name and topology group only; `groups` holds names, largest group first."""

    device_type: str
    devices: int
    labels: frozenset[str]  # those of the asked ones that the nodes have
    groups: tuple[tuple[str, ...], ...]
    named: bool  # whether the groups are known

    @property
    def n_nodes(self) -> int:
        return sum(len(group) for group in self.groups)


@dataclass(frozen=True)
class Shape:
    """One way to give a pool devices: whole nodes, as numbers per topology group, or a share of one node."""

    devices: DeviceSet
    whole: tuple[tuple[int, tuple[int, ...]], ...]  # (class, nodes in its 1st, 2nd, ... group)
    share: tuple[int, int] | None  # (class, devices)
    need: tuple[int, ...]  # devices of each class

    @property
    def classes(self) -> tuple[int, ...]:
        """Node classes that it uses."""
        return tuple(i for i, count in enumerate(self.need) if count)


class Space:
    """All shapes on a cluster, by type and size; `labels` ("key=value") are those that pins ask for."""

    def __init__(self, cluster: ClusterSpec, labels: Sequence[str] = ()) -> None:
        self.classes = _classes(cluster.usable, labels)
        self.capacity = tuple(kind.devices * kind.n_nodes for kind in self.classes)
        self.complete = True  # whether `shapes` holds every one there is
        shapes: list[Shape] = []
        for device_type in sorted({kind.device_type for kind in self.classes}):
            shapes += self._of_type([i for i, c in enumerate(self.classes) if c.device_type == device_type])
        self.shapes = tuple(
            sorted(
                shapes, key=lambda s: (s.devices.device_type, s.devices.world, len(s.devices.counts), s.need)
            )
        )

    def fit(self, shapes: Sequence[Shape]) -> list[Nodes] | None:
        """Nodes for each shape, all at once; None when they do not fit beside each other."""
        found: list[list[tuple[str, int]]] = [[] for _ in shapes]
        for index, kind in enumerate(self.classes):
            whole = [(i, part[1]) for i, s in enumerate(shapes) for part in s.whole if part[0] == index]
            shares = [(i, s.share[1]) for i, s in enumerate(shapes) if s.share and s.share[0] == index]
            placed = _Packing(kind, whole, sorted(shares, key=lambda share: (-share[1], share[0]))).solve()
            if placed is None:
                return None
            for i, name, count in placed:
                found[i].append((name, count))
        return [tuple(nodes) for nodes in found]

    def _of_type(self, indices: list[int]) -> list[Shape]:
        patterns = [list(_patterns(self._sizes(i), _MOST_SHAPES)) for i in indices]
        if math.prod(len(some) for some in patterns) > _MOST_SHAPES:
            self.complete = False
            patterns = [list(_plain_patterns(self._sizes(i))) for i in indices]
        combined: Iterator[tuple[tuple[int, ...], ...]] = itertools.product(*patterns)
        if math.prod(len(some) for some in patterns) > _MOST_SHAPES:
            combined = self._mostly_full(indices, patterns)
        shapes = [self._whole(indices, chosen) for chosen in combined if any(chosen)]
        for i in indices:
            devices = self.classes[i].devices
            for count in range(1, devices):
                if count.bit_count() == 1 or devices % count == 0:
                    shapes.append(self._share(i, count))
        return shapes

    def _mostly_full(
        self, indices: list[int], patterns: list[list[tuple[int, ...]]]
    ) -> Iterator[tuple[tuple[int, ...], ...]]:
        """At most one class is taken in part, the others wholly or not at all."""
        seen = set()
        for partial, some in enumerate(patterns):
            others = [[(), self._sizes(i)] if k != partial else some for k, i in enumerate(indices)]
            for chosen in itertools.product(*others):
                if chosen not in seen:
                    seen.add(chosen)
                    yield chosen

    def _sizes(self, index: int) -> tuple[int, ...]:
        return tuple(len(group) for group in self.classes[index].groups)

    def _whole(self, indices: list[int], chosen: tuple[tuple[int, ...], ...]) -> Shape:
        counts, groups, need = [], [], [0] * len(self.classes)
        for i, per_group in zip(indices, chosen, strict=True):
            kind = self.classes[i]
            need[i] = kind.devices * sum(per_group)
            counts += [kind.devices] * sum(per_group)
            groups += [f"{i}.{k}" if kind.named else "" for k, n in enumerate(per_group) for _ in range(n)]
        devices = DeviceSet(
            self.classes[indices[0]].device_type, tuple(counts), tuple(groups) if any(groups) else ()
        )
        whole = tuple((i, per_group) for i, per_group in zip(indices, chosen, strict=True) if per_group)
        return Shape(devices, whole, None, tuple(need))

    def _share(self, index: int, count: int) -> Shape:
        kind = self.classes[index]
        need = tuple(count if i == index else 0 for i in range(len(self.classes)))
        groups = (f"{index}.0",) if kind.named else ()
        return Shape(DeviceSet(kind.device_type, (count,), groups), (), (index, count), need)


def _classes(nodes: Sequence[NodeSpec], labels: Sequence[str]) -> tuple[NodeClass, ...]:
    members: dict[tuple[str, int, frozenset[str]], dict[str, list[str]]] = {}
    for node in nodes:
        has = frozenset(label for label in labels if _has(node, label))
        group = getattr(node, "group", "")
        members.setdefault((node.device_type, node.devices, has), {}).setdefault(group, []).append(node.name)
    return tuple(
        NodeClass(
            *key,
            tuple(tuple(names) for names in sorted(groups.values(), key=len, reverse=True)),
            any(groups),
        )
        for key, groups in sorted(
            members.items(), key=lambda item: (item[0][0], -item[0][1], sorted(item[0][2]))
        )
    )


def _has(node: NodeSpec, label: str) -> bool:
    key, _, value = label.partition("=")
    return node.labels.get(key) == value


def _patterns(sizes: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """Numbers of nodes per group, descending, that groups of these sizes hold; stops after `most` + 1."""

    def extend(taken: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        yield taken
        if len(taken) < len(sizes):
            for count in range(1, min(sizes[len(taken)], taken[-1] if taken else sizes[0]) + 1):
                yield from extend((*taken, count))

    return itertools.islice(extend(()), most + 1)


def _plain_patterns(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """For every number of nodes: as few groups as it takes, and as evenly over all groups as they allow."""
    seen = set()
    for total in range(sum(sizes) + 1):
        for pattern in (_packed(sizes, total), _spread(sizes, total)):
            if pattern not in seen:
                seen.add(pattern)
                yield pattern


def _packed(sizes: Sequence[int], total: int) -> tuple[int, ...]:
    taken = []
    for size in sizes:
        if total > 0:
            taken.append(min(size, total))
            total -= taken[-1]
    return tuple(taken)


def _spread(sizes: Sequence[int], total: int) -> tuple[int, ...]:
    taken = [0] * len(sizes)
    while total > 0:
        for i in range(len(sizes)):
            if taken[i] < sizes[i] and total > 0:
                taken[i] += 1
                total -= 1
    return tuple(count for count in sorted(taken, reverse=True) if count)


class _Packing:
    """Whole nodes and shares of several pools on the nodes of one class, by depth-first search."""

    def __init__(
        self, kind: NodeClass, whole: list[tuple[int, tuple[int, ...]]], shares: list[tuple[int, int]]
    ) -> None:
        self.kind, self.shares = kind, shares
        self.parts = [(i, count, k) for i, counts in whole for k, count in enumerate(counts)]
        self.free = [len(group) for group in kind.groups]
        self.taken: list[tuple[int, int, int]] = []  # (pool, group, nodes)
        self.opened: list[list[int]] = []  # nodes for shares: group, devices left, pools' shares ...

    def solve(self) -> list[tuple[int, str, int]] | None:
        """(pool, node, devices) for everything."""
        if sum(count for _, count, _ in self.parts) > sum(self.free):
            return None
        return self._names() if self._place(0) else None

    def _place(self, k: int) -> bool:
        if k == len(self.parts):
            return self._place_share(0)
        pool, count, position = self.parts[k]
        used = {group for other, group, _ in self.taken[len(self.taken) - position :] if other == pool}
        tried: set[int] = set()
        for group in sorted(range(len(self.free)), key=lambda g: (self.free[g], g)):
            if self.free[group] < count or group in used or self.free[group] in tried:
                continue
            tried.add(self.free[group])
            self.free[group] -= count
            self.taken.append((pool, group, count))
            if self._place(k + 1):
                return True
            self.taken.pop()
            self.free[group] += count
        return False

    def _place_share(self, k: int) -> bool:
        if k == len(self.shares):
            return True
        pool, count = self.shares[k]
        tried: set[int] = set()
        for node in self.opened:
            if node[1] >= count and node[1] not in tried:
                tried.add(node[1])
                node[1] -= count
                node.append(pool)
                if self._place_share(k + 1):
                    return True
                node.pop()
                node[1] += count
        group = max(range(len(self.free)), key=lambda g: (self.free[g] > 0, -self.free[g], -g))
        if self.free[group] > 0:
            self.free[group] -= 1
            self.opened.append([group, self.kind.devices - count, pool])
            if self._place_share(k + 1):
                return True
            self.opened.pop()
            self.free[group] += 1
        return False

    def _names(self) -> list[tuple[int, str, int]]:
        left: list[list[str]] = [list(reversed(group)) for group in self.kind.groups]
        found = [
            (pool, left[group].pop(), self.kind.devices) for pool, group, n in self.taken for _ in range(n)
        ]
        sizes = dict(self.shares)
        for group, _, *pools in self.opened:
            name = left[group].pop()
            found += [(pool, name, sizes[pool]) for pool in pools]
        return found
