"""The arithmetic of one algorithm's step on a batch: rewards with KL, advantages, and policy losses."""

from rolemesh.engine.algorithms.correction import Correction, correct, correction_metrics
from rolemesh.engine.algorithms.estimators import (
    AdvantageEstimator,
    Advantages,
    advantage_estimator,
    estimator_names,
    register_estimator,
)
from rolemesh.engine.algorithms.gae import gae_advantage_return
from rolemesh.engine.algorithms.grpo import grpo_outcome_advantage
from rolemesh.engine.algorithms.kl_reward import AdaptiveKLController, FixedKLController, apply_kl_penalty
from rolemesh.engine.algorithms.overlong import SoftOverlong, at_last_token, overlong_penalty, truncated_rows
from rolemesh.engine.algorithms.policy_losses import (
    PolicyLossFn,
    get_policy_loss_fn,
    policy_loss_names,
    register_policy_loss,
)
from rolemesh.engine.algorithms.reinforce_plus_plus import (
    reinforce_plus_plus_advantage,
    reinforce_plus_plus_baseline_advantage,
)
from rolemesh.engine.algorithms.remax import remax_outcome_advantage
from rolemesh.engine.algorithms.rloo import rloo_outcome_advantage
from rolemesh.engine.algorithms.user_file import load_algorithm_file

__all__ = [
    "AdaptiveKLController",
    "AdvantageEstimator",
    "Advantages",
    "Correction",
    "FixedKLController",
    "PolicyLossFn",
    "SoftOverlong",
    "advantage_estimator",
    "apply_kl_penalty",
    "at_last_token",
    "correct",
    "correction_metrics",
    "estimator_names",
    "gae_advantage_return",
    "get_policy_loss_fn",
    "grpo_outcome_advantage",
    "load_algorithm_file",
    "overlong_penalty",
    "policy_loss_names",
    "register_estimator",
    "register_policy_loss",
    "reinforce_plus_plus_advantage",
    "reinforce_plus_plus_baseline_advantage",
    "remax_outcome_advantage",
    "rloo_outcome_advantage",
    "truncated_rows",
]
