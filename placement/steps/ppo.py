"""PPO with a critic (Schulman et al., 2017, arXiv:1707.06347), as an RLHF step."""

from __future__ import annotations

from rolemesh.placement.graph import Operation, StepGraph, Takes
from rolemesh.placement.steps import operations as ops
from rolemesh.placement.steps.registry import register_step

VALUES = Operation(
    "values",
    role="critic",
    kind="infer",
    method="compute_values",
    reads=ops.SEQUENCES,
    writes=frozenset({"values"}),
    state_reads=frozenset({"critic.weights"}),
)
UPDATE_CRITIC = Operation(
    "update_critic",
    role="critic",
    kind="train",
    method="update_critic",
    reads=ops.SEQUENCES | {"values", "returns"},
    state_reads=frozenset({"critic.weights"}),
    state_writes=frozenset({"critic.weights"}),
)


@register_step("ppo")
def ppo(
    *,
    reference: bool = False,
    reward: ops.RewardKind = "model",
    kl_in: ops.KlIn | None = "reward",
    reward_takes: Takes = "rows",
    ref_takes: Takes = "batch",
) -> StepGraph:
    """One PPO step; the reference runs when asked for or when a KL term needs it."""
    return StepGraph(
        "ppo",
        (
            ops.GENERATE,
            ops.OLD_LOG_PROB,
            *ops.reference_operations(reference, kl_in, ref_takes),
            VALUES,
            ops.reward(reward, reward_takes),
            ops.advantage("critic", frozenset({"values"}), kl_in, reward),
            UPDATE_CRITIC,
            ops.update_actor(kl_in),
            ops.SYNC_WEIGHTS,
        ),
        inputs=ops.INPUTS,
    )
