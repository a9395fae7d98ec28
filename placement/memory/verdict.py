"""Does it fit? Roles that share a device, against what a process may use of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rolemesh.placement.hardware import HardwareProfile
from rolemesh.placement.layout import Layout
from rolemesh.placement.memory.items import GIB, MemoryItems
from rolemesh.placement.memory.process import (
    communicator_bytes,
    context_bytes,
    default_margin,
    slack_fraction,
)
from rolemesh.placement.memory.software import Software, software


@dataclass(frozen=True)
class Demand:
    """One role on a device: its bytes by operation, and its layout.

    Residents of the operations are the same memory: the largest counts. `offloaded` roles leave the device
    while another one runs.
    """

    operations: Mapping[str, MemoryItems]
    layout: Layout
    offloaded: bool = False

    @property
    def resident(self) -> float:
        """Bytes that the role keeps on the device while it runs."""
        return max((items.resident_bytes for items in self.operations.values()), default=0.0)


@dataclass(frozen=True)
class Fit:
    """All operations fit; `used` of `limit` bytes in the fullest one."""

    used: float
    limit: float
    role: str
    operation: str

    fits = True

    def __str__(self) -> str:
        return (
            f"fits: {self.used / GIB:.1f} of {self.limit / GIB:.1f} GiB "
            f"during {self.operation} of {self.role}"
        )


@dataclass(frozen=True)
class Shortfall:
    """The fullest operation needs `over` bytes too many on `rank` of the role; `item` is its largest."""

    used: float
    limit: float
    role: str
    operation: str
    rank: int
    item: str
    item_bytes: float

    fits = False

    @property
    def over(self) -> float:
        """Bytes above the limit."""
        return self.used - self.limit

    def __str__(self) -> str:
        return (
            f"{self.operation} of {self.role} is {self.over / GIB:.1f} GiB over on rank {self.rank}: "
            f"it needs {self.used / GIB:.1f} of {self.limit / GIB:.1f} GiB; "
            f"the largest item is {self.item} with {self.item_bytes / GIB:.1f} GiB"
        )


def check_fit(
    demands: Mapping[str, Demand],
    device: HardwareProfile,
    *,
    by: Software | None = None,
    margin: float | None = None,
) -> Fit | Shortfall:
    """Whether the roles fit on one device of each of them, one operation at a time.

    What stays of all roles adds up; the working set of the running operation comes on top, with the
    allocator's slack on it. The process (context, communicators of every role) is there once. `margin` is the
    part of the device left free.
    """
    limit = device.memory_bytes * (1 - (default_margin() if margin is None else margin))
    by = by or software("megatron")
    fixed = context_bytes(device.name) + sum(
        communicator_bytes(demand.layout, device.name) for demand in demands.values()
    )
    fullest, where = -1.0, ("", "")
    for role, demand in demands.items():
        others = sum(d.resident for name, d in demands.items() if name != role and not d.offloaded)
        for operation, items in demand.operations.items():
            working = items.working_bytes * (1 + slack_fraction(by))
            used = fixed + others + max(items.resident_bytes, demand.resident) + working
            if used > fullest:
                fullest, where = used, (role, operation)
    role, operation = where
    if fullest <= limit:
        return Fit(fullest, limit, role, operation)
    items, layout = demands[role].operations[operation], demands[role].layout
    named = dict(items) | {
        f"{name}'s states": demand.resident
        for name, demand in demands.items()
        if name != role and not demand.offloaded
    }
    item = max(named, key=lambda name: named[name])
    first_rank = int(layout.grid[items.stage].min())
    return Shortfall(fullest, limit, role, operation, first_rank, item, named[item])


def usable_bytes(device: HardwareProfile, layouts: Mapping[str, Layout] | None = None) -> float:
    """Bytes of a device that roles of these layouts may fill, their allocator's slack included."""
    taken = sum(communicator_bytes(layout, device.name) for layout in (layouts or {}).values())
    return device.memory_bytes * (1 - default_margin()) - context_bytes(device.name) - taken
