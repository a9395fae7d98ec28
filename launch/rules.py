"""What several keys of a recipe say about each other."""

from __future__ import annotations

from fractions import Fraction

from rolemesh.launch.algorithm_rules import check_algorithm, useless_algorithm_keys
from rolemesh.launch.checkpoint_rules import (
    check_checkpoints,
    check_walltime,
    useless_checkpoint_keys,
    useless_recovery_keys,
    useless_walltime_keys,
)
from rolemesh.launch.fields import RecipeError, members
from rolemesh.launch.loggers import useless_logger_keys
from rolemesh.launch.reward_keys import check_reward, scorers, useless_reward_keys
from rolemesh.launch.rollout_keys import VLLM_KEYS
from rolemesh.launch.schema import Recipe
from rolemesh.placement.pools import PlacementError
from rolemesh.placement.strategies import check_roles

ROLLOUT_AXES = ("tp", "pp", "cp", "ep", "etp", "vpp", "sequence_parallel")


def check_across(recipe: Recipe) -> None:
    """Raise RecipeError where keys contradict each other, or one makes another useless."""
    for path, reason in useless_keys(recipe).items():
        for key in sorted(recipe.given):
            if key == path or key.startswith(path + "."):
                raise RecipeError(f"{key} would have no effect: {reason}; leave it out")
    if recipe.has_critic and recipe.critic.path is None:
        raise RecipeError(
            f"critic.path is missing: {recipe.algorithm.name} needs a value model; give its folder, "
            "or use grpo"
        )
    check_algorithm(recipe)
    _check_schedule(recipe)
    check_checkpoints(recipe.run, recipe.data.val_files)
    check_walltime(recipe.run)
    check_reward(recipe.reward)
    _check_comparisons(recipe)
    if recipe.has_ref and recipe.ref.kind == "remote" and not recipe.ref.endpoints:
        raise RecipeError(
            "ref.endpoints is missing: where does the reference listen? such as [http://ref-0:5001]"
        )
    if recipe.has_ref and recipe.ref.kind == "actor" and not recipe.actor.lora.rank:
        raise RecipeError(
            "ref.kind is actor, which is for an actor with adapters (actor.lora): without them its first "
            "weights are gone after one update"
        )
    _check_engine(recipe)
    _check_pools(recipe)


def _check_engine(recipe: Recipe) -> None:
    """How the built-in engine can be cut, and what bounds an engine's memory."""
    for axis in ROLLOUT_AXES if recipe.rollout.engine == "hf" else ():
        if (size := getattr(recipe.rollout.layout, axis)) not in (None, False, 1):
            raise RecipeError(
                f"rollout.layout.{axis} is {size}, but rollout.engine hf keeps a whole copy of the model "
                f"in each process: leave {axis} out"
            )
    if recipe.rollout.layout.pp_layers:
        raise RecipeError("rollout.layout.pp_layers: an engine shares out its layers itself; leave it out")
    if recipe.rollout.memory_share is not None and "rollout.max_batch_tokens" in recipe.given:
        raise RecipeError(
            "rollout.memory_share and rollout.max_batch_tokens both bound the KV cache: leave one of them out"
        )
    if recipe.rollout.partial and recipe.schedule.staleness:
        raise RecipeError(
            f"rollout.partial keeps the longest responses for the next step, and schedule.staleness "
            f"{recipe.schedule.staleness} generates ahead of it: use one of them"
        )
    if recipe.rollout.partial and recipe.rollout.agent:
        raise RecipeError(
            "rollout.partial stops responses halfway and goes on with them in the next step, and the "
            "conversations of rollout.agent live in one step's processes: use one of them"
        )
    if recipe.rollout.agent and recipe.algorithm.step == "remax":
        raise RecipeError(
            f"rollout.agent answers samples, but not the greedy answer that {recipe.algorithm.name} compares "
            "each prompt's samples with: use another algorithm.name, such as rloo"
        )
    if recipe.rollout.partial and recipe.algorithm.dynamic_sampling.on:
        raise RecipeError(
            "rollout.partial trains on what is finished first, and algorithm.dynamic_sampling (on by default "
            "with dapo) fills a step by scores: use one of them"
        )


def _check_comparisons(recipe: Recipe) -> None:
    """A judge that compares the samples of a prompt needs several of them, in validation too."""
    for section, keys, kind in scorers(recipe.reward):
        if kind == "judge" and keys.judge.form == "pairwise" and keys.judge.against == "group":
            if recipe.batch.samples_per_prompt < 2:
                raise RecipeError(
                    f"batch.samples_per_prompt is {recipe.batch.samples_per_prompt}, but {section}.judge "
                    "compares the samples of a prompt: at least 2, or judge.against: label"
                )
            if recipe.data.val_files:
                raise RecipeError(
                    f"data.val_files: validation takes one sample for each prompt, and {section}.judge "
                    "compares several: use judge.against: label, or leave val_files out"
                )


