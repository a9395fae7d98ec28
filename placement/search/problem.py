"""What is to be decided: the step, its roles, the ways to run each of them on each shape, and their costs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.costs import Costs, DeviceSet, RoleCost
from rolemesh.placement.graph import StepGraph
from rolemesh.placement.schedule import Scheduler
from rolemesh.placement.search.clock import Clock
from rolemesh.placement.search.pins import Pin, check_pins
from rolemesh.placement.search.space import Shape, Space

Floats = NDArray[np.float64]


NEVER_S = 1e30  # of an operation without an option that fits
_MOST_KEPT = 1024  # device sets whose options are kept


class SearchError(ValueError):
    """Costs or arguments that do not match the step; the message names role and operation."""


@dataclass(frozen=True)
class Transfer:
    """A transfer between two placed roles: `index` of the operation among the step's."""

    name: str
    index: int
    source: str
    target: str


@dataclass(frozen=True)
class RoleTable:
    """The options of a role on a shape that fit its devices alone and that none is better than.

    Rows are options. `bytes` are resident, on the host, the most that any of the role's own operations works
    with, and what each transfer works with. `penalty` is the weight of pins that an option leaves unmet.
    """

    costs: tuple[RoleCost, ...]
    seconds: Floats  # [options, role's operations]
    bytes: Floats  # [options, 3 + transfers]
    penalty: Floats  # [options]


class Left:
    """Options of one role that are left: indices into its table, and the least of what they need."""

    def __init__(self, table: RoleTable, indices: NDArray[np.int64]) -> None:
        self.table, self.indices = table, indices
        self.seconds = table.seconds[indices]  # [options, role's operations]
        self.bytes = table.bytes[indices]  # [options, kinds of bytes]
        self.least, self.most = self.seconds.min(axis=0), self.seconds.max(axis=0)
        self.least_bytes = self.bytes.min(axis=0)
        self.penalty = float(table.penalty[indices].min())

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def spread_s(self) -> float:
        """How much the options differ."""
        return float((self.most - self.least).sum())

    @cached_property
    def single(self) -> list[Left]:
        """One for each option, quickest first."""
        order = np.argsort(self.seconds.sum(axis=1), kind="stable")
        return [Left(self.table, self.indices[k : k + 1]) for k in order]

    @cached_property
    def movers(self) -> list[RoleCost]:
        """One of the options for each way in which they take part in transfers."""
        options = [self.table.costs[i] for i in self.indices]
        return list({moved(cost): cost for cost in options}.values())


