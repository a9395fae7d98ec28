"""The recipe's section `algorithm`: estimator and losses, KL, long responses, the rollout's log-probs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rolemesh.launch.algorithm_presets import ESTIMATORS, LOSSES, PRESETS, shown_by_name
from rolemesh.launch.fields import RecipeError, Section, key
from rolemesh.placement.steps import step_names

_ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True, kw_only=True)
class KL(Section):
    """The distance to the reference policy: where it acts and how it is estimated."""

    in_: Literal["reward", "loss", "none"] = key(
        "none",
        "Subtract it from the reward, add it to the loss, or leave it out (no reference then).",
        verl="algorithm.use_kl_in_reward, actor_rollout_ref.actor.use_kl_loss",
    )
    kind: Literal["k1", "abs", "k2", "k3", "low_var_kl"] = key(
        "k1",
        "Estimator: k1 log ratio, abs its size, k2 half its square, k3 the low-variance one (low_var_kl is "
        "another name of it). In the loss k1's gradient ignores the reference.",
        shown="k1; in the loss: k3",
        verl="algorithm.kl_penalty, actor_rollout_ref.actor.kl_loss_type",
    )
    coef: float = key(
        0.001, "Weight.", at_least=0, verl="algorithm.kl_ctrl.kl_coef, actor_rollout_ref.actor.kl_loss_coef"
    )
    target: float | None = key(
        None,
        "KL that an adaptive weight steers to (with horizon; in: reward).",
        unit="nats per token",
        above=0,
        shown="fixed weight",
        verl="algorithm.kl_ctrl.target_kl",
    )
    horizon: float | None = key(
        None,
        "Speed of the adaptive weight (with target).",
        unit="samples",
        above=0,
        shown="fixed weight",
        verl="algorithm.kl_ctrl.horizon",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.target is None) != (self.horizon is None):
            raise RecipeError("target and horizon make the weight adaptive together: give both or none")
        if self.target is not None and self.in_ != "reward":
            raise RecipeError(f"target and horizon need in: reward, but in is {self.in_}")


@dataclass(frozen=True, kw_only=True)
class Overlong(Section):
    """Responses that come near the longest length, or are cut at it."""

    buffer_tokens: int | None = key(
        None,
        "The reward falls linearly over the last so many tokens before the longest length (DAPO); 0: no "
        "penalty.",
        unit="tokens",
        at_least=0,
        shown="0; dapo: a fifth of lengths.max_response_tokens",
        verl="reward_model.reward_kwargs.overlong_buffer_cfg.len",
    )
    penalty: float = key(
        1.0,
        "What is taken from the reward at the longest length.",
        at_least=0,
        verl="reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",
    )
    leave_out: bool = key(
        False,
        "Leave responses that were cut at the longest length, without an end token, out of groups, losses "
        "and statistics.",
    )


@dataclass(frozen=True, kw_only=True)
class DynamicSampling(Section):
    """Only prompts whose samples get unequal scores are trained on; others are drawn for the rest (DAPO)."""

    scalar: ClassVar[str] = "on"

    on: bool | None = key(
        None,
        "Answer further prompts until batch.prompts of them have samples of unequal scores.",
        shown="false; dapo: true",
        verl="algorithm.filter_groups.enable",
    )
    tries: int = key(
        10,
        "At most so many batches of prompts are answered for one step.",
        at_least=1,
        verl="algorithm.filter_groups.max_num_gen_batches",
    )
    at_limit: Literal["stop", "skip"] = key(
        "stop",
        "When they are not enough: stop the run, or leave the step out and go on.",
    )
    expect_tries: float = key(1.0, "Batches that a step takes on average, for the planner.", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expect_tries > self.tries:
            raise RecipeError(f"expect_tries is {self.expect_tries:g}, more than tries ({self.tries})")


@dataclass(frozen=True, kw_only=True)
class RolloutCorrection(Section):
    """Weights of tokens whose log-prob is another one to the trainer than to the rollout engine.

    A token's ratio is exp(old_log_probs - rollout_log_probs).
    """

    weights: Literal["none", "token", "sequence"] | None = key(
        None,
        "Truncated importance sampling: by each token's ratio, or by its sequence's product of them.",
        shown="none; token where schedule.staleness or rollout.partial makes samples older than the weights",
        verl="algorithm.rollout_correction.rollout_is",
    )
    max_weight: float = key(
        2.0,
        "Weights are truncated here.",
        above=0,
        verl="algorithm.rollout_correction.rollout_is_threshold",
    )
    mask: tuple[float, ...] | None = key(
        None,
        "Lowest and highest ratio of a token that is trained on, as [0.5, 5.0] (IcePop).",
        shown="all",
    )
    reject: tuple[float, ...] | None = key(
        None,
        "Lowest and highest ratio of a sequence that is trained on.",
        shown="all",
        verl="algorithm.rollout_correction.rollout_rs_threshold",
    )
    reject_by: Literal["product", "mean"] = key(
        "product",
        "A sequence's ratio: the product of its tokens', or their geometric mean.",
        verl="algorithm.rollout_correction.rollout_rs",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mask", "reject"):
            bounds = getattr(self, name)
            if bounds is not None and not (len(bounds) == 2 and 0 <= bounds[0] < bounds[1]):
                raise RecipeError(f"{name} is {list(bounds)}, but must be [low, high] with 0 <= low < high")


def _by_name(name: str, default: Any, doc: str, **metadata: Any) -> Any:
    return key(default, doc, shown=shown_by_name(name, default), **metadata)


@dataclass(frozen=True, kw_only=True)
class Algorithm(Section):
    """The estimator and the losses. `name` sets the defaults of the other keys."""

    scalar: ClassVar[str] = "name"

    name: str = key(
        "ppo",
        f"{', '.join(PRESETS)}, or a step that file registers: sets estimator, losses and the roles.",
        verl="algorithm.adv_estimator",
    )
    file: str | None = key(
        None,
        "Python file that registers estimators, policy losses or steps of your own.",
        path=True,
        shown="none",
    )
    estimator: str = _by_name(
        "estimator", "gae", f"Advantages: {', '.join(ESTIMATORS)}, or one that file registers."
    )
    loss: str = _by_name(
        "loss",
        "vanilla",
        f"Policy loss: {', '.join(LOSSES)}, or one that file registers. vanilla is PPO's clipped one.",
        verl=f"{_ACTOR}.policy_loss.loss_mode",
    )
    gamma: float = key(
        1.0,
        "Discount per token (gae, reinforce_plus_plus).",
        at_least=0,
        at_most=1,
        verl="algorithm.gamma",
    )
    lam: float = key(1.0, "GAE's lambda (gae).", at_least=0, at_most=1, verl="algorithm.lam")
    kl: KL = key(KL, "Distance to the reference policy.")
    clip_low: float = _by_name(
        "clip_low",
        0.2,
        "The ratio is clipped below 1 - clip_low.",
        at_least=0,
        at_most=1,
        verl=f"{_ACTOR}.clip_ratio_low",
    )
    clip_high: float = _by_name(
        "clip_high",
        0.2,
        "The ratio is clipped above 1 + clip_high.",
        at_least=0,
        verl=f"{_ACTOR}.clip_ratio_high",
    )
    dual_clip: float | None = _by_name(
        "dual_clip",
        3.0,
        "Bound of the loss where the advantage is negative (vanilla); null: none.",
        above=1,
        verl=f"{_ACTOR}.clip_ratio_c",
    )
    value_clip: float | None = key(
        0.5,
        "Values move at most so far from the old ones (ppo); null: freely.",
        above=0,
        verl="critic.cliprange_value",
    )
    entropy_coef: float = key(0.0, "Weight of the entropy bonus.", at_least=0, verl=f"{_ACTOR}.entropy_coeff")
    loss_agg: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = _by_name(
        "loss_agg",
        "token-mean",
        "How token losses become one number, over the whole mini-batch. seq-mean-token-sum-norm: their sum "
        "divided by norm_tokens.",
        verl=f"{_ACTOR}.loss_agg_mode",
    )
    norm_tokens: int | None = key(
        None,
        "The constant of seq-mean-token-sum-norm.",
        unit="tokens",
        at_least=1,
        shown="lengths.max_response_tokens",
        verl=f"{_ACTOR}.loss_scale_factor",
    )
    norm_adv_by_std: bool = _by_name(
        "norm_adv_by_std",
        True,
        "Divide a group's advantages by its standard deviation (estimator grpo).",
        verl="algorithm.norm_adv_by_std_in_grpo",
    )
    overlong: Overlong = key(Overlong, "Responses near or at the longest length.")
    dynamic_sampling: DynamicSampling = key(
        DynamicSampling, "Train on prompts whose samples get unequal scores alone."
    )
    rollout_correction: RolloutCorrection = key(
        RolloutCorrection, "Where the rollout engine's log-probs are not the trainer's."
    )

    @property
    def step(self) -> str:
        """Name of its step graph: its own, or grpo's where it differs from grpo in arithmetic alone."""
        return self.name if self.name in step_names() else "grpo"
