"""A role's ranks built on the meta device, and its checkpoint's tensors followed to where they land.

Nothing is read but names and shapes, no memory is taken and no other process is needed, so that a plan for
thousands of devices can be tried on a laptop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from rolemesh.parallel.checkpoint_error import CheckpointError, listed
from rolemesh.parallel.config import transformer_config
from rolemesh.parallel.groups import make_groups
from rolemesh.parallel.model import stage_parameters
from rolemesh.parallel.stage import build_stage
from rolemesh.parallel.weights.families import family_map
from rolemesh.parallel.weights.load import planned_parameters, unknown_names
from rolemesh.parallel.weights.pieces import Buffer, Expert, HfTensor
from rolemesh.parallel.weights.plan import HEAD_NAME, Head, ParameterPlan, hf_tensors, stage_plan
from rolemesh.placement.layout import Layout
from rolemesh.placement.memory import rank_params
from rolemesh.placement.model import ModelShape


@dataclass(frozen=True)
class DryRun:
    """What a dry run found.

    Attributes:
        kinds: ranks that differ in what they hold; one of each was built.
        n_params: fewest and most parameters of a rank, which are what the memory model counts.
        n_tensors: tensors of the checkpoint, each of which lands once.
    """

    kinds: int
    n_params: tuple[int, int]
    n_tensors: int


def dry_run(
    shape: ModelShape,
    layout: Layout,
    stored: Mapping[str, tuple[int, ...]] | None = None,
    head: Head = "lm",
    *,
    new_head: bool = False,
) -> DryRun:
    """Build every distinct rank of `layout` and check that each tensor of the checkpoint lands exactly once.

    `stored` are the checkpoint's tensors; None takes those that the model must have. For a process of its
    own: torch's current device is exchanged meanwhile.

    Raises LayoutError for a layout that does not run, CheckpointError naming tensors that are missing,
    unknown, of another shape, or land nowhere or twice, ArithmeticError where the memory model counts others.
    """
    layout.check(shape)
    tensors = hf_tensors(shape, head)
    if stored is not None:
        _check_stored(shape, tensors, stored, head, new_head)
    _check_landing(shape, layout, head, tensors)
    counts = []
    for rank, plans in _kinds(shape, layout, head).items():
        n_params = _build(shape, layout, rank, plans, head)
        counted = rank_params(shape, layout, layout.coords(rank).pp).total
        if shape.n_labels is None and head == "value":
            counted = n_params
        if n_params != counted:
            raise ArithmeticError(
                f"rank {rank} of {layout} has {n_params:,} parameters, the memory model counts {counted:,}"
            )
        counts.append(n_params)
    return DryRun(len(counts), (min(counts), max(counts)), len(tensors))


def _check_stored(
    shape: ModelShape,
    wanted: Mapping[str, HfTensor],
    stored: Mapping[str, tuple[int, ...]],
    head: Head,
    new_head: bool,
) -> None:
    absent = wanted.keys() - stored.keys() - ({f"{HEAD_NAME}.weight"} if new_head else set())
    if absent:
        raise CheckpointError(f"the checkpoint lacks {listed(absent)}")
    unneeded = {f"{HEAD_NAME}.bias"} if head == "value" else set()
    if unknown := unknown_names(stored.keys() - wanted.keys() - unneeded, family_map(shape)):
        raise CheckpointError(f"the checkpoint has unknown {listed(unknown)}")
    wrong = [
        f"{name} {stored[name]} (the model needs {tensor.shape})"
        for name, tensor in wanted.items()
        if name in stored and stored[name] != tensor.shape
    ]
    if wrong:
        raise CheckpointError(f"the checkpoint has tensors of another shape: {listed(wrong)}")


def _check_landing(shape: ModelShape, layout: Layout, head: Head, tensors: Mapping[str, HfTensor]) -> None:
    """Every number of every tensor is on one rank, copies aside."""
    landed: dict[str, list[tuple[slice, ...]]] = {name: [] for name in tensors}
    for pp_rank, ep_rank, plan in _owners(shape, layout, head):
        if plan.name == "output_layer.weight" and pp_rank > 0 and shape.tied and head == "lm":
            continue  # the last stage's copy of a shared matrix
        if ep_rank > 0 and not isinstance(plan.rule, Expert):
            continue
        for cut in plan.cuts if plan.gathered else plan.cuts[:1]:
            for piece in cut.pieces:
                landed[piece.tensor].append(piece.source)
    if wrong := [name for name, parts in landed.items() if not _covers_once(tensors[name].shape, parts)]:
        raise CheckpointError(f"under {layout} these tensors land nowhere, in part or twice: {listed(wrong)}")


def _covers_once(shape: tuple[int, ...], parts: list[tuple[slice, ...]]) -> bool:
    """Whether the parts, which are cut along one dimension, make up the whole without overlap."""
    cut = {
        dim
        for part in parts
        for dim, (side, size) in enumerate(zip(part, shape, strict=True))
        if (side.start, side.stop) != (0, size)
    }
    if len(cut) > 1 or not parts:
        return False
    dim, at = min(cut, default=0), 0
    for start, stop in sorted((part[dim].start, part[dim].stop) for part in parts):
        if start != at:
            return False
        at = stop
    return at == shape[dim]


def _owners(shape: ModelShape, layout: Layout, head: Head) -> Iterator[tuple[int, int, ParameterPlan]]:
    for pp_rank in range(layout.pp):
        for ep_rank in range(layout.ep):
            for plan in stage_plan(shape, layout, pp_rank, head, ep_rank=ep_rank):
                yield pp_rank, ep_rank, plan


def _kinds(shape: ModelShape, layout: Layout, head: Head) -> dict[int, tuple[ParameterPlan, ...]]:
    """The first rank of each kind, and its plan: ranks are of a kind when they hold the same sizes."""
    seen, found = set(), {}
    for pp_rank in range(layout.pp):
        plans = stage_plan(shape, layout, pp_rank, head)  # other ep ranks: other experts of the same sizes
        for tp_rank in range(layout.tp):
            sizes = tuple((plan.name, plan.cuts[tp_rank].shape) for plan in plans)
            if sizes not in seen:
                seen.add(sizes)
                found[int(layout.grid[pp_rank, 0, 0, tp_rank])] = plans
    return found


def _build(shape: ModelShape, layout: Layout, rank: int, plans: tuple[ParameterPlan, ...], head: Head) -> int:
    """Parameters of the rank's megatron-core modules, whose names and shapes are those of the plan."""
    coords, meta = layout.coords(rank), torch.device("meta")
    with _world_of_fakes(rank, layout.world):
        groups = make_groups(layout, own_only=True)
        config = transformer_config(shape, layout, coords.pp, dtype=torch.bfloat16)
        config.perform_initialization = False  # it would need a CUDA random state
        parts: list[nn.Module] = [
            build_stage(shape, config, groups, layout=layout, head=head, device=meta, part=part)
            for part in range(layout.vpp)
        ]
        parameters = planned_parameters(dict(stage_parameters(parts)), plans, coords)
    buffers = {plan.name for plan in plans if isinstance(plan.rule, Buffer)}
    return sum(tensor.numel() for name, tensor in parameters.items() if name not in buffers)


@contextmanager
def _world_of_fakes(rank: int, world: int) -> Iterator[None]:
    """This process as `rank` of a world without others; new tensors of megatron-core are on meta."""
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    kept = cuda.current_device, cuda.Stream, tensor.cuda
    cuda.current_device = lambda: torch.device("meta")
    cuda.Stream = lambda *_, **__: None  # dispatchers of experts' tokens make one
    tensor.cuda = lambda self, *_, **__: self
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        cuda.current_device, cuda.Stream, tensor.cuda = kept