class Problem:
    """One search's input. `seconds` are those of operations whose roles have no devices."""

    def __init__(
        self,
        graph: StepGraph,
        roles: Sequence[str],
        cluster: ClusterSpec,
        costs: Costs,
        *,
        pins: Sequence[Pin] = (),
        seconds: Mapping[str, float] | None = None,
        staleness: int = 0,
    ) -> None:
        check_pins(pins, roles)
        if unknown := sorted(set(roles) - {role for op in graph.operations for role in op.roles}):
            raise SearchError(f"step {graph.name!r} has no operation of {', '.join(unknown)}")
        self.graph, self.roles, self.cluster, self.costs = graph, tuple(roles), cluster, costs
        self.pins, self.staleness = tuple(pins), staleness
        self.space = Space(cluster, sorted({str(pin.value) for pin in pins if pin.what == "label"}))
        self.names = tuple(operation.name for operation in graph.order())
        self.transfers = self._transfers()
        carried = {transfer.name for transfer in self.transfers}
        self.own: dict[str, tuple[str, ...]] = {
            role: tuple(n for n in self.names if graph[n].role == role and n not in carried) for role in roles
        }
        self.columns = {role: [self.names.index(name) for name in self.own[role]] for role in roles}
        self.fixed = np.array([self._fixed(name, carried, seconds or {}) for name in self.names])
        self.clock = Clock(math.inf)
        self._options: dict[tuple[str, DeviceSet], tuple[RoleCost, ...]] = {}
        self._excluded: set[tuple[str, int]] = set()
        self._floors: dict[tuple[str, int], Floats] = {}
        self._lefts: dict[tuple[str, int], Left | None] = {}
        self._tables: dict[tuple[str, DeviceSet], RoleTable | None] = {}
        self._seconds_of_transfers: dict[Hashable, float] = {}
        self._takes_part = {name: graph[name].roles for name in self.names}
        self._cuts: dict[str, list[Pin]] = {
            role: [pin for pin in pins if pin.about_options and role in pin.roles] for role in roles
        }

    @cached_property
    def device_bytes(self) -> dict[str, float]:
        """Memory of a device, by type."""
        return {kind.device_type: self.costs.device_bytes(kind.device_type) for kind in self.space.classes}

    @cached_property
    def host_bytes(self) -> dict[str, float]:
        """Host memory for each device, by type."""
        return {kind.device_type: self.costs.host_bytes(kind.device_type) for kind in self.space.classes}

    def options(self, role: str, devices: DeviceSet) -> tuple[RoleCost, ...]:
        """What the costs say, asked once; the must-pins on options hold."""
        key = role, devices
        if key in self._options:
            return self._options[key]
        self.clock.check()
        musts = [pin for pin in self._cuts[role] if pin.strength == "must"]
        given = self.costs.options(role, devices)
        found = tuple(cost for cost in given if all(pin.holds_for_option(cost.option) for pin in musts))
        if len(self._options) < _MOST_KEPT:  # tables are kept in any case; this is for explanations
            self._options[key] = found
        return found

    def never_runs(self, *first: str) -> str | None:
        """A role that no devices could run, whatever their memory: a search would try all in vain.

        The roles `first` are looked at before the others.
        """

        def runs(role: str) -> bool:
            shapes = sorted(self.space.shapes, key=lambda shape: -shape.devices.world)
            return any(self.allowed(role, s) and self.options(role, s.devices) for s in shapes)

        return next((role for role in dict.fromkeys((*first, *self.roles)) if not runs(role)), None)

    def floor(self, role: str, shape: Shape) -> Floats:
        """Seconds that `role`'s operations take at least there, by column; 0 where the costs know none."""
        key = role, id(shape)
        if key not in self._floors:
            floor_s = getattr(self.costs, "floor_s", None)
            floors = floor_s(role, shape.devices) if floor_s else {}
            self._floors[key] = np.array([floors.get(name, 0.0) for name in self.own[role]])
        return self._floors[key]

    def survey(self, role: str, shapes: Sequence[Shape], clock: Clock) -> None:
        """Ask for the options of `role` on the shapes, evenly spread ones first, while there is time."""
        self.clock = Clock(math.inf)  # looked at between two questions
        bits = max(1, len(shapes) - 1).bit_length()
        for i in sorted(range(len(shapes)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2)):
            if clock.over:
                return
            if self.allowed(role, shapes[i]):
                self.left(role, shapes[i])

    def asked(self, role: str, shape: Shape) -> bool:
        """Whether the options of `role` there are known."""
        return (role, id(shape)) in self._lefts

    def least(self, role: str, shape: Shape) -> Floats:
        """Seconds of `role`'s operations there at least, as far as known; `NEVER` where no option fits."""
        if not self.asked(role, shape):
            return self.floor(role, shape)
        left = self.left(role, shape)
        return np.full(len(self.own[role]), NEVER_S) if left is None else left.least

    def exclude_above(self, objective_s: float) -> None:
        """Let no role have a shape on which it alone makes every step as long as a known plan's."""
        excluded: set[tuple[str, int]] = set()
        scheduler = Scheduler(self.graph, {}, staleness=self.staleness)
        rows = {role: np.array([self.least(role, s) for s in self.space.shapes]) for role in self.roles}
        least = self.fixed.copy()
        for role in self.roles:
            least[self.columns[role]] = rows[role].min(axis=0)
        for role in self.roles:
            steps = np.tile(least, (len(self.space.shapes), 1))
            steps[:, self.columns[role]] = rows[role]
            bounds = scheduler.bounds(steps).tolist()
            excluded |= {
                (role, id(shape))
                for shape, bound in zip(self.space.shapes, bounds, strict=True)
                if bound >= objective_s
            }
        self._excluded = excluded

    def exclude_none(self) -> None:
        """Forget what was excluded."""
        self._excluded = set()

    def table(self, role: str, devices: DeviceSet) -> RoleTable | None:
        """The options worth looking at; None when none fits."""
        key = role, devices
        if key not in self._tables:
            self._tables[key] = self._table(role, devices)
        return self._tables[key]

    def left(self, role: str, shape: Shape) -> Left | None:
        """All options of `role` there, made once."""
        key = role, id(shape)
        if key not in self._lefts:
            table = self.table(role, shape.devices)
            self._lefts[key] = Left(table, np.arange(len(table.costs))) if table else None
        return self._lefts[key]

    def allowed(self, role: str, shape: Shape) -> bool:
        """Whether the must-pins let `role` have these devices, and a better plan than the known one may."""
        return (role, id(shape)) not in self._excluded and all(
            self._on(pin, shape)
            for pin in self.pins
            if pin.strength == "must" and pin.about_devices and role in pin.roles
        )

    def unmet(self, role: str, shape: Shape) -> list[Pin]:
        """Wishes about `role`'s devices that the shape does not meet."""
        wishes = [p for p in self.pins if p.strength != "must" and p.about_devices and role in p.roles]
        return [pin for pin in wishes if not pin.wanted(self._on(pin, shape))]

    def unmet_options(self, role: str, cost: RoleCost) -> list[Pin]:
        """Wishes about `role`'s option that this one does not meet."""
        wishes = [pin for pin in self._cuts[role] if pin.strength != "must"]
        return [pin for pin in wishes if not pin.wanted(pin.holds_for_option(cost.option))]

    def transfer_s(
        self,
        transfer: Transfer,
        source: RoleCost,
        on: DeviceSet,
        target: RoleCost,
        to: DeviceSet,
        together: bool,
    ) -> float:
        """Seconds of a transfer, asked once for equal layouts."""
        key = (
            transfer.name,
            moved(source),
            id(on),
            moved(target),
            id(to),
            together,
        )  # sets live as the space
        if key not in self._seconds_of_transfers:
            self._seconds_of_transfers[key] = self.costs.transfer_s(
                transfer.name, source, on, target, to, together=together
            )
        return self._seconds_of_transfers[key]

    def fits(self, costs: Sequence[tuple[str, RoleCost]], device_type: str) -> bool:
        """Whether these roles share devices of this type."""
        needed = self.pool_bytes(costs)
        host = sum(cost.host for _, cost in costs)
        return needed <= self.device_bytes[device_type] and host <= self.host_bytes[device_type]

    def pool_bytes(self, costs: Sequence[tuple[str, RoleCost]]) -> float:
        """Device bytes of a pool: all that is resident, and the most that works at a time."""
        working = max(
            (
                sum(cost.working.get(name, 0.0) for role, cost in costs if role in self._takes_part[name])
                for name in self.names
            ),
            default=0.0,
        )
        return sum(cost.resident for _, cost in costs) + working

    def _on(self, pin: Pin, shape: Shape) -> bool:
        if pin.what == "device_type":
            return shape.devices.device_type == pin.value
        if pin.what == "devices":
            return shape.devices.world == pin.value
        return all(str(pin.value) in self.space.classes[i].labels for i in shape.classes)

    def _transfers(self) -> tuple[Transfer, ...]:
        found = []
        for index, name in enumerate(self.names):
            operation = self.graph[name]
            others = sorted(operation.roles - {operation.role})
            if (
                operation.kind != "transfer"
                or operation.role not in self.roles
                or not set(others) & set(self.roles)
            ):
                continue
            if len(others) != 1:
                raise SearchError(
                    f"transfer {name!r} moves state of {', '.join(others)}: it needs one source"
                )
            found.append(Transfer(name, index, others[0], operation.role))
        return tuple(found)

    def _fixed(self, name: str, carried: set[str], seconds: Mapping[str, float]) -> float:
        if name in carried or self.graph[name].role in self.roles:
            return 0.0
        if name not in seconds:
            raise SearchError(f"{name} of {self.graph[name].role!r}, which has no devices, needs its seconds")
        return float(seconds[name])

    def _table(self, role: str, devices: DeviceSet) -> RoleTable | None:
        device, host = self.device_bytes[devices.device_type], self.host_bytes[devices.device_type]
        kept = [
            cost
            for cost in self.options(role, devices)
            if cost.host <= host and cost.resident + max(cost.working.values(), default=0.0) <= device
        ]
        if not kept:
            return None
        for cost in kept:
            if missing := [name for name in self.own[role] if name not in cost.seconds]:
                raise SearchError(f"the costs of role {role!r} lack the seconds of {', '.join(missing)}")
        moves = any(role in (transfer.source, transfer.target) for transfer in self.transfers)
        keys = [moved(cost) if moves else None for cost in kept]
        rows = np.array([self._row(role, cost) for cost in kept])
        best = _pareto(rows, keys)
        n, rows = len(self.own[role]), rows[best]
        return RoleTable(tuple(kept[i] for i in best), rows[:, :n], rows[:, n:-1], rows[:, -1])

    def _row(self, role: str, cost: RoleCost) -> list[float]:
        own = [cost.working.get(name, 0.0) for name in self.own[role]]
        moving = [
            cost.working.get(t.name, 0.0) if role in (t.source, t.target) else 0.0 for t in self.transfers
        ]
        return [
            *(cost.seconds[name] for name in self.own[role]),
            cost.resident,
            cost.host,
            max(own, default=0.0),
            *moving,
            sum(pin.weight for pin in self.unmet_options(role, cost)),
        ]


def moved(cost: RoleCost) -> Hashable:
    """What a transfer's seconds depend on."""
    return cost.option.layout, cost.option.offload


def _pareto(rows: Floats, keys: Sequence[Hashable]) -> list[int]:
    """Rows that no other one with an equal key is at least as good as in every column; ascending."""
    groups: dict[Hashable, list[int]] = {}
    for i in np.argsort(rows.sum(axis=1), kind="stable").tolist():
        groups.setdefault(keys[i], []).append(i)
    kept = []
    for group in groups.values():
        left = np.array(group)  # none is better than one before it
        while len(left):
            kept.append(int(left[0]))
            left = left[1:][~(rows[left[0]] <= rows[left[1:]]).all(axis=1)]
    return sorted(kept)
