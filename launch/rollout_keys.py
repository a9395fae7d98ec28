"""The recipe's section `rollout`: which engine generates, how it samples and what it may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rolemesh.launch.fields import Section, key
from rolemesh.launch.roles import LayoutPins, layout_key, worker_key

VLLM_KEYS = ("memory_share", "max_seqs", "eager", "partial", "partial_share", "engine_restarts")
"""Keys that mean something to vLLM only."""


@dataclass(frozen=True, kw_only=True)
class Rollout(Section):
    """Generation. The built-in engine `hf` holds a whole copy of the actor in each process; `vllm` cuts one
    over the ranks of a replica.
    """

    scalar: ClassVar[str] = "engine"

    engine: Literal["hf", "vllm"] = key(
        "hf",
        "hf: transformers' generate in the role's own processes; vllm: vLLM in processes beside them, one "
        "for each replica. Both are fed from the actor's weights.",
        verl="actor_rollout_ref.rollout.name",
    )
    layout: LayoutPins = layout_key("actor_rollout_ref.rollout")
    temperature: float = key(
        1.0,
        "Sampling temperature; log-probs use the same.",
        above=0,
        verl="actor_rollout_ref.rollout.temperature",
    )
    top_p: float = key(1.0, "Nucleus; 1: off.", above=0, at_most=1, verl="actor_rollout_ref.rollout.top_p")
    top_k: int = key(
        0, "Sample among so many tokens; 0: off.", at_least=0, verl="actor_rollout_ref.rollout.top_k"
    )
    max_params: int = key(
        2_000_000_000, "Largest model that the hf engine accepts.", unit="parameters", at_least=1
    )
    max_batch_tokens: int = key(
        131072,
        "Tokens (rows x prompt and response) that one engine generates at a time: bounds its KV cache.",
        unit="tokens",
        at_least=1,
    )
    memory_share: float | None = key(
        None,
        "Part of each device's memory that a vLLM engine may fill; its KV cache takes what the weights leave "
        "of that.",
        above=0,
        at_most=0.95,
        shown="a KV cache of max_batch_tokens",
        verl="actor_rollout_ref.rollout.gpu_memory_utilization",
    )
    max_seqs: int = key(
        256,
        "Responses that a vLLM engine writes at a time.",
        unit="samples",
        at_least=1,
        verl="actor_rollout_ref.rollout.max_num_seqs",
    )
    eager: bool = key(
        False,
        "vLLM without CUDA graphs and compiler; on CPUs it always runs so.",
        verl="actor_rollout_ref.rollout.enforce_eager",
    )
    partial: bool = key(
        False,
        "A vLLM step trains on the prompts whose samples are all finished first; the others are written on "
        "in the next step, by its weights.",
    )
    partial_share: float = key(
        0.8, "Part of the prompts in flight that a step waits for (partial).", above=0, at_most=1
    )
    agent: str | None = key(
        None,
        "A class that answers each turn of the model, `file.py:Class`, for several turns and tools.",
        path=True,
        shown="none: a response is one turn",
    )
    agent_turns: int | None = key(
        None,
        "Most turns of the model in a conversation (agent).",
        unit="turns",
        at_least=1,
        shown="as many as fit",
        verl="actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
    )
    agent_timeout_s: float = key(
        60.0, "Limit of one step of the agent; a longer one stops the run (agent).", unit="s", above=0
    )
    worker: str | None = worker_key("RolloutWorker (hf), or VLLMRolloutWorker (vllm)")
    engine_restarts: int = key(
        3, "How often one operation may replace a vLLM engine that died.", unit="restarts", at_least=0
    )
