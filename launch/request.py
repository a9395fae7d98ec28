"""A recipe as the planner's input: step graph, roles, workload, pins."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rolemesh.launch.fields import RecipeError
from rolemesh.launch.reward_keys import needs_groups
from rolemesh.launch.schema import Recipe
from rolemesh.launch.service_keys import Speed
from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.graph import StepGraph
from rolemesh.placement.known_models import known_names
from rolemesh.placement.lengths import Fixed, Lengths
from rolemesh.placement.model import ModelShape
from rolemesh.placement.roles import PlanRequest, Questions, RoleRequest
from rolemesh.placement.search.pins import Pin, PinError, Strength
from rolemesh.placement.steps import step_graph
from rolemesh.placement.steps.operations import reference_of_actor, with_agent
from rolemesh.placement.timing.transfer import Remote
from rolemesh.placement.workload import Workload

_PIN = re.compile(r"\s*(?P<roles>\w+(?:\s*[,+]\s*\w+)*)\s+(?P<what>\w+)\s*(?:=\s*(?P<value>\S.*))?")
FRAME_TOKENS = 256  # of a judge's question, beside prompt and response: the form's own words, a rubric
_TEXT = ("device_type", "label")  # pins whose value is text as it stands


def graph_of(recipe: Recipe) -> StepGraph:
    """The step graph of the recipe's algorithm."""
    kl_in = None if recipe.algorithm.kl.in_ == "none" else recipe.algorithm.kl.in_
    features = {"dynamic_sampling": True} if recipe.algorithm.dynamic_sampling.on else {}
    graph = step_graph(
        recipe.algorithm.step,
        reference=recipe.has_ref,
        reward=recipe.reward.kind,
        kl_in=kl_in,
        reward_takes="groups" if needs_groups(recipe.reward) else "rows",
        ref_takes="rows" if recipe.ref.kind == "remote" or recipe.ref.stream else "batch",
        **features,
    )
    graph = with_agent(graph) if recipe.rollout.agent else graph
    return reference_of_actor(graph) if recipe.ref.kind == "actor" else graph


def workload_of(recipe: Recipe) -> Workload:
    """What a step has to do; prompts count as long as allowed."""
    batch, expect, resampled = recipe.batch, recipe.lengths.expect, recipe.algorithm.dynamic_sampling
    lengths: dict[str, Any] = {"max_response_tokens": recipe.lengths.max_response_tokens}
    if expect is not None:
        lengths["expect"] = {"kind": expect.kind, "mean": expect.mean, "p95": expect.p95}
    return Workload(
        prompts=batch.prompts,
        prompt_lengths=Fixed(float(recipe.data.max_prompt_tokens)),
        response_lengths=Lengths.from_keys(lengths),
        algorithm=recipe.algorithm.name,
        samples_per_prompt=batch.samples_per_prompt,
        mini_batch_samples=batch.mini_batch_samples,
        epochs=batch.epochs,
        tries=resampled.expect_tries if resampled.on else 1.0,
        micro_batch_tokens=batch.micro_batch_tokens if "batch.micro_batch_tokens" in recipe.given else None,
    )


def request_of(
    recipe: Recipe,
    cluster: ClusterSpec,
    shapes: Mapping[str, ModelShape],
    *,
    runnable: bool = True,
    defaults: bool = False,
) -> PlanRequest:
    """What the planner is asked; what the recipe leaves to its default is left to the planner.

    With `defaults` the recipe's defaults count too: what is planned is just what a run would do.
    Raises RecipeError for a role whose model is not known.
    """
    if missing := [role for role in recipe.roles if role != "rollout" and role not in shapes]:
        raise RecipeError(_without_model({role: Path(getattr(recipe, role).path) for role in missing}))
    return PlanRequest(
        graph_of(recipe),
        {role: _role(recipe, role, shapes, defaults) for role in recipe.roles},
        workload_of(recipe),
        cluster,
        remote=_stated_speeds(recipe),
        runnable=runnable,
        staleness=recipe.schedule.staleness,
    )


