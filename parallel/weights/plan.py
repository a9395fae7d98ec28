"""Which Hugging Face tensors make which parameter on which rank: computed from sizes alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from rolemesh.parallel.weights.families import family_map
from rolemesh.parallel.weights.pieces import Cut, Expert, HfTensor, Replicated, Rule
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape

Head = Literal["lm", "value"]
"""What follows the final norm: logits over the vocabulary, or one number per token."""

HEAD_NAME = "score"
"""The module that transformers' classification models call their head."""

_ENGINE_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}  # Transformer Engine fuses these norms into the layer after them


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter of a stage: its canonical name, how it is made, and each tp rank's cut."""

    name: str
    rule: Rule
    cuts: tuple[Cut, ...]

    @property
    def tensors(self) -> tuple[HfTensor, ...]:
        """The whole Hugging Face tensors that the parameter is made of."""
        return self.rule.tensors

    @property
    def gathered(self) -> bool:
        """Whether the whole tensors need the parts of several tp ranks."""
        return len(self.cuts) > 1 and not self.rule.whole


@dataclass(frozen=True)
class Owner:
    """Where a whole Hugging Face tensor comes from: a parameter of a stage (an expert's: of `ep_rank`)."""

    tensor: HfTensor
    pp_rank: int
    parameter: str
    ep_rank: int = 0


def canonical_name(name: str) -> str:
    """A megatron-core parameter's name without wrappers' prefixes, as it is without Transformer Engine."""
    name = re.sub(r"^(module\.)+", "", name)
    for fused, plain in _ENGINE_NAMES.items():
        name = name.replace(fused, plain)
    return name


def stage_plan(
    shape: ModelShape,
    layout: Layout,
    pp_rank: int,
    head: Head = "lm",
    head_name: str = HEAD_NAME,
    *,
    ep_rank: int = 0,
) -> tuple[ParameterPlan, ...]:
    """Every parameter of a pipeline stage's ranks that have the experts of `ep_rank`, in the model's order.

    Routed experts are counted from the rank's first, as megatron-core counts them. A tied model has its
    shared matrix on the first stage, and again as `output_layer` on the last one when that is another stage.
    """
    return tuple(
        ParameterPlan(name, rule, tuple(rule.cut(layout.tp, rank) for rank in range(layout.tp)))
        for name, rule in _stage_rules(shape, layout, pp_rank, ep_rank, head, head_name)
    )


def rank_plan(
    shape: ModelShape, layout: Layout, rank: int, head: Head = "lm", head_name: str = HEAD_NAME
) -> tuple[ParameterPlan, ...]:
    """Every parameter of one rank; its own parts are the cuts at its tp rank."""
    expert = layout.expert_coords(rank)
    return stage_plan(shape, layout, expert.pp, head, head_name, ep_rank=expert.ep)


def hf_tensors(shape: ModelShape, head: Head = "lm", head_name: str = HEAD_NAME) -> dict[str, HfTensor]:
    """Every tensor that a checkpoint of this model holds, by name, in the model's order."""
    whole = stage_plan(shape, Layout(), 0, head, head_name)
    return {tensor.name: tensor for plan in whole for tensor in plan.tensors}


def export_order(
    shape: ModelShape, layout: Layout, head: Head = "lm"
) -> Iterator[tuple[int, int, ParameterPlan]]:
    """(stage, ep rank, parameter) of everything to export, stages in order, and in each its ep ranks.

    A shared matrix comes from the first stage, and what is no expert from ep rank 0.
    """
    exported: set[str] = set()
    for pp_rank in range(layout.pp):
        for ep_rank in range(layout.ep):
            for plan in stage_plan(shape, layout, pp_rank, head, ep_rank=ep_rank):
                if ep_rank > 0 and not isinstance(plan.rule, Expert):
                    continue
                names = {tensor.name for tensor in plan.tensors}
                if not names <= exported:
                    exported |= names
                    yield pp_rank, ep_rank, plan


def export_plan(shape: ModelShape, layout: Layout, head: Head = "lm") -> dict[str, Owner]:
    """Who owns each Hugging Face tensor, by its name, in the order of export."""
    return {
        tensor.name: Owner(tensor, pp_rank, plan.name, ep_rank)
        for pp_rank, ep_rank, plan in export_order(shape, layout, head)
        for tensor in plan.tensors
    }


def _stage_rules(
    shape: ModelShape, layout: Layout, pp_rank: int, ep_rank: int, head: Head, head_name: str
) -> Iterator[tuple[str, Rule]]:
    weights = family_map(shape)
    layers = [layer for part in layout.stages(shape.n_layers)[pp_rank] for layer in part]
    n_experts = shape.moe.n // layout.ep if shape.moe else 0
    if pp_rank == 0:
        yield "embedding.word_embeddings.weight", weights.embedding
    for n, layer in enumerate(layers):
        for name, rule in weights.layer(layer).items():
            if not isinstance(rule, Expert):
                yield f"decoder.layers.{n}.{name}", rule
            elif rule.index // n_experts == ep_rank:
                local = name.replace(f".{rule.index}.", f".{rule.index % n_experts}.", 1)
                yield f"decoder.layers.{n}.{local}", replace(rule, cut_over_tp=layout.etp > 1)
    if pp_rank < layout.pp - 1:
        return
    yield "decoder.final_layernorm.weight", weights.final_norm
    if head == "value":
        yield "output_layer.weight", Replicated(HfTensor(f"{head_name}.weight", (1, shape.hidden)))
    elif not shape.tied:
        yield "output_layer.weight", weights.lm_head
    elif layout.pp > 1:
        yield "output_layer.weight", weights.embedding