def _check_schedule(recipe: Recipe) -> None:
    """What generating ahead of training cannot go with."""
    if not (staleness := recipe.schedule.staleness):
        return
    if not recipe.schedule.overlap:
        raise RecipeError(
            f"schedule.staleness is {staleness}, so that generation goes on while others train, but "
            "schedule.overlap is false: leave overlap true, or staleness 0"
        )
    if recipe.algorithm.dynamic_sampling.on:
        raise RecipeError(
            f"schedule.staleness is {staleness}, but algorithm.dynamic_sampling (on by default with dapo) "
            "draws a step's prompts by the scores of those before: use staleness 0, or "
            "algorithm.dynamic_sampling.on: false"
        )


def useless_keys(recipe: Recipe) -> dict[str, str]:
    """Dotted keys (or sections) that count for nothing in this recipe, with the reason."""
    idle: dict[str, str] = {}

    def mark(reason: str, *paths: str) -> None:
        idle.update(dict.fromkeys(paths, reason))

    for path, reason in (
        *useless_algorithm_keys(recipe),
        *useless_checkpoint_keys(recipe.run),
        *useless_recovery_keys(recipe.run),
        *useless_walltime_keys(recipe.run),
        *useless_logger_keys(recipe.run),
    ):
        mark(reason, path)
    if not recipe.has_critic:
        reason = f"algorithm.name is {recipe.algorithm.name}, which has no critic"
        mark(reason, "critic", "algorithm.value_clip", "batch.critic_warmup")
    for role in ("actor", "critic"):
        if not getattr(recipe, role).lora.rank:
            mark(f"{role}.lora.rank is 0", f"{role}.lora.alpha")
    if not recipe.has_ref:
        paths: tuple[str, ...] = tuple(
            f"algorithm.kl.{name}" for name in ("kind", "coef", "target", "horizon")
        )
        mark("algorithm.kl.in is none (set it to reward or loss)", "ref", *paths)
    elif recipe.ref.kind == "remote":
        names: tuple[str, ...] = (
            *("path", "dtype", "layout", "micro_batch_tokens", "offload", "worker", "stream"),
        )
        mark("ref.kind is remote: the service has the model", *(f"ref.{name}" for name in names))
    elif recipe.ref.kind == "actor":
        names = tuple(name for name in members(type(recipe.ref)) if name != "kind")
        mark("ref.kind is actor: it is the actor without adapters", *(f"ref.{name}" for name in names))
    else:
        names = ("endpoints", "token_env", "token_file", "limits", "speed")
        mark("ref.kind is model, not remote", *(f"ref.{name}" for name in names))
        if why := _never_streams(recipe):
            mark(why, "ref.stream")
    idle |= useless_reward_keys(recipe.reward)
    if recipe.run.steps is not None:
        mark(f"run.steps fixes the length at {recipe.run.steps} steps", "run.epochs")
    if recipe.run.address is not None:
        mark("run.address joins a running Ray cluster, which has its own", "run.temp_dir")
    if not recipe.data.val_files:
        mark("data.val_files is empty", "data.val_prompts", "run.validate_every")
    if recipe.placement.plan:
        mark("placement.plan says where every role goes", "placement.strategy", "placement.pools")
    elif recipe.placement.pools:
        mark("placement.pools says which roles go where", "placement.strategy")
    if recipe.placement.strategy != "auto":
        mark("only placement.strategy auto looks for a placement", "placement.pin")
    if recipe.rollout.engine == "hf":
        mark("rollout.engine is hf, not vllm", *(f"rollout.{name}" for name in VLLM_KEYS))
    else:
        mark("rollout.engine is not hf", "rollout.max_params")
    if not recipe.rollout.partial:
        mark("rollout.partial is false", "rollout.partial_share")
    if recipe.rollout.agent is None:
        mark("there is no rollout.agent", "rollout.agent_turns", "rollout.agent_timeout_s")
    for role in ("actor", "critic"):
        if getattr(recipe, role).optim.decay == "constant":
            mark(f"{role}.optim.decay is constant", f"{role}.optim.min_lr")
    return idle


def _never_streams(recipe: Recipe) -> str:
    """Why a placed reference cannot score while others are generated; empty where it may."""
    shared = [name for name, pool in recipe.placement.pools.items() if {"ref", "rollout"} <= set(pool.roles)]
    if shared:
        return f"reference and rollout take turns on pool {shared[0]}"
    if recipe.placement.strategy == "colocate" and not recipe.placement.pools and not recipe.placement.plan:
        return "placement colocate has reference and rollout take turns"
    if not recipe.schedule.overlap:
        return "schedule.overlap is false"
    if recipe.algorithm.dynamic_sampling.on:
        return "with algorithm.dynamic_sampling the reference waits for the samples that are kept"
    return ""


def _check_pools(recipe: Recipe) -> None:
    pools = recipe.placement.pools
    if not pools:
        return
    try:
        check_roles({name: pool.roles for name, pool in pools.items()}, recipe.roles)
    except PlacementError as error:
        raise RecipeError(f"placement.pools: {error}") from None
    shares = sum((pool.share for pool in pools.values() if pool.share), Fraction(0))
    if shares > 1:
        raise RecipeError(
            f"the shares of placement.pools sum to {shares}, more than the whole cluster: pools are "
            "exclusive; roles that share devices go in one pool"
        )
