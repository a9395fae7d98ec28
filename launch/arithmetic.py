"""The batch arithmetic of a recipe in words."""

from __future__ import annotations

import math

from rolemesh.launch.reward_keys import has_batches, scorers
from rolemesh.launch.schema import Recipe
from rolemesh.launch.service_keys import RequestLimits, Speed
from rolemesh.placement.plan import PlacementPlan


def steps_per_epoch(recipe: Recipe, rows: int) -> int:
    """Batches in `rows` training prompts; the last holds what is left over."""
    return math.ceil(rows / recipe.batch.prompts)


def total_steps(recipe: Recipe, rows: int) -> int:
    """Steps of the run: `run.steps`, or as many as `run.epochs` over `rows` prompts make."""
    if recipe.run.steps is not None:
        return recipe.run.steps
    return recipe.run.epochs * steps_per_epoch(recipe, rows)


def updates(recipe: Recipe, steps: int) -> int:
    """Optimizer updates of a run of `steps` steps: the length of a learning-rate decay."""
    per_epoch = -(-recipe.batch.samples // recipe.batch.mini_batch)
    return steps * recipe.batch.epochs * per_epoch


def epoch_line(recipe: Recipe, rows: int) -> str:
    """Prompts, steps per epoch, size of the last one, steps of the run."""
    per_epoch, prompts = steps_per_epoch(recipe, rows), recipe.batch.prompts
    left = rows % prompts
    over = f" (the last has {left} prompts)" if left else ""
    return (
        f"data: {rows} prompts / {prompts} per step = {per_epoch} steps per epoch{over}; "
        f"{total_steps(recipe, rows)} steps in all"
    )


def batch_lines(recipe: Recipe, plan: PlacementPlan) -> list[str]:
    """Samples, mini-batches and updates of one step, and micro-batches per rank of each model."""
    batch = recipe.batch
    whole, rest = divmod(batch.samples, batch.mini_batch)
    minis = f"{whole} of {batch.mini_batch}" + (f" and 1 of {rest}" if rest else "") + " samples"
    updates = (whole + bool(rest)) * batch.epochs
    lines = [
        f"batch: {batch.prompts} prompts x {batch.samples_per_prompt} = {batch.samples} samples per step",
        f"mini-batches: {minis}; x {batch.epochs} epochs = {updates} updates per step",
    ]
    if updates == 1 and recipe.schedule.staleness:
        lines.append(
            "one update per batch: clipping never acts; the samples' age is what "
            f"algorithm.rollout_correction (weights: {recipe.algorithm.rollout_correction.weights}) is for"
        )
    elif updates == 1:
        lines.append("one update per batch: on-policy, the ratio is 1 by design and clipping never acts")
    for role in recipe.roles:
        if role not in recipe.engine_roles:
            lines.append(_micro_batches(recipe, role, plan.layout_of(role).dp))
    if recipe.has_ref and recipe.ref.kind == "remote":
        ref = recipe.ref
        lines.append(_service("ref", ref.endpoints, ref.limits, batch.samples, ref.limits.batch))
        lines += _stated("ref", ref.speed, batch.samples)
    for section, keys, kind in scorers(recipe.reward):
        if kind in ("remote", "judge") and not (kind == "judge" and keys.path):
            size = keys.limits.batch if has_batches(keys, kind) else 1
            lines.append(_service(section, keys.endpoints, keys.limits, batch.samples, size))
    return lines + _stated("reward", recipe.reward.speed, batch.samples)


def _service(section: str, endpoints: tuple[str, ...], limits: RequestLimits, samples: int, size: int) -> str:
    """How the samples of a step go to a service, at most `size` in a request."""
    several = f", at most {size} in a request" if size > 1 else ""
    return (
        f"{section}: {samples} samples to {', '.join(endpoints)}{several}, at most {limits.in_flight} "
        "requests at once"
    )


def _stated(section: str, speed: Speed, samples: int) -> list[str]:
    """How long a step's samples take at the speed that the recipe states, where it does."""
    if speed == Speed():
        return []
    seconds = speed.latency_s + samples / (speed.samples_per_s or math.inf)
    return [f"{section}: {samples} samples in {seconds:.3g} s, as {section}.speed states"]


def _micro_batches(recipe: Recipe, role: str, dp: int) -> str:
    trained = role in ("actor", "critic")
    samples = recipe.batch.mini_batch if trained else recipe.batch.samples
    per_rank = math.ceil(samples / dp)
    budget = getattr(recipe, role).micro_batch_tokens
    prompt, response = recipe.data.max_prompt_tokens, recipe.lengths.max_response_tokens
    most = math.ceil(per_rank / max(1, budget // (prompt + response)))
    text = f"{role}: dp {dp}, {per_rank} samples per rank and {'mini-batch' if trained else 'step'}, "
    text += f"at most {most} micro-batches of {budget} tokens"
    if recipe.lengths.expect is not None:
        expect = recipe.lengths.expect
        low, high = (
            min(math.ceil(per_rank * (prompt + length) / budget), most)
            for length in (expect.mean, expect.p95)
        )
        text += f" ({low} at the expected mean, {high} if all were as long as the 95th percentile)"
    return text
