"""What a pool's fullest device holds from operation to operation: the peak of a plan, over its step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.predict import Sampler
from rolemesh.placement.roles import PlanRequest


@dataclass(frozen=True)
class PoolMemory:
    """Bytes on a pool's fullest device.

    Attributes:
        resident: by role, there throughout the step.
        working: by operation, beside them while it runs.
        limit: what roles may fill.
    """

    resident: Mapping[str, float]
    working: Mapping[str, float]
    limit: float

    @property
    def peak(self) -> float:
        """At the fullest moment."""
        return sum(self.resident.values()) + max(self.working.values(), default=0.0)

    def at(self, operation: str) -> float:
        """While an operation runs; "" is none."""
        return sum(self.resident.values()) + self.working.get(operation, 0.0)


def memory_over_step(plan: PlacementPlan, request: PlanRequest) -> dict[str, PoolMemory]:
    """By pool. Raises PlacementError for a plan whose roles cannot run so on the cluster of the request."""
    sampler = Sampler(plan, request)
    found = {}
    for pool in plan.pools:
        mine = {role: sampler.chosen[role] for role in pool.roles}
        working = {
            op.name: sum(cost.working.get(op.name, 0.0) for role, cost in mine.items() if role in op.roles)
            for op in request.graph.operations
            if set(pool.roles) & op.roles
        }
        found[pool.name] = PoolMemory(
            {role: cost.resident for role, cost in mine.items()},
            working,
            sampler.costs.device_bytes(sampler.devices[pool.roles[0]].device_type),
        )
    return found
