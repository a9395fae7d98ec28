"""Links of device sets on a cluster, asked once for all sets that are connected alike."""

from __future__ import annotations

from dataclasses import replace

from rolemesh.placement.cluster import ClusterSpec, NodeSpec
from rolemesh.placement.costs import DeviceSet
from rolemesh.placement.timing.links import Links


class ClusterLinks:
    """`of` a device set; equal ones are one object."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster
        kept: list[NodeSpec] = []
        for alike in cluster.alike():
            kept += alike[:2]  # two of a class show what is between its members and to the others
        self._few = replace(cluster, nodes=tuple(kept))
        self._known: dict[tuple[object, ...], Links] = {}

    def of(self, devices: DeviceSet) -> Links:
        """How these devices are connected."""
        groups = set(devices.groups)
        near = len(groups) == 1 and "" not in groups
        key: tuple[object, ...] = (devices.device_type, len(devices.counts) == 1, near, min(devices.counts))
        if near and len(devices.counts) > 1:
            key = (*key, devices.world)  # a fast link may span nodes
        if key not in self._known:
            self._known[key] = Links.of(devices, self._few)
        return self._known[key]

    def between(self, one: DeviceSet, other: DeviceSet) -> float:
        """Bytes/s of a device of one pool to one of another."""
        first, second = self.of(one), self.of(other)
        if len(self.cluster.usable) == 1:
            return min(first.intra, second.intra)
        return min(first.inter, second.inter)
