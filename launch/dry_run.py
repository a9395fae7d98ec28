"""`rolemesh plan RECIPE --dry-run`: every distinct rank of a plan built without memory."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from rolemesh.launch.fields import RecipeError
from rolemesh.launch.schema import Recipe
from rolemesh.placement.layout import Layout, LayoutError
from rolemesh.placement.model import ModelShape
from rolemesh.placement.plan import PlacementPlan

if TYPE_CHECKING:
    from rolemesh.parallel.dry_run import DryRun

LIMIT_S = 1800.0


def dry_run_plan(recipe: Recipe, plan: PlacementPlan, shapes: Mapping[str, ModelShape]) -> Iterator[str]:
    """Lines about each role of the plan that has a model to cut; a role's is yielded when it is done.

    Raises RecipeError for a model that the plan cannot cut, or a checkpoint that does not fit it.
    """
    context = multiprocessing.get_context("spawn")  # fake process groups stay out of this process
    with ProcessPoolExecutor(1, context) as other:
        for role, layout in plan.layouts.items():
            if role not in shapes or role in recipe.engine_roles:
                continue
            start_s = time.perf_counter()
            path, value = Path(getattr(recipe, role).path), role in ("critic", "reward")
            new_head = role == "critic" and recipe.critic.new_head
            try:
                done = other.submit(_run, shapes[role], layout, path, value, new_head).result(LIMIT_S)
            except (LayoutError, ValueError, ArithmeticError) as error:
                raise RecipeError(f"dry run of {role}: {error}") from error
            yield line(role, layout, *done, time.perf_counter() - start_s)


def line(role: str, layout: Layout, found: DryRun, has_weights: bool, seconds: float) -> str:
    """What the dry run of a role says."""
    low, high = found.n_params
    held = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    source = "the checkpoint's" if has_weights else "the model's (its folder has no weights)"
    return (
        f"dry run: {role}: {layout.world} ranks ({layout}), {found.kinds} kinds of them built: "
        f"{held} parameters, as the memory model counts; {source} {found.n_tensors:,} tensors land once "
        f"({seconds:.1f} s)"
    )


def _run(shape: ModelShape, layout: Layout, path: Path, value: bool, new_head: bool) -> tuple[DryRun, bool]:
    """In the other process."""
    from rolemesh.parallel.dry_run import dry_run
    from rolemesh.parallel.weights.stored_shapes import stored_shapes

    stored = stored_shapes(path)
    found = dry_run(shape, layout, stored, "value" if value else "lm", new_head=new_head)
    return found, stored is not None
