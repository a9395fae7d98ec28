"""Operations that several algorithms share. Column names are verl's."""

from __future__ import annotations

from typing import Literal

from rolemesh.placement.graph import GraphError, Operation

RewardKind = Literal["model", "function"]
KlIn = Literal["reward", "loss"]

TOKENS = frozenset({"input_ids", "attention_mask", "position_ids"})
SEQUENCES = TOKENS | {"responses", "response_mask"}
INPUTS = TOKENS | {"row_ids", "uid", "raw_prompt", "data_source", "reward_model", "extra_info"}

GENERATE = Operation(
    "generate",
    role="rollout",
    kind="generate",
    method="generate_sequences",
    reads=TOKENS | {"row_ids"},
    writes=SEQUENCES | {"prompts", "rollout_log_probs"},
    state_reads=frozenset({"rollout.weights"}),
)
OLD_LOG_PROB = Operation(
    "old_log_prob",
    role="actor",
    kind="infer",
    method="compute_log_prob",
    reads=SEQUENCES,
    writes=frozenset({"old_log_probs"}),
    state_reads=frozenset({"actor.weights"}),
)
REF_LOG_PROB = Operation(
    "ref_log_prob",
    role="ref",
    kind="infer",
    method="compute_ref_log_prob",
    reads=SEQUENCES,
    writes=frozenset({"ref_log_prob"}),
    state_reads=frozenset({"ref.weights"}),
)
SYNC_WEIGHTS = Operation(
    "sync_weights",
    role="rollout",
    kind="transfer",
    method="load_weights",
    state_reads=frozenset({"actor.weights"}),
    state_writes=frozenset({"rollout.weights"}),
)


def reward(kind: RewardKind) -> Operation:
    """Scores at the last response token, from a reward model or from a Python function."""
    writes = frozenset({"rm_scores"})
    if kind == "model":
        return Operation(
            "reward", "reward", "infer", "compute_rm_score", SEQUENCES, writes, frozenset({"reward.weights"})
        )
    if kind == "function":
        reads = SEQUENCES | {"prompts", "data_source", "reward_model", "extra_info"}
        return Operation("reward", "reward", "infer", "compute_score", reads, writes)
    raise GraphError(f"reward is 'model' or 'function', got {kind!r}")


def advantage(role: str, reads: frozenset[str], kl_in: KlIn | None) -> Operation:
    """Advantages and returns, on the workers of `role`, with the KL penalty where it goes into the reward."""
    return Operation(
        "advantage",
        role=role,
        kind="infer",
        method="compute_advantage",
        reads=reads
        | {"rm_scores", "responses", "response_mask", "attention_mask", "old_log_probs", "rollout_log_probs"}
        | ({"ref_log_prob"} if kl_in == "reward" else set()),
        writes=frozenset({"token_level_scores", "token_level_rewards", "advantages", "returns"}),
    )


def update_actor(kl_in: KlIn | None) -> Operation:
    """The policy update, with the KL term where it goes into the loss."""
    return Operation(
        "update_actor",
        role="actor",
        kind="train",
        method="update_actor",
        reads=SEQUENCES | {"old_log_probs", "advantages"} | ({"ref_log_prob"} if kl_in == "loss" else set()),
        state_reads=frozenset({"actor.weights"}),
        state_writes=frozenset({"actor.weights"}),
    )


def reference_operations(reference: bool, kl_in: KlIn | None) -> tuple[Operation, ...]:
    """The reference's log-probs, when they were asked for or a KL needs them."""
    if kl_in not in ("reward", "loss", None):
        raise GraphError(f"kl_in is 'reward', 'loss' or None, got {kl_in!r}")
    return (REF_LOG_PROB,) if reference or kl_in else ()
