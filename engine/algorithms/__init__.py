"""The arithmetic of one algorithm's step on a batch: rewards with KL, and advantages."""

from rolemesh.engine.algorithms.estimators import (
    AdvantageEstimator,
    Advantages,
    advantage_estimator,
    register_estimator,
)
from rolemesh.engine.algorithms.gae import gae_advantage_return
from rolemesh.engine.algorithms.grpo import grpo_outcome_advantage
from rolemesh.engine.algorithms.kl_reward import AdaptiveKLController, FixedKLController, apply_kl_penalty

__all__ = [
    "AdaptiveKLController",
    "AdvantageEstimator",
    "Advantages",
    "FixedKLController",
    "advantage_estimator",
    "apply_kl_penalty",
    "gae_advantage_return",
    "grpo_outcome_advantage",
    "register_estimator",
]
