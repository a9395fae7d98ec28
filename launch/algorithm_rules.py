"""What the keys of the section `algorithm` say about each other: refused, useless, and worth a note."""

from __future__ import annotations

from collections.abc import Iterator

from rolemesh.launch.algorithm_presets import ESTIMATORS, LOSSES
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.reward_keys import needs_groups
from rolemesh.launch.schema import Recipe
from rolemesh.placement.hints import did_you_mean
from rolemesh.placement.steps import step_graph

IN_GROUPS = ("grpo", "rloo", "reinforce_plus_plus_baseline")  # compare the samples of a prompt
READS_GAMMA = ("gae", "reinforce_plus_plus")


def check_algorithm(recipe: Recipe) -> None:
    """Raise RecipeError where the algorithm cannot run as it is written."""
    algorithm = recipe.algorithm
    estimators, losses = _names(recipe)
    _check_name("estimator", algorithm.estimator, estimators)
    _check_name("loss", algorithm.loss, losses)
    _check_columns(recipe)
    if algorithm.estimator in IN_GROUPS and recipe.batch.samples_per_prompt < 2:
        raise RecipeError(
            f"batch.samples_per_prompt is {recipe.batch.samples_per_prompt}, but {algorithm.name} compares "
            "the samples of a prompt: at least 2"
        )
    if algorithm.dynamic_sampling.on and (algorithm.step != "grpo" or recipe.batch.samples_per_prompt < 2):
        raise RecipeError(
            "algorithm.dynamic_sampling keeps prompts whose samples get unequal scores: it is for algorithms "
            f"with the step of grpo, and batch.samples_per_prompt of at least 2; {algorithm.name} has the "
            f"step of {algorithm.step}, batch.samples_per_prompt is {recipe.batch.samples_per_prompt}"
        )
    if algorithm.step == "remax" and needs_groups(recipe.reward):
        raise RecipeError(
            "algorithm.name remax scores each prompt's greedy answer alone, but the reward compares the "
            "samples of a prompt (judge.form pairwise): use a judge that gives scores, or another algorithm"
        )
    buffer, longest = algorithm.overlong.buffer_tokens or 0, recipe.lengths.max_response_tokens
    if buffer > longest:
        raise RecipeError(
            f"algorithm.overlong.buffer_tokens is {buffer}, more than lengths.max_response_tokens ({longest})"
        )


def _check_name(key: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise RecipeError(
            f"algorithm.{key} is {name!r}, but must be one of {', '.join(known)}, or one that the file of "
            f"algorithm.file registers{did_you_mean(name, known)}"
        )


def _check_columns(recipe: Recipe) -> None:
    """An estimator that needs a role's column runs in a step that has it, and the column is not in vain."""
    algorithm = recipe.algorithm
    columns = step_graph(algorithm.step)["advantage"].reads
    for estimator, column, name in (("gae", "values", "ppo"), ("remax", "reward_baselines", "remax")):
        if algorithm.estimator == estimator and column not in columns:
            raise RecipeError(
                f"algorithm.estimator {estimator} needs the column {column}, which the step of "
                f"{algorithm.name} does not make: use algorithm.name {name}"
            )
        if algorithm.estimator != estimator and column in columns and algorithm.estimator in ESTIMATORS:
            raise RecipeError(
                f"algorithm.estimator {algorithm.estimator} does not read the column {column}, which the "
                f"step of {algorithm.name} makes for it: use another algorithm.name"
            )


def useless_algorithm_keys(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Dotted keys that count for nothing with this estimator, loss or correction, each with the reason."""
    algorithm = recipe.algorithm
    own = algorithm.estimator not in ESTIMATORS  # a user's may read any number
    estimator = f"algorithm.estimator is {algorithm.estimator} (algorithm.name {algorithm.name}), which "
    if not own and algorithm.estimator not in READS_GAMMA:
        yield "algorithm.gamma", estimator + "discounts nothing"
    if not own and algorithm.estimator != "gae":
        yield "algorithm.lam", estimator + "has no critic to trade against"
    if not own and algorithm.estimator != "grpo":
        yield "algorithm.norm_adv_by_std", estimator + "divides by no group's standard deviation"
    if algorithm.loss in ("gspo", "cispo"):
        yield "algorithm.dual_clip", f"algorithm.loss is {algorithm.loss}, which has no dual clip"
    if algorithm.loss == "gspo":
        yield "algorithm.loss_agg", "algorithm.loss is gspo, a mean over sequences of their tokens' mean"
    if algorithm.loss_agg != "seq-mean-token-sum-norm":
        yield "algorithm.norm_tokens", f"algorithm.loss_agg is {algorithm.loss_agg}, which has no constant"
    if not algorithm.overlong.buffer_tokens:
        yield "algorithm.overlong.penalty", "algorithm.overlong.buffer_tokens is 0"
    if not algorithm.dynamic_sampling.on:
        for name in ("tries", "at_limit", "expect_tries"):
            yield f"algorithm.dynamic_sampling.{name}", "algorithm.dynamic_sampling.on is false"
    correction = algorithm.rollout_correction
    if correction.weights == "none":
        yield "algorithm.rollout_correction.max_weight", "algorithm.rollout_correction.weights is none"
    if correction.reject is None:
        yield "algorithm.rollout_correction.reject_by", "algorithm.rollout_correction.reject is not given"


def algorithm_notes(recipe: Recipe) -> Iterator[str]:
    """What runs, but is hardly meant."""
    kl = recipe.algorithm.kl
    if kl.in_ == "loss" and kl.kind == "k1":
        yield (
            "algorithm.kl.kind is k1 in the loss: its gradient is that of the log-prob alone and ignores the "
            "reference; use k2 or k3"
        )


def _names(recipe: Recipe) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Estimators and losses that this recipe can name."""
    if recipe.algorithm.file is None:
        return ESTIMATORS, LOSSES
    from rolemesh.engine.algorithms import estimator_names, policy_loss_names  # loaded with the file

    return estimator_names(), policy_loss_names()
