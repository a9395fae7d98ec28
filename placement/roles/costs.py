"""`Costs` of a plan request: options of roles, priced by the memory and the time model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rolemesh.placement.costs import DeviceSet, RoleCost
from rolemesh.placement.hardware import HardwareProfile
from rolemesh.placement.layout import Layout
from rolemesh.placement.memory import usable_bytes
from rolemesh.placement.roles import choices
from rolemesh.placement.roles.bytes import RoleBytes
from rolemesh.placement.roles.frontier import Frontier
from rolemesh.placement.roles.links import ClusterLinks
from rolemesh.placement.roles.request import PlanRequest
from rolemesh.placement.roles.seconds import RoleSeconds
from rolemesh.placement.timing.efficiency import Machine
from rolemesh.placement.timing.links import Links
from rolemesh.placement.timing.transfer import gathered_seconds, offload_seconds, transfer_seconds


class PlannerCosts:
    """What the search asks, from one request. Nothing it returns depends on what it was asked before.

    `keep` names what pins are about (`tp`, `micro_batch`): options that differ in it do not replace each
    other.
    """

    def __init__(self, plan: PlanRequest, *, keep: Collection[str] = ()) -> None:
        self.plan, self.keep = plan, frozenset(keep)
        self.links = ClusterLinks(plan.cluster)
        self._profiles: dict[str, HardwareProfile] = {}
        self._machines: dict[str, Machine] = {}
        self._bytes: dict[tuple[str, str], RoleBytes] = {}
        self._seconds: dict[tuple[str, Links, str], RoleSeconds] = {}
        self._mine = {
            role: tuple(op for op in plan.graph.operations if op.role == role and op.kind != "transfer")
            for role in plan.roles
        }
        self._moves = {
            role: tuple(op.name for op in plan.graph.operations if op.kind == "transfer" and role in op.roles)
            for role in plan.roles
        }

    # -- what the search asks --------------------------------------------------------------------------------

    def options(self, role: str, devices: DeviceSet) -> Sequence[RoleCost]:
        """The ways to run `role` there that no other one is better than; none where its dtype is missing.

        Of those that do not fit even alone only the leanest are there, and only where nothing fits.
        """
        if self.plan.roles[role].dtype not in self.profile(devices.device_type).dtypes:
            return []
        return self._frontier(role, devices).best()

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
        """Seconds to bring the source's weights into the target's layout, from and to the host included."""
        mover = self.plan.graph[operation]
        owner = next(role for role in sorted(mover.roles) if role != mover.role)
        request = self.plan.roles[owner]
        machine = self.machine(target_devices.device_type)
        links = self.links.of(target_devices)
        size = machine.bytes_of(self.plan.roles[mover.role].dtype)
        moved = gathered_seconds if self.plan.gathered else transfer_seconds
        seconds = moved(
            request.shape,
            source.option.layout,
            target.option.layout,
            links=links,
            efficiency=machine.efficiency,
            same_pool=together,
            between=None if together else self.links.between(source_devices, target_devices),
            bytes_per_param=size,
        )
        for cost, devices, name in ((source, source_devices, owner), (target, target_devices, mover.role)):
            if cost.option.offload:
                weights = self._weights(name, devices, cost.option.layout)
                seconds += offload_seconds(weights, self.links.of(devices))
        return seconds * machine.factor("transfer")

    def device_bytes(self, device_type: str) -> float:
        """Memory of one device that roles may fill."""
        return usable_bytes(self.profile(device_type))

    def host_bytes(self, device_type: str) -> float:
        """Host memory for each device."""
        return self.profile(device_type).host_bytes

    def floor_s(self, role: str, devices: DeviceSet) -> Mapping[str, float]:
        """Seconds by operation that no option of `role` there is below."""
        prices = self.seconds_of(role, devices)
        return {op.name: prices.floor(op, devices) for op in self._mine[role]}

    # -- parts -----------------------------------------------------------------------------------------------

    def profile(self, device_type: str) -> HardwareProfile:
        """What a device of this type of the cluster can do."""
        if device_type not in self._profiles:
            self._profiles[device_type] = self.plan.cluster.profile(device_type)
        return self._profiles[device_type]

    def machine(self, device_type: str) -> Machine:
        """The same for the time model."""
        if device_type not in self._machines:
            self._machines[device_type] = Machine.of(self.profile(device_type))
        return self._machines[device_type]

    def bytes_of(self, role: str, device_type: str) -> RoleBytes:
        """The role's memory on a type of device."""
        key = role, device_type
        if key not in self._bytes:
            self._bytes[key] = RoleBytes(self.plan.as_asked(role), role, device_type)
        return self._bytes[key]

    def seconds_of(self, role: str, devices: DeviceSet) -> RoleSeconds:
        """The role's seconds on devices that are connected so."""
        links = self.links.of(devices)
        key = role, links, devices.device_type
        if key not in self._seconds:
            self._seconds[key] = RoleSeconds(
                self.plan.as_asked(role), role, self.machine(devices.device_type), links
            )
        return self._seconds[key]

    def _weights(self, role: str, devices: DeviceSet, layout: Layout) -> float:
        return max(
            states["weights"] for states in self.bytes_of(role, devices.device_type).held(layout).items
        )

    def _frontier(self, role: str, devices: DeviceSet) -> Frontier:
        kind = devices.device_type
        frontier = Frontier(
            self.plan.as_asked(role),
            role,
            self._mine[role],
            self._moves[role],
            self.bytes_of(role, kind),
            self.seconds_of(role, devices),
            limits=(self.device_bytes(kind), self.host_bytes(kind)),
            keep=self.keep,
        )
        for layout in choices.layouts(self.plan, role, devices):
            frontier.add(layout)
        return frontier
