"""What `rolemesh plan` takes from options, and what it says about its assumptions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean

from rolemesh.launch.fields import RecipeError
from rolemesh.launch.request import workload_of
from rolemesh.launch.schema import Recipe
from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.plan import PlacementPlan

METRICS, MEAN, LARGEST = "metrics.jsonl", "response_length/mean", "response_length/max"


def with_pins(load: Callable[[Sequence[str]], Recipe], pins: Sequence[str]) -> Recipe:
    """The recipe that `load` makes of overrides, with those of `--pin`: a dotted key with its value as it is,
    a placement beside the recipe's own `placement.pin.must`.
    """
    keys = [pin for pin in pins if "=" in pin and "." in pin.partition("=")[0] and " " not in pin.strip()]
    placements = [pin for pin in pins if pin not in keys]
    recipe = load(keys)
    if not placements:
        return recipe
    must = json.dumps([*recipe.placement.pin.must, *placements])
    return load([*keys, f"placement.pin.must={must}"])


def length_overrides(run: Path | None) -> list[str]:
    """`lengths.expect` as the steps of a run measured it: the mean, and the longest in the place of the 95th
    percentile, which metrics do not hold. Raises RecipeError for a folder without such metrics.
    """
    if run is None:
        return []
    file = run / METRICS
    try:
        steps = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise RecipeError(f"--lengths-from {run}: no {METRICS} there: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise RecipeError(f"--lengths-from {run}: {METRICS} has a line that is no JSON: {error}") from error
    measured = [(step[MEAN], step[LARGEST]) for step in steps if MEAN in step and LARGEST in step]
    if not measured:
        raise RecipeError(f"--lengths-from {run}: no step in {METRICS} has {MEAN} and {LARGEST}")
    average, largest = (mean(values) for values in zip(*measured, strict=True))
    return [f"lengths.expect={{kind: lognormal, mean: {average:.6g}, p95: {max(average, largest):.6g}}}"]


def assumed_lengths(recipe: Recipe) -> Iterator[str]:
    """The lengths that predictions are for."""
    workload = workload_of(recipe)
    said = "lengths.expect" if recipe.lengths.expect else "no lengths.expect, so all as long as allowed"
    yield f"assumed prompts: {workload.prompt_lengths}; responses: {workload.response_lengths} ({said})"


def profile_sources(cluster: ClusterSpec, plan: PlacementPlan) -> Iterator[str]:
    """Where the figures of each device type are from."""
    for kind in dict.fromkeys(kind for kind in plan.device_types.values() if kind):
        measured = kind in cluster.profiles
        said = "measured, from --profile" if measured else "published, not calibrated here"
        yield f"device {kind}: {said}"
