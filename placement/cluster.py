"""The devices there are: nodes with their device count, CPUs, labels and other resources."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

DeviceKind = Literal["cuda", "cpu"]


class ClusterError(ValueError):
    """A cluster description that contradicts itself."""


@dataclass(frozen=True)
class NodeSpec:
    """One node. On a CPU cluster a device is a worker slot.

    `device_type` names the model (`h100-80`), `resources` other resources as Ray counts them,
    `cpus` is infinite where it is not known. Raises ClusterError for negative counts.
    """

    name: str
    devices: int = 0
    cpus: float = math.inf
    device_type: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    address: str = ""
    alive: bool = True

    def __post_init__(self) -> None:
        if self.devices < 0 or self.cpus < 0 or any(amount < 0 for amount in self.resources.values()):
            raise ClusterError(f"node {self.name!r} has negative amounts: {self}")

    def __str__(self) -> str:
        where = f"{self.name} ({self.address})" if self.address not in ("", self.name) else self.name
        parts = [f"{self.devices} devices" + (f" of type {self.device_type}" if self.device_type else "")]
        parts += [f"{self.cpus:g} CPUs"] if math.isfinite(self.cpus) else []
        parts += [f"label {key}={value}" for key, value in sorted(self.labels.items())]
        parts += [f"{amount:g} {name}" for name, amount in sorted(self.resources.items())]
        return f"{where}: {', '.join(parts)}" + ("" if self.alive else " (not alive)")


@dataclass(frozen=True)
class ClusterSpec:
    """Nodes of one kind of device. Raises ClusterError for a repeated node name or an unknown kind."""

    nodes: tuple[NodeSpec, ...]
    device_kind: DeviceKind = "cuda"

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        names = [node.name for node in self.nodes]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ClusterError(f"several nodes are named {', '.join(repeated)}")
        if self.device_kind not in get_args(DeviceKind):
            raise ClusterError(f"device_kind {self.device_kind!r} is none of {get_args(DeviceKind)}")

    @classmethod
    def uniform(
        cls,
        n_nodes: int,
        per_node: int,
        *,
        device_kind: DeviceKind = "cuda",
        device_type: str = "",
        cpus: float = math.inf,
    ) -> ClusterSpec:
        """`n_nodes` equal nodes, named node-0, node-1, ..."""
        return cls(
            tuple(NodeSpec(f"node-{i}", per_node, cpus, device_type) for i in range(n_nodes)), device_kind
        )

    @property
    def usable(self) -> tuple[NodeSpec, ...]:
        """Nodes that are alive and have a device."""
        return tuple(node for node in self.nodes if node.alive and node.devices)

    @property
    def n_devices(self) -> int:
        """Devices on nodes that are alive."""
        return sum(node.devices for node in self.usable)

    def table(self) -> str:
        """One indented line per node, for error messages."""
        return "\n".join(f"  {node}" for node in self.nodes) or "  (no nodes)"
