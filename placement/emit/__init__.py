"""A plan and its recipe in the words of other systems: the command line that runs the same layout there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rolemesh.placement.emit.openrlhf import openrlhf_flags
from rolemesh.placement.emit.values import EmitError, Emitted, Keys
from rolemesh.placement.emit.verl import verl_flags
from rolemesh.placement.plan import PlacementPlan

EMITTERS: Mapping[str, Callable[[Keys, PlacementPlan], Emitted]] = {
    "verl": verl_flags,
    "openrlhf": openrlhf_flags,
}


def emit(system: str, keys: Keys, plan: PlacementPlan) -> Emitted:
    """The flags of `system` for a recipe's `keys` (every section as a mapping, defaults filled in) on `plan`.

    Raises EmitError for a system that is not known, and naming what that system cannot do.
    """
    if system not in EMITTERS:
        raise EmitError(f"no emitter for {system!r} (there are: {', '.join(EMITTERS)})")
    return EMITTERS[system](keys, plan)


__all__ = ["EMITTERS", "EmitError", "Emitted", "emit"]
