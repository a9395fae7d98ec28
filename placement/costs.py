"""What running a role one way costs: the values between the cost models and the search.

The search sees nothing else of a role: options that are no better in any of these numbers are never needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rolemesh.placement.layout import Layout

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class DeviceSet:
    """Devices of one type that a pool may be given: `counts[i]` of them on its i-th node.

    `groups[i]` names the topology group of that node (NVLink domain, rail, switch); empty where it is not
    known. The names compare within one set only: those of two sets say nothing of each other. Nodes that
    agree in type, count and group are interchangeable.
    """

    device_type: str
    counts: tuple[int, ...]
    groups: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        """Number of devices."""
        return sum(self.counts)


@dataclass(frozen=True)
class RoleOption:
    """One way to run a role on its devices.

    Attributes:
        layout: how the model is cut (the rollout's own for generation).
        micro_batch: sequences of one forward pass on a replica; for generation the most that run at once.
        recompute: activations made anew in the backward pass.
        offload: weights and optimizer state wait in host memory while other roles of the pool run.
    """

    layout: Layout
    micro_batch: int = 1
    recompute: Recompute = "none"
    offload: bool = False


@dataclass(frozen=True)
class RoleCost:
    """What an option costs on one device set; bytes of the heaviest rank's device.

    Attributes:
        seconds: of each of the role's operations, by name, alone on its devices (without transfers).
        resident: bytes on the device throughout the step.
        working: further bytes while each operation runs, by name; they are free again after it.
        host: bytes of host memory for each device, what is offloaded included.
        items: `resident` and the largest working set, itemised for people: item to bytes.
    """

    option: RoleOption
    seconds: Mapping[str, float]
    resident: float
    working: Mapping[str, float]
    host: float = 0.0
    items: Mapping[str, float] = field(default_factory=dict)


class Costs(Protocol):
    """Where the search gets its numbers; every answer is a pure function of the arguments.

    It may also have `floor_s(role, devices) -> Mapping[str, float]`: seconds by operation that no option of
    `role` there is below, found in microseconds. The search then asks for the options only of devices that
    the floors leave a chance, which large clusters need.
    """

    def options(self, role: str, devices: DeviceSet) -> Sequence[RoleCost]:
        """All legal ways to run `role` there, memory not looked at; empty when there is none."""
        ...

    def transfer_s(
        self,
        operation: str,
        source: RoleCost,
        source_devices: DeviceSet,
        target: RoleCost,
        target_devices: DeviceSet,
        *,
        together: bool,
    ) -> float:
        """Seconds of a transfer of weights between two roles' layouts; both pools are busy meanwhile.

        `together`: both are on the same devices; two sets of equal devices may also be two pools. Of the
        options only the layouts and `offload` may matter.
        """
        ...

    def device_bytes(self, device_type: str) -> float:
        """Memory of one device that roles may fill."""
        ...

    def host_bytes(self, device_type: str) -> float:
        """Host memory for each device."""
        ...
