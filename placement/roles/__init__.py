"""From roles, workload and cluster to `Costs`: every legal way to run a role, with its seconds and bytes."""

from rolemesh.placement.roles.costs import PlannerCosts
from rolemesh.placement.roles.request import PlanRequest, Questions, RequestError, RoleRequest

__all__ = ["PlanRequest", "PlannerCosts", "Questions", "RequestError", "RoleRequest"]
