"""How the devices of a pool are connected."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.costs import DeviceSet
from rolemesh.placement.hardware import HardwareProfile


@dataclass(frozen=True)
class Links:
    """Rates are bytes/s of one device in one direction.

    `per_node` devices share the fast link (a node, or an NVLink domain that spans several). `host` is the
    rate between a device and its host's memory. `latency` multiplies the latencies of NCCL on its usual
    links. Where the fast link joins only some devices of a node (boards of four, bridged pairs), `island`
    is their number and `island_link` the rate between islands.
    """

    per_node: int = 8
    intra: float = 450e9
    inter: float = 50e9
    host: float = 32e9
    latency: float = 1.0
    island: int = 0
    island_link: float = 16e9

    def __post_init__(self) -> None:
        if self.per_node < 1 or min(self.intra, self.inter, self.host) <= 0:
            raise ValueError(f"links need per_node >= 1 and rates above 0, got {self}")

    @classmethod
    def of_profile(cls, profile: HardwareProfile, per_node: int | None = None) -> Links:
        """The usual links of a device type; `per_node` devices on a node, by default its fast domain."""
        domain = profile.link_devices
        rates = (profile.link_bytes_per_s, profile.nic_bytes_per_s, profile.pcie_bytes_per_s)
        links = cls(per_node or domain, *rates, profile.latency)
        if links.per_node <= domain:
            return links
        return replace(links, island=domain, island_link=profile.pcie_bytes_per_s / 2)  # two share a port

    @classmethod
    def of(cls, devices: DeviceSet, cluster: ClusterSpec) -> Links:
        """Links of a set of devices: of its type, at the rates that the cluster states.

        Nodes of one group whose fast link spans nodes (NVL72) count as one node; the smallest
        of unequal counts is taken.
        """
        nodes = [node for node in cluster.usable if cluster.device_type(node) == devices.device_type]
        profile = cluster.profile(devices.device_type)
        if len(devices.counts) == 1 or len(nodes) < 2:
            return cls.of_profile(profile, max(devices.counts))
        groups = set(devices.groups)
        near = len(groups) == 1 and "" not in groups
        if near and profile.link_devices > max(devices.counts):
            return cls.of_profile(profile, min(devices.world, profile.link_devices))
        inter = min(
            (cluster.bytes_per_s(one, other) for one in nodes for other in nodes
             if one.name != other.name and (not near or one.group == other.group)),
            default=profile.nic_bytes_per_s,
        )  # fmt: skip
        return replace(cls.of_profile(profile, min(devices.counts)), inter=inter)
