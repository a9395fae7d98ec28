"""The arithmetic that RLHF does beyond a plain transformer; each operation a function of tensors."""

from rolemesh.kernels.gae import discounted_returns, gae
from rolemesh.kernels.groups import GroupStatistics, group_statistics
from rolemesh.kernels.kl import KL_KINDS, kl
from rolemesh.kernels.labels import raise_bad_labels
from rolemesh.kernels.linear import linear_log_prob_and_entropy
from rolemesh.kernels.log_prob import log_prob_and_entropy
from rolemesh.kernels.losses import (
    LOSS_AGG_MODES,
    LossDenominators,
    aggregate,
    loss_denominators,
    policy_loss,
    value_loss,
)
from rolemesh.kernels.masked import masked_mean, masked_scale, masked_sum, masked_var, masked_whiten

__all__ = [
    "KL_KINDS",
    "LOSS_AGG_MODES",
    "GroupStatistics",
    "LossDenominators",
    "aggregate",
    "discounted_returns",
    "gae",
    "group_statistics",
    "kl",
    "linear_log_prob_and_entropy",
    "log_prob_and_entropy",
    "loss_denominators",
    "masked_mean",
    "masked_scale",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "policy_loss",
    "raise_bad_labels",
    "value_loss",
]
