"""Rollout engines: prompts and weights in, sampled responses and their log-probabilities out."""

from rolemesh.engine.rollout.hf import HFRollout
from rolemesh.engine.rollout.sampling import RolloutError, SamplingOptions

__all__ = ["HFRollout", "RolloutError", "SamplingOptions"]
