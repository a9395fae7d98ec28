"""Rollout engines: prompts and weights in, sampled responses and their log-probabilities out.

`rollout.hf` is not imported here: the processes that drive another engine do without transformers.
"""

from rolemesh.engine.rollout.sampling import RolloutError, SamplingOptions

__all__ = ["RolloutError", "SamplingOptions"]
