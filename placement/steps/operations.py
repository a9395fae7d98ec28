"""Operations that several algorithms share. Column names are verl's."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from rolemesh.placement.graph import GraphError, Operation, StepGraph, Takes

RewardKind = Literal["model", "function", "remote", "judge", "composite"]
KlIn = Literal["reward", "loss"]

TOKENS = frozenset({"input_ids", "attention_mask", "position_ids"})
SEQUENCES = TOKENS | {"responses", "response_mask"}
FIELDS = frozenset({"raw_prompt", "data_source", "reward_model", "extra_info"})
INPUTS = TOKENS | FIELDS | {"row_ids", "uid"}
TALKS = frozenset({"num_turns", "tool_s"})

GENERATE = Operation(
    "generate",
    role="rollout",
    kind="generate",
    method="generate_sequences",
    reads=TOKENS | {"row_ids"},
    writes=SEQUENCES | {"prompts", "rollout_log_probs", "weight_versions"},
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


def reward(kind: RewardKind, takes: Takes = "rows") -> Operation:
    """Scores at the last response token, from a placed model or from what scores text.

    A service may fail on samples: the column `dropped` tells which are to be left out of the step then.
    What scores text starts on finished samples while others are generated; `takes` "groups" is for what
    compares the samples of a prompt. A model has devices of its own to fill: it takes the whole batch.
    """
    writes = frozenset({"rm_scores"}) | ({"dropped"} if may_drop(kind) else set())
    if kind == "model":
        return Operation(
            "reward", "reward", "infer", "compute_rm_score", SEQUENCES, writes, frozenset({"reward.weights"})
        )
    if kind in get_args(RewardKind):
        reads = SEQUENCES | {"prompts", "raw_prompt", "data_source", "reward_model", "extra_info"}
        reads |= {"uid"} if takes == "groups" or may_drop(kind) else set()
        return Operation("reward", "reward", "infer", "compute_score", reads, writes, takes=takes)
    raise GraphError(f"reward is one of {', '.join(get_args(RewardKind))}, got {kind!r}")


def may_drop(kind: RewardKind) -> bool:
    """Whether rewards of this kind may leave rows out of the step."""
    return kind in ("remote", "judge", "composite")


def advantage(role: str, reads: frozenset[str], kl_in: KlIn | None, reward: RewardKind) -> Operation:
    """Advantages and returns, on the workers of `role`, with the KL penalty where it goes into the reward."""
    return Operation(
        "advantage",
        role=role,
        kind="infer",
        method="compute_advantage",
        reads=reads
        | {"rm_scores", "responses", "response_mask", "attention_mask", "old_log_probs"}
        | {"rollout_log_probs", "weight_versions"}
        | ({"ref_log_prob"} if kl_in == "reward" else set())
        | ({"uid", "dropped"} if may_drop(reward) else set()),
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


def reference_operations(
    reference: bool, kl_in: KlIn | None, takes: Takes = "batch"
) -> tuple[Operation, ...]:
    """The reference's log-probs, when they were asked for or a KL needs them.

    `takes` "rows" is for one apart from the rollout: it scores finished samples while others are generated.
    """
    if kl_in not in ("reward", "loss", None):
        raise GraphError(f"kl_in is 'reward', 'loss' or None, got {kl_in!r}")
    return (replace(REF_LOG_PROB, takes=takes),) if reference or kl_in else ()


def with_agent(graph: StepGraph) -> StepGraph:
    """The step whose responses are conversations with an agent: it gets what the data set says of a row, and
    tells the model's turns and its own seconds.
    """

    def of_agent(operation: Operation) -> Operation:
        if operation.name == GENERATE.name:
            return replace(operation, reads=operation.reads | FIELDS, writes=operation.writes | TALKS)
        if operation.method in ("compute_score", "compute_advantage"):
            return replace(operation, reads=operation.reads | TALKS)
        return operation

    return replace(graph, operations=tuple(of_agent(operation) for operation in graph.operations))


def reference_of_actor(graph: StepGraph) -> StepGraph:
    """The step whose reference is the actor without its adapters: no role of its own."""

    def of_actor(operation: Operation) -> Operation:
        if operation.name != REF_LOG_PROB.name:
            return operation
        return replace(operation, role="actor", state_reads=frozenset({"actor.weights"}))

    return replace(graph, operations=tuple(of_actor(operation) for operation in graph.operations))
