"""verl's keys of estimator, losses, KL, long responses and sampling as our section `algorithm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rolemesh.placement.importers.settings import ForeignConfigError, Settings

_ACTOR = "actor_rollout_ref.actor"
ESTIMATORS: Mapping[str, str] = {  # ours for verl's `algorithm.adv_estimator`
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
}
_IN_GROUPS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")
LOSSES = ("vanilla", "gspo", "cispo")
_KL_KINDS = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
}  # fmt: skip
_AGGREGATES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
OVERLONG = tuple(
    f"{prefix}.{part}"
    for prefix in ("reward_model", "reward")
    for part in ("overlong_buffer", "reward_kwargs.overlong_buffer_cfg")
)


def name_of(said: Settings) -> str:
    """Our name of the algorithm. Raises ForeignConfigError for an estimator that is not here."""
    estimator = str(said.take("algorithm.adv_estimator", "gae"))
    if estimator not in ESTIMATORS:
        raise ForeignConfigError(
            f"algorithm.adv_estimator is {estimator!r}, which is not in this version (there are: "
            f"{', '.join(ESTIMATORS)}): give another one, such as algorithm.adv_estimator=grpo"
        )
    name, loss = ESTIMATORS[estimator], _loss(said)
    if name != "grpo":
        return name
    if loss != "vanilla":
        return loss
    if said.flag("algorithm.filter_groups.enable"):
        return "dapo"
    summed = said.take(f"{_ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm"
    return "dr_grpo" if summed and not said.flag("algorithm.norm_adv_by_std_in_grpo", True) else name


def _loss(said: Settings) -> str:
    key = f"{_ACTOR}.policy_loss.loss_mode"
    loss = str(said.take(key, "vanilla"))
    if loss in LOSSES:
        return loss
    said.ignore(key, f"not in this version: vanilla stands for it (there are: {', '.join(LOSSES)})")
    return "vanilla"


def algorithm_keys(said: Settings, name: str, kl: Mapping[str, Any]) -> dict[str, Any]:
    """The section `algorithm`; every number is written, so that no default of the name takes its place."""
    both, loss = said.number(f"{_ACTOR}.clip_ratio", 0.2), _loss(said)
    keys: dict[str, Any] = {"name": name, "loss": loss if loss not in ("vanilla", name) else None}
    if name in ("ppo", "reinforce_plus_plus"):
        keys["gamma"] = said.number("algorithm.gamma", 1.0)
    else:
        said.ignore("algorithm.gamma", f"{name} discounts nothing", harmless=True)
    if name == "ppo":
        keys["lam"] = said.number("algorithm.lam", 1.0)
        keys["value_clip"] = said.number("critic.cliprange_value", 0.5)
    else:
        said.ignore("algorithm.lam", "counts only with a critic", harmless=True)
    std = "algorithm.norm_adv_by_std_in_grpo"
    if name in _IN_GROUPS:
        keys["norm_adv_by_std"] = said.flag(std, True)
    else:
        said.ignore(std, f"{name} divides by no group's standard deviation", harmless=True)
    keys |= {
        "kl": dict(kl) or {"in": "none"},
        "clip_low": said.number(f"{_ACTOR}.clip_ratio_low", both),
        "clip_high": said.number(f"{_ACTOR}.clip_ratio_high", both),
        "entropy_coef": said.number(f"{_ACTOR}.entropy_coeff", 0.0),
    }
    if loss == "vanilla":
        keys["dual_clip"] = said.number(f"{_ACTOR}.clip_ratio_c", 3.0)
    else:
        said.ignore(f"{_ACTOR}.clip_ratio_c", f"{loss} has no dual clip", harmless=True)
    return keys | _aggregate(said, loss) | _overlong(said, name) | _sampling(said, name) | _correction(said)


def _aggregate(said: Settings, loss: str) -> dict[str, Any]:
    key, scale = f"{_ACTOR}.loss_agg_mode", f"{_ACTOR}.loss_scale_factor"
    mode = said.take(key, "token-mean")
    if loss == "gspo":
        harmless = mode == "seq-mean-token-mean"
        said.ignore(key, "gspo is a mean over sequences of their tokens' mean", harmless=harmless)
        mode = None
    elif mode not in _AGGREGATES:
        said.ignore(
            key, f"not in this version: token-mean stands for it (there are: {', '.join(_AGGREGATES)})"
        )
        mode = "token-mean"
    tokens = said.count(scale) if mode == "seq-mean-token-sum-norm" else 0
    if not tokens:
        said.ignore(scale, "counts only with seq-mean-token-sum-norm", harmless=True)
    return {"loss_agg": mode, "norm_tokens": tokens or None}


def _overlong(said: Settings, name: str) -> dict[str, Any]:
    """The penalty near the longest response, under any of the names that verl has had for it."""
    found = {}
    for prefix in OVERLONG:
        if said.flag(f"{prefix}.enable") and said.count(f"{prefix}.len"):
            found = {
                "buffer_tokens": said.count(f"{prefix}.len"),
                "penalty": said.number(f"{prefix}.penalty_factor", 1.0),
            }
        for part in ("len", "penalty_factor") if not found else ():
            said.ignore(f"{prefix}.{part}", "overlong_buffer is off", harmless=True)
    if not found and name == "dapo":
        found = {"buffer_tokens": 0}  # the name alone asks for one
    return {"overlong": found}


def _sampling(said: Settings, name: str) -> dict[str, Any]:
    prefix = "algorithm.filter_groups"
    on = said.flag(f"{prefix}.enable")
    if name not in _IN_GROUPS and name != "rloo":
        said.ignore(f"{prefix}.enable", f"{name} does not refill a batch", harmless=not on)
        on = False
    if not on:
        said.ignore(f"{prefix}.max_num_gen_batches", "filter_groups is off", harmless=True)
        said.ignore(f"{prefix}.metric", "filter_groups is off", harmless=True)
        return {}
    said.ignore(f"{prefix}.metric", "groups are compared by their scores", harmless=False)
    tries = said.count(f"{prefix}.max_num_gen_batches")
    if tries < 1:
        said.ignore(f"{prefix}.max_num_gen_batches", "there is a limit here (dynamic_sampling.tries)")
    return {"dynamic_sampling": {"on": True, "tries": tries if tries > 0 else None}}


def _correction(said: Settings) -> dict[str, Any]:
    """Weights for the rollout's log-probs: the newer section, or the older cap alone."""
    prefix, cap = "algorithm.rollout_correction", f"{_ACTOR}.tis_imp_ratio_cap"
    kind = said.take(f"{prefix}.rollout_is")
    if kind in ("token", "sequence"):
        weights = {"weights": kind, "max_weight": said.number(f"{prefix}.rollout_is_threshold", 2.0)}
        said.ignore(cap, "algorithm.rollout_correction says it", harmless=True)
        return {"rollout_correction": weights}
    if kind is not None:
        said.ignore(f"{prefix}.rollout_is", "not in this version (there are: token, sequence)")
    said.ignore(f"{prefix}.rollout_is_threshold", "no weights are asked for", harmless=True)
    limit = said.number(cap, -1.0)
    return {"rollout_correction": {"weights": "token", "max_weight": limit}} if limit > 0 else {}


