"""GRPO: advantages from a group of samples per prompt, no critic (Shao et al., 2024, arXiv:2402.03300)."""

from __future__ import annotations

from rolemesh.placement.graph import StepGraph, Takes
from rolemesh.placement.steps import operations as ops
from rolemesh.placement.steps.registry import register_step


@register_step("grpo")
def grpo(
    *,
    reference: bool = False,
    reward: ops.RewardKind = "function",
    kl_in: ops.KlIn | None = "loss",
    reward_takes: Takes = "rows",
    ref_takes: Takes = "batch",
    dynamic_sampling: bool = False,
) -> StepGraph:
    """One GRPO step; `uid` tells which samples answer the same prompt.

    With `dynamic_sampling` (Yu et al., 2025, arXiv:2503.14476, eq. 11) prompts are answered and scored again
    and again until enough of them have samples of unequal scores.
    """
    return StepGraph(
        "grpo",
        (
            ops.GENERATE,
            ops.OLD_LOG_PROB,
            *ops.reference_operations(reference, kl_in, ref_takes),
            ops.reward(reward, reward_takes),
            ops.advantage("actor", frozenset({"uid"}), kl_in, reward),
            ops.update_actor(kl_in),
            ops.SYNC_WEIGHTS,
        ),
        inputs=ops.INPUTS,
        refill=("generate", "reward") if dynamic_sampling else (),
    )
