"""The best placement under the objective of `schedule`, with its proof; `search` is the way in."""

from rolemesh.placement.search.pins import Pin, PinError
from rolemesh.placement.search.plans import (
    Alternative,
    Assignment,
    Change,
    Infeasible,
    Overrun,
    PlannedPool,
    Proof,
    SearchResult,
)
from rolemesh.placement.search.problem import SearchError
from rolemesh.placement.search.run import search

__all__ = [
    "Alternative",
    "Assignment",
    "Change",
    "Infeasible",
    "Overrun",
    "Pin",
    "PinError",
    "PlannedPool",
    "Proof",
    "SearchError",
    "SearchResult",
    "search",
]