def kl_keys(said: Settings) -> dict[str, Any]:
    """The KL term; empty where there is none, and so no reference."""
    in_reward = said.flag("algorithm.use_kl_in_reward")
    in_loss = said.flag(f"{_ACTOR}.use_kl_loss")
    reward_names, loss_names = (
        ("algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef"),
        (f"{_ACTOR}.kl_loss_type", f"{_ACTOR}.kl_loss_coef"),
    )
    for names, used in ((reward_names, in_reward), (loss_names, in_loss and not in_reward)):
        for name in names if not used else ():
            both = in_reward and in_loss
            said.ignore(
                name, "one KL term, in the reward" if both else "this KL term is off", harmless=not both
            )
    if not in_reward:
        for name in ("type", "target_kl", "horizon"):
            said.ignore(f"algorithm.kl_ctrl.{name}", "no KL term in the reward", harmless=True)
    if not (in_reward or in_loss):
        return {}
    kind_name, coef_name = reward_names if in_reward else loss_names
    kind = str(said.take(kind_name, "kl" if in_reward else "low_var_kl")).rstrip("+")
    if kind not in _KL_KINDS:
        said.ignore(kind_name, "not in this version: k1 stands for it")
    kl = {
        "in": "reward" if in_reward else "loss",
        "kind": _KL_KINDS.get(kind, "k1"),
        "coef": said.number(coef_name, 0.001),
    }
    if in_reward and said.take("algorithm.kl_ctrl.type", "fixed") == "adaptive":
        kl["target"] = said.number("algorithm.kl_ctrl.target_kl", 0.1)
        kl["horizon"] = said.number("algorithm.kl_ctrl.horizon", 10000)
    else:
        for name in ("target_kl", "horizon"):
            said.ignore(f"algorithm.kl_ctrl.{name}", "the weight of the KL is fixed", harmless=True)
    return kl
