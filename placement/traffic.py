"""What crosses links in a step, in bytes, by the counts that the time model prices.

All ranks together: a ring over n ranks that sums S bytes sends 2 (n - 1) S, one that gathers them (n - 1) S.
What cp and ep exchange is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rolemesh.placement.auto import as_planned
from rolemesh.placement.graph import Operation
from rolemesh.placement.memory.activations import DTYPE_BYTES
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.predict import devices_of
from rolemesh.placement.roles import PlanRequest
from rolemesh.placement.roles.links import ClusterLinks
from rolemesh.placement.timing.dims import Dims
from rolemesh.placement.timing.training import Run
from rolemesh.placement.timing.transfer import moved_bytes, weight_bytes

_ACTIVATION = 2.0  # bytes of a number on the wire, whatever the role computes in


@dataclass(frozen=True)
class Flow:
    """Bytes of one step from `source` to `target` (pools; equal ones: inside).

    `what` says whose bytes they are and why; `far` whether they cross between link domains.
    """

    what: str
    source: str
    target: str
    n_bytes: float
    far: bool


def traffic(plan: PlacementPlan, request: PlanRequest) -> list[Flow]:
    """The flows of a plan's step, largest first; those of no bytes are left out."""
    placed = plan if plan.nodes else plan.on(request.cluster)
    asked = as_planned(request, placed)
    flows: list[Flow] = []
    for operation in asked.graph.operations:
        if operation.role not in placed.layouts:
            continue
        if operation.kind == "transfer":
            flows.append(_transfer(placed, asked, operation))
        elif operation.state_reads:  # without a model nothing is exchanged
            flows += _inside(placed, asked, operation)
    kept: dict[tuple[str, str, str, bool], float] = {}
    for flow in flows:
        key = flow.what, flow.source, flow.target, flow.far
        kept[key] = kept.get(key, 0.0) + flow.n_bytes
    found = [Flow(what, one, other, size, far) for (what, one, other, far), size in kept.items() if size > 0]
    return sorted(found, key=lambda flow: -flow.n_bytes)


def _transfer(plan: PlacementPlan, request: PlanRequest, operation: Operation) -> Flow:
    owner = next(role for role in sorted(operation.roles) if role != operation.role)
    source, target = plan.layout_of(owner), plan.layout_of(operation.role)
    here, there = plan.pool_of(owner).name, plan.pool_of(operation.role).name
    shape = request.roles[owner].shape
    size = float(DTYPE_BYTES[request.roles[operation.role].dtype])
    if here != there:
        return Flow(f"weights of {owner}", here, there, weight_bytes(shape, size) * target.dp, far=True)
    together = max(source.tp * source.pp, target.tp * target.pp) <= _per_node(plan, request, here)
    moved = moved_bytes(shape, source, target, size) * target.world
    return Flow(f"weights of {owner}", here, here, moved, far=not together)


def _inside(plan: PlacementPlan, request: PlanRequest, operation: Operation) -> Iterator[Flow]:
    """What the ranks of one role send each other in an operation."""
    role = operation.role
    layout, pool, mine = plan.layout_of(role), plan.pool_of(role).name, request.roles[role]
    dims, load = Dims.of(mine.shape), request.as_asked(role).workload
    per_node = _per_node(plan, request, pool)
    trains, settings = operation.kind == "train", plan.settings_of(role)
    tokens = load.tokens * request.times(operation) * (load.epochs if trains else 1)
    if operation.per == "prompt":
        tokens /= load.samples_per_prompt
    passes = 1 if not trains else 2 + (settings.recompute == "full")
    each = _ACTIVATION * tokens * dims.hidden
    sums = 2 * dims.n_layers * passes  # of a layer: one behind attention, one behind the feed-forward
    yield Flow(
        f"{role}: sums over tp",
        pool,
        pool,
        sums * 2 * (layout.tp - 1) * each,
        _crosses(layout.tp, 1, per_node),
    )
    copies = 1 if layout.sequence_parallel else layout.tp
    cuts = layout.pp * layout.vpp - 1
    stage = layout.tp * layout.cp * layout.dp
    yield Flow(
        f"{role}: activations over pp",
        pool,
        pool,
        min(passes, 2) * cuts * copies * each if layout.pp > 1 else 0.0,
        stage * layout.pp > per_node,
    )
    if trains and not mine.lora_rank:
        both = Run().grad_bytes + 2.0  # gradients are summed apart, weights gathered in two bytes
        copies = layout.dp * layout.cp
        params = weight_bytes(mine.shape, 1.0)
        size = (copies - 1) * params * both * load.updates
        yield Flow(f"{role}: updates over dp", pool, pool, size, _crosses(copies, layout.tp, per_node))


def _per_node(plan: PlacementPlan, request: PlanRequest, pool: str) -> int:
    """Devices of the pool that share a fast link."""
    devices = devices_of(plan, pool, request)
    links = ClusterLinks(request.cluster).of(devices)
    return min(links.per_node, links.island or links.per_node)


def _crosses(size: int, stride: int, per_node: int) -> bool:
    return size > 1 and (stride >= per_node or size * stride > per_node)
