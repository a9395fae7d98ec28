"""One role's parameters to whole Hugging Face tensors, one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rolemesh.parallel.weights.load import planned_parameters
from rolemesh.parallel.weights.pieces import Expert
from rolemesh.parallel.weights.plan import Head, ParameterPlan, export_order, stage_plan
from rolemesh.placement.layout import Coords, Layout
from rolemesh.placement.model import ModelShape

if TYPE_CHECKING:  # who only plans weights need not load megatron-core
    from megatron.core.process_groups_config import ProcessGroupCollection


@torch.no_grad()
def export_hf(
    model: nn.Module | Mapping[str, Tensor],
    shape: ModelShape,
    layout: Layout,
    groups: ProcessGroupCollection,
    *,
    head: Head = "lm",
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, new whole tensor) of the stage's tensors on rank 0 of tp, cp and dp, of routed
    experts on the first rank that has them; else nothing.

    Every rank must exhaust the iterator: tp ranks gather each parameter in turn, and no rank holds more than
    one parameter beside its own. The ranks' tensors together are the whole model.
    A shared matrix comes once, from the first stage; a value head is named as transformers names it.
    """
    coords = _coords(groups)
    expert = layout.expert_coords(layout.rank(coords))
    plans = stage_plan(shape, layout, coords.pp, head, ep_rank=expert.ep)
    parameters = planned_parameters(model, plans, coords)
    for pp_rank, ep_rank, plan in export_order(shape, layout, head):
        if pp_rank != coords.pp:
            continue
        if isinstance(plan.rule, Expert):
            mine, gives = (ep_rank, 0) == (expert.ep, expert.edp), expert.etp == 0
        else:
            mine, gives = (coords.dp, coords.cp) == (0, 0), coords.tp == 0
        if mine and (gives or plan.gathered):
            parts = _gather(parameters[plan.name], plan, groups.tp)
            if gives:
                yield from _assemble(plan, parts).items()


def _coords(groups: ProcessGroupCollection) -> Coords:
    return Coords(groups.pp.rank(), groups.dp.rank(), groups.cp.rank(), groups.tp.rank())


def _gather(part: Tensor, plan: ParameterPlan, group: dist.ProcessGroup) -> list[Tensor]:
    """The tp ranks' parts on tp rank 0, in order; elsewhere, and for what is on every rank, the own one."""
    if not plan.gathered:
        return [part]
    parts = [torch.empty_like(part) for _ in plan.cuts] if group.rank() == 0 else None
    dist.gather(part.contiguous(), parts, group=group, group_dst=0)
    return parts or []


def _assemble(plan: ParameterPlan, parts: list[Tensor]) -> dict[str, Tensor]:
    wholes = {tensor.name: parts[0].new_empty(tensor.shape) for tensor in plan.tensors}
    for part, cut in zip(parts, plan.cuts, strict=False):  # one part suffices for what every rank holds
        for piece in cut.pieces:
            wholes[piece.tensor][piece.source] = part[piece.target]
    return wholes
