"""`rolemesh plan --emit`: a plan as the command line of another system."""

from __future__ import annotations

from dataclasses import asdict

from rolemesh.launch.fields import RecipeError
from rolemesh.launch.plan import as_planned
from rolemesh.launch.schema import Recipe
from rolemesh.placement.emit import EmitError, emit
from rolemesh.placement.plan import PlacementPlan


def emitted(system: str, recipe: Recipe, plan: PlacementPlan) -> str:
    """The shell script that runs the recipe on this plan there.

    Raises RecipeError for a system that is not known, and naming what that system cannot do.
    """
    try:
        return emit(system, asdict(as_planned(recipe, plan)), plan).script()
    except EmitError as error:
        raise RecipeError(f"--emit {system}: {error}") from error
