"""Hugging Face checkpoint to one rank's parameters; each rank reads only its own rows and columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from rolemesh.parallel.checkpoint_error import CheckpointError, listed
from rolemesh.parallel.weights.checkpoint import Checkpoint
from rolemesh.parallel.weights.families import WeightMap, family_map
from rolemesh.parallel.weights.pieces import Cut, HfTensor
from rolemesh.parallel.weights.plan import (
    HEAD_NAME,
    Head,
    ParameterPlan,
    canonical_name,
    hf_tensors,
    rank_plan,
)
from rolemesh.placement.layout import Coords, Layout
from rolemesh.placement.model import ModelShape


@torch.no_grad()
def load_hf(
    model: nn.Module | Mapping[str, Tensor],
    shape: ModelShape,
    layout: Layout,
    coords: Coords,
    path: str | Path,
    *,
    head: Head = "lm",
    head_name: str = HEAD_NAME,
    allow_new_head: bool = False,
) -> None:
    """Fill this rank's parameters from the folder `path`, cast to each parameter's dtype.

    `model` is the stage's megatron-core model or its parameters by name. A value head is read from
    `{head_name}.weight` [1, hidden]; with `allow_new_head` a checkpoint without one gives a head of zeros
    (a critic that starts from a language model: every value is 0 at first).

    Raises CheckpointError naming the tensors that are missing, unexpected or of another shape, and the
    parameters that the plan and the model do not share.
    """
    plans = rank_plan(shape, layout, layout.rank(coords), head, head_name)
    parameters = planned_parameters(model, plans, coords)
    with Checkpoint(path) as checkpoint:
        new_head = head == "value" and allow_new_head and f"{head_name}.weight" not in checkpoint.names
        _check_names(checkpoint, shape, head, head_name, new_head)
        for plan in plans:
            parameter = parameters[plan.name]
            if new_head and plan.tensors[0].name == f"{head_name}.weight":
                parameter.zero_()
                continue
            for tensor in plan.tensors:
                _check_shape(checkpoint, tensor)
            _fill(parameter, plan.cuts[coords.tp], checkpoint)
            if plan.name == "embedding.word_embeddings.weight" and shape.tied and head == "lm":
                _check_tied_copy(checkpoint, shape, plan.cuts[coords.tp])


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What checkpoints hold of a module, by its own names: parameters, and the routers' correction biases."""
    yield from module.named_parameters()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name.endswith(".expert_bias"))


def planned_parameters(
    model: nn.Module | Mapping[str, Tensor], plans: tuple[ParameterPlan, ...], coords: Coords
) -> dict[str, Tensor]:
    """The model's parameters, and buffers of the plan, by canonical name; CheckpointError where they are not
    those of the plan.
    """
    named = dict(stored_tensors(model)) if isinstance(model, nn.Module) else model
    parameters = {canonical_name(name): parameter for name, parameter in named.items()}
    shapes = {plan.name: plan.cuts[coords.tp].shape for plan in plans}
    stage = f"pipeline stage {coords.pp}"
    if absent := shapes.keys() - parameters.keys():
        raise CheckpointError(f"the model of {stage} has no parameter {listed(absent)}")
    if unknown := parameters.keys() - shapes.keys():
        raise CheckpointError(f"no Hugging Face tensor is known for parameter {listed(unknown)} of {stage}")
    for name, shape in shapes.items():
        if tuple(parameters[name].shape) != shape:
            raise CheckpointError(
                f"parameter {name} of {stage}, tp rank {coords.tp} has shape "
                f"{tuple(parameters[name].shape)}, its weights {shape}"
            )
    return parameters


def _check_names(
    checkpoint: Checkpoint, shape: ModelShape, head: Head, head_name: str, new_head: bool
) -> None:
    """Raise unless the checkpoint holds all tensors of the model and no others."""
    weight, bias = f"{head_name}.weight", f"{head_name}.bias"
    lm_head = family_map(shape).lm_head.tensors[0].name
    expected = set(hf_tensors(shape, head, head_name)) - ({weight} if new_head else set())
    unneeded = {bias, lm_head} if head == "value" else {lm_head}
    missing = expected - checkpoint.names
    unexpected = unknown_names(checkpoint.names - expected - unneeded, family_map(shape))
    if head == "value" and missing == {weight}:
        raise CheckpointError(_no_head(checkpoint, weight, unexpected))
    if missing or unexpected:
        lacks = f"lacks {listed(missing)}" if missing else ""
        unknown = f"has unknown {listed(unexpected)}" if unexpected else ""
        raise CheckpointError(f"checkpoint {checkpoint.path} {' and '.join(filter(None, (lacks, unknown)))}")
    if head == "value" and bias in checkpoint.names:
        values = checkpoint.read(bias, (slice(None),))
        if values.any():
            raise CheckpointError(
                f"{bias} of {checkpoint.path} is {values.tolist()}: a head with a bias is not supported"
            )


def unknown_names(names: Iterable[str], weights: WeightMap) -> set[str]:
    """Those of the names that follow from nothing in the configuration."""
    return {name for name in names if not re.fullmatch(weights.derived, name)}


def _no_head(checkpoint: Checkpoint, weight: str, unexpected: set[str]) -> str:
    others = {name for name in unexpected if name.endswith(".weight")}
    hint = f"; it has {listed(others)}: set head_name if that is the head" if others else ""
    return (
        f"checkpoint {checkpoint.path} has no value head {weight}{hint}. A reward model needs a trained "
        "head; a critic may start from zeros with allow_new_head"
    )


def _check_shape(checkpoint: Checkpoint, tensor: HfTensor) -> None:
    found = checkpoint.shape(tensor.name)
    if found != tensor.shape:
        raise CheckpointError(
            f"{tensor.name} of {checkpoint.path} has shape {found}, the model needs {tensor.shape}"
        )


def _fill(parameter: Tensor, cut: Cut, checkpoint: Checkpoint) -> None:
    if sum(_numel(piece.target) for piece in cut.pieces) < parameter.numel():
        parameter.zero_()
    for piece in cut.pieces:
        parameter[piece.target].copy_(checkpoint.read(piece.tensor, piece.source))


def _numel(part: tuple[slice, ...]) -> int:
    return torch.Size(side.stop - side.start for side in part).numel()


def _check_tied_copy(checkpoint: Checkpoint, shape: ModelShape, cut: Cut) -> None:
    """A tied checkpoint may hold the shared matrix twice; raise when the two differ in this rank's rows."""
    weights = family_map(shape)
    name, embedding = weights.lm_head.tensors[0].name, weights.embedding.tensors[0].name
    if name not in checkpoint.names:
        return
    for piece in cut.pieces:
        if not checkpoint.read(name, piece.source).equal(checkpoint.read(embedding, piece.source)):
            raise CheckpointError(
                f"{checkpoint.path} says tie_word_embeddings, but its {name} differs from {embedding}"
            )
