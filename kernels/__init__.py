"""The arithmetic that RLHF does beyond a plain transformer; each operation a function of tensors."""

from rolemesh.kernels.log_prob import log_prob_and_entropy
from rolemesh.kernels.masked import masked_mean, masked_scale, masked_sum, masked_var, masked_whiten

__all__ = [
    "log_prob_and_entropy",
    "masked_mean",
    "masked_scale",
    "masked_sum",
    "masked_var",
    "masked_whiten",
]
