"""ReMax: the baseline is the reward of each prompt's greedy answer (Li et al., 2024, arXiv:2310.10505)."""

from __future__ import annotations

from dataclasses import replace

from rolemesh.placement.graph import Operation, StepGraph, Takes
from rolemesh.placement.steps import operations as ops
from rolemesh.placement.steps.registry import register_step

BASELINE = "baseline_"  # before the names of the greedy answer's columns
ANSWER = frozenset(BASELINE + column for column in ops.SEQUENCES)

GENERATE_BASELINE = Operation(
    "generate_baseline",
    role="rollout",
    kind="generate",
    method="generate_baseline",
    reads=frozenset({"prompts", "attention_mask", "uid"}),
    writes=ANSWER,
    state_reads=frozenset({"rollout.weights"}),
    per="prompt",
)


def reward_baseline(kind: ops.RewardKind) -> Operation:
    """The whole reward of each greedy answer, by what scores the samples."""
    scored = ops.reward(kind)
    writes = {"reward_baselines"} | ({BASELINE + "dropped"} if ops.may_drop(kind) else set())
    return replace(
        scored,
        name="reward_baseline",
        method="compute_baseline",
        reads=scored.reads - ops.SEQUENCES | ANSWER | {"uid"},
        writes=frozenset(writes),
        takes="batch",
        per="prompt",
    )


@register_step("remax")
def remax(
    *,
    reference: bool = False,
    reward: ops.RewardKind = "function",
    kl_in: ops.KlIn | None = "loss",
    reward_takes: Takes = "rows",
    ref_takes: Takes = "batch",
) -> StepGraph:
    """One ReMax step: a second, greedy generation, and its score."""
    baseline = reward_baseline(reward)
    return StepGraph(
        "remax",
        (
            ops.GENERATE,
            GENERATE_BASELINE,
            ops.OLD_LOG_PROB,
            *ops.reference_operations(reference, kl_in, ref_takes),
            ops.reward(reward, reward_takes),
            baseline,
            ops.advantage("actor", baseline.writes, kl_in, reward),
            ops.update_actor(kl_in),
            ops.SYNC_WEIGHTS,
        ),
        inputs=ops.INPUTS,
    )