def _stated_speeds(recipe: Recipe) -> dict[str, Remote]:
    """By operation, how fast what runs on no devices answers; without those that say nothing of it."""
    sections = {"reward": recipe.reward.speed, "ref_log_prob": recipe.ref.speed}
    said = {name: speed for name, speed in sections.items() if speed != Speed()}
    return {name: Remote(speed.latency_s, speed.samples_per_s or math.inf) for name, speed in said.items()}


def _without_model(paths: Mapping[str, Path]) -> str:
    """What to say of roles whose models are not there, with the nearest built-in name of each."""
    said, names = ", ".join(f"{role}.path is {path}" for role, path in paths.items()), known_names()
    near = {n for path in paths.values() for n in difflib.get_close_matches(path.name.lower(), names, 1)}
    meant = f"; did you mean {' and '.join(sorted(near))}?" if near else ""
    return (
        f"no config.json for the planner: {said}. Give a folder that has one, or a built-in shape: "
        f"{', '.join(names)}{meant}"
    )


def _role(recipe: Recipe, role: str, shapes: Mapping[str, ModelShape], defaults: bool) -> RoleRequest:
    section = getattr(recipe, role)

    def given(name: str, *also: str) -> Any:
        """The section's value where the recipe says it, here or by one of the keys in `also`."""
        written = defaults or any(path in recipe.given for path in (f"{role}.{name}", *also))
        return getattr(section, name, None) if written else None

    if role == "reward" and recipe.judge_is_placed:
        return RoleRequest(
            shapes[role],
            section.dtype,
            section.layout.pins,
            micro_batch_tokens=given("max_batch_tokens"),
            questions=questions_of(recipe),
        )
    if role == "rollout":
        return RoleRequest(
            shapes["actor"],
            recipe.actor.dtype,
            section.layout.pins,
            engine="hf" if section.engine == "hf" else "paged",
            micro_batch_tokens=given("max_batch_tokens"),
        )
    return RoleRequest(
        shapes[role],
        section.dtype,
        section.layout.pins,
        micro_batch_tokens=given("micro_batch_tokens", "batch.micro_batch_tokens"),
        recompute=given("recompute"),
        offload=given("offload"),
        lora_rank=section.lora.rank if role in ("actor", "critic") else 0,
    )


def questions_of(recipe: Recipe) -> Questions | None:
    """What a judge that this run places is asked; None without one."""
    if not recipe.judge_is_placed:
        return None
    judge = recipe.reward.judge
    per_sample, shown = 1.0, 1
    if judge.form == "pairwise":  # each pair in both orders
        others = min(judge.opponents, recipe.batch.samples_per_prompt - 1)
        per_sample, shown = (others, 2) if judge.against == "group" else (2.0, 2)
    return Questions(judge.max_tokens, FRAME_TOKENS, per_sample, shown)


def longest_tokens(recipe: Recipe, role: str) -> int:
    """Tokens of the longest sequence that the model of `role` sees."""
    response = recipe.lengths.max_response_tokens
    asked = questions_of(recipe) if role == "reward" else None
    if asked is None:
        return recipe.data.max_prompt_tokens + response
    frame = recipe.data.max_prompt_tokens + asked.frame_tokens
    return frame + asked.samples * response + asked.answer_tokens


def pins_of(recipe: Recipe) -> list[Pin]:
    """The pins of `placement.pin`. Raises RecipeError for a line that cannot be read."""
    pins = []
    strengths: tuple[Strength, ...] = ("must", "prefer", "avoid")
    for strength in strengths:
        for line in getattr(recipe.placement.pin, strength):
            try:
                pins.append(_pin(line, strength))
            except PinError as error:
                raise RecipeError(f"placement.pin.{strength}: {error}") from None
    return pins


def _pin(line: str, strength: Strength) -> Pin:
    match = _PIN.fullmatch(line.rstrip())
    if match is None:
        raise PinError(
            f"{line!r} is no pin: write `actor+ref together`, `actor+critic apart` or `critic tp=8`"
        )
    roles, what, value = tuple(re.split(r"\s*[,+]\s*", match["roles"])), match["what"], match["value"]
    return Pin(roles, what, value if value is None or what in _TEXT else yaml.safe_load(value), strength)
