"""What a search returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rolemesh.placement.costs import DeviceSet, RoleCost
from rolemesh.placement.schedule import Schedule
from rolemesh.placement.search.pins import Pin
from rolemesh.placement.search.space import Nodes


@dataclass(frozen=True)
class PlannedPool:
    """A pool: its roles, its devices, and the nodes that have them."""

    name: str
    roles: tuple[str, ...]
    devices: DeviceSet
    nodes: Nodes


@dataclass(frozen=True)
class Assignment:
    """One complete choice: pools, the option of every role, seconds of every operation, and their order.

    `objective_s` is the makespan, longer by the weights of `unmet` wishes.
    """

    pools: tuple[PlannedPool, ...]
    costs: Mapping[str, RoleCost]
    seconds: Mapping[str, float]
    schedule: Schedule
    unmet: tuple[Pin, ...] = ()

    @property
    def makespan_s(self) -> float:
        """Seconds of one step."""
        return self.schedule.makespan_s

    @property
    def objective_s(self) -> float:
        """What the search minimises."""
        return self.makespan_s * (1 + sum(pin.weight for pin in self.unmet))

    @property
    def n_devices(self) -> int:
        """Devices of all pools."""
        return sum(pool.devices.world for pool in self.pools)

    def pool_of(self, role: str) -> PlannedPool:
        """The pool of `role`."""
        return next(pool for pool in self.pools if role in pool.roles)


@dataclass(frozen=True)
class Proof:
    """How good a plan is known to be.

    No plan's objective is below `bound_s`; `gap` is the part of the plan's objective that the bound leaves
    open, 0 when it is proven best. `scope` says what the search did not consider; empty when nothing.
    """

    bound_s: float
    gap: float
    nodes_visited: int
    seconds: float
    scope: str = ""

    @property
    def optimal(self) -> bool:
        """Whether no better plan exists."""
        return self.gap == 0.0


@dataclass(frozen=True)
class Overrun:
    """What does not fit on the best try: which roles, on which devices, over by how much.

    `item` is `device memory`, `host memory`, `devices` (too few), `options` (no legal layout) or `time` (that
    of the search, in seconds); `largest` is the largest entry of the itemised bytes.
    """

    roles: tuple[str, ...]
    item: str
    over: float  # bytes, devices or seconds
    devices: DeviceSet | None
    costs: Mapping[str, RoleCost] = field(default_factory=dict)
    largest: str = ""

    def __str__(self) -> str:
        roles = " + ".join(self.roles)
        where = f" on {self.devices.world} x {self.devices.device_type}" if self.devices else ""
        if self.item == "options":
            return f"{roles}: no legal way to run it on any devices of the cluster"
        if self.item == "time":
            return f"no plan was found in {self.over:g} s, and it is not known whether there is one"
        if self.item == "devices":
            return f"{roles}: {self.over:g} devices too few"
        what = f" (largest item: {self.largest})" if self.largest else ""
        options = "; ".join(f"{r} with {_say(c)}" for r, c in self.costs.items())
        return f"{roles}{where}: {self.item} over by {self.over / 2**30:.2f} GiB{what} at best, {options}"


@dataclass(frozen=True)
class Change:
    """The nearest change that fits: pins to give up, or nodes to add (as class of node and number)."""

    dropped: tuple[Pin, ...] = ()
    added: tuple[tuple[str, int], ...] = ()  # ("8 x h100-80", nodes)
    plan: Assignment | None = None

    def __str__(self) -> str:
        parts = [f"without {pin}" for pin in self.dropped]
        parts += [f"with {n} more node{'s' * (n > 1)} of {kind}" for kind, n in self.added]
        if self.plan is not None and self.dropped:
            roles = {role for pin in self.dropped for role in pin.roles}
            parts += [f"{role} with {_say(self.plan.costs[role])}" for role in sorted(roles)]
        return ", ".join(parts)


@dataclass(frozen=True)
class Infeasible:
    """No plan fits: what is over on the best try, and the nearest change that fits (None: none found)."""

    overrun: Overrun
    nearest: Change | None
    proven: bool
    nodes_visited: int
    seconds: float

    def __str__(self) -> str:
        if self.nearest:
            return f"{self.overrun}; nearest that fits: {self.nearest}"
        return f"{self.overrun}; no change tried would fit" if self.proven else str(self.overrun)


@dataclass(frozen=True)
class Alternative:
    """The best plan of another shape and why it loses; None when it has none that fits."""

    name: str
    plan: Assignment | None
    proof: Proof | None
    reason: str


@dataclass(frozen=True)
class SearchResult:
    """The best plan, its proof, the best of each strategy, and the best found of other groupings of roles."""

    best: Assignment
    proof: Proof
    strategies: Mapping[str, Alternative] = field(default_factory=dict)
    runners_up: tuple[Alternative, ...] = ()


def _say(cost: RoleCost) -> str:
    option = cost.option
    said = [str(option.layout), f"micro-batch {option.micro_batch}"]
    said += [f"recompute {option.recompute}"] if option.recompute != "none" else []
    return ", ".join(said + ["offload"] * option.offload)
