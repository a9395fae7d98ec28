"""The ways in which a role may run on a set of devices: layouts, micro-batches, recompute, offload."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator

from rolemesh.placement.costs import DeviceSet, Recompute
from rolemesh.placement.layout import Layout, LayoutError
from rolemesh.placement.model import ModelShape
from rolemesh.placement.roles.request import PlanRequest, RoleRequest

MOST_TOKENS = 32_768  # of a micro-batch of several sequences: kernels are long full by then
MOST_PP = 32
LONG_TOKENS = 16_384  # sequences from which cutting them over cp is looked at
WAVES = (1, 4, 16, 64)  # parts of a replica's sequences that generate at once
BATCH_TOKENS = 131_072  # of the `hf` engine, where the request does not say


def layouts(plan: PlanRequest, role: str, devices: DeviceSet) -> list[Layout]:
    """Every layout of the devices that the model can be cut in, the pins hold, and (runnable) workers run.

    Left out as never worth it: tp over more than two nodes; more than 32 pipeline stages; and stages of
    unequal numbers of layers, unless they are a power of two or the only replica needs them all.
    """
    request, world, node = plan.roles[role], devices.world, max(devices.counts)
    if plan.generates(role) and request.engine == "hf":
        whole = Layout(dp=world)
        found: Iterable[Layout] = (
            [whole] if all(getattr(whole, k) == v for k, v in request.pins.items()) else []
        )
    elif plan.generates(role):
        found = _serving(plan, request, devices)
    else:
        found = _megatron(plan, request, world, node)
    return list(found)


def _sizes(request: RoleRequest, axis: str, sizes: Iterable[int]) -> list[int]:
    """Of these sizes the pinned one; all without a pin."""
    pinned = request.pins.get(axis)
    return [size for size in sizes if pinned is None or size == pinned]


def _wished(request: RoleRequest, axis: str, sizes: Iterable[int]) -> list[int]:
    """The same for sizes that are worth looking at: a pinned one may be another."""
    pinned = request.pins.get(axis)
    return list(sizes) if pinned is None else [int(pinned)]


@functools.lru_cache(maxsize=256)
def legal_tp(shape: ModelShape) -> tuple[int, ...]:
    """Sizes of tp that divide the model, ascending; powers of two and divisors of its KV heads."""
    legal = []
    for tp in range(1, shape.n_heads + 1):
        try:
            Layout(tp=tp, etp=1).check_cut(shape)
        except LayoutError:
            continue
        legal.append(tp)
    return tuple(legal)


def _megatron(plan: PlanRequest, request: RoleRequest, world: int, node: int) -> Iterator[Layout]:
    shape, pins = request.shape, request.pins
    if plan.runnable and shape.not_runnable:
        return
    for tp in _sizes(request, "tp", legal_tp(shape)):
        parallel = bool(pins.get("sequence_parallel", tp > 1))
        if (tp > 2 * node and "tp" not in pins) or (parallel and tp == 1):
            continue
        if plan.runnable and shape.moe and tp > 1 and not parallel:
            continue
        for cp in _wished(request, "cp", _context_sizes(plan)):
            rest, over = divmod(world, tp * cp)
            for pp in _sizes(request, "pp", _divisors(rest) if not over else ()):
                if pp > shape.n_layers or (pp > MOST_PP and "pp" not in pins):
                    break
                if "pp" not in pins and shape.n_layers % pp and pp.bit_count() > 1 and pp != rest:
                    continue
                for vpp in _wished(request, "vpp", _virtual(shape, pp)):
                    if vpp > 1 and (pp == 1 or shape.n_layers < pp * vpp):
                        continue
                    if pins.get("pp_layers") and len(pins["pp_layers"]) != pp * vpp:
                        continue
                    for ep, etp in _experts(plan, shape, world // pp, tp):
                        dp = rest // pp
                        fits = (("ep", ep), ("etp", etp), ("dp", dp))
                        if all(pins.get(axis, size) == size for axis, size in fits):
                            layers = tuple(pins.get("pp_layers", ()))
                            yield _layout(tp, cp, dp, pp, vpp, ep, etp, parallel, layers)


def _context_sizes(plan: PlanRequest) -> tuple[int, ...]:
    if plan.workload.longest_tokens < LONG_TOKENS:
        return (1,)
    return tuple(2**k for k in range(5) if plan.workload.longest_tokens / 2**k >= LONG_TOKENS / 4)


def _virtual(shape: ModelShape, pp: int) -> tuple[int, ...]:
    """1, and 4 or 2: more virtual stages have smaller bubbles and keep less, for more sends."""
    if pp == 1:
        return (1,)
    return (1, *[vpp for vpp in (4, 2) if shape.n_layers % (pp * vpp) == 0][:1])


def _experts(plan: PlanRequest, shape: ModelShape, stage: int, tp: int) -> list[tuple[int, int]]:
    """(ep, etp) over a pipeline stage of so many ranks."""
    if shape.moe is None:
        return [(1, 1)]
    sizes = [ep for ep in _divisors(shape.moe.n) if stage % ep == 0 and (ep == 1 or ep.bit_count() == 1)]
    cut = [(ep, tp) for ep in sizes if tp > 1 and shape.moe.ffn % tp == 0 and stage % (ep * tp) == 0]
    return [(ep, 1) for ep in sizes] + cut


def _serving(plan: PlanRequest, request: RoleRequest, devices: DeviceSet) -> Iterator[Layout]:
    """tp, and pp for models that a node does not hold; experts are cut like the rest, or else spread.

    Our engines (runnable) are cut over tp alone, each on one node.
    """
    shape, world, node = request.shape, devices.world, max(devices.counts)
    for tp in _sizes(request, "tp", legal_tp(shape)):
        if world % tp or (tp > 2 * node and "tp" not in request.pins):
            continue
        if plan.runnable and any(count % tp for count in devices.counts):
            continue
        deep = (tp >= node or "pp" in request.pins) and not plan.runnable
        for pp in _sizes(request, "pp", (1, 2, 4, 8) if deep else (1,)):
            dp, over = divmod(world // tp, pp)
            if over or pp > shape.n_layers or request.pins.get("dp", dp) != dp:
                continue
            if shape.moe is None or tp == 1:
                yield Layout(tp, dp=dp, pp=pp)
            elif shape.moe.ffn % tp == 0:
                yield Layout(tp, dp=dp, pp=pp, etp=tp)
            elif shape.moe.n % tp == 0 and not plan.runnable:
                yield Layout(tp, dp=dp, pp=pp, ep=tp)


@functools.lru_cache(maxsize=65_536)
def _layout(
    tp: int, cp: int, dp: int, pp: int, vpp: int, ep: int, etp: int, parallel: bool, layers: tuple[int, ...]
) -> Layout:
    return Layout(tp, cp, dp, pp, vpp, ep, etp, parallel, layers)


@functools.lru_cache(maxsize=4096)
def _divisors(n: int) -> tuple[int, ...]:
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return tuple(sorted({*small, *(n // k for k in small)}))


def micro_batches(plan: PlanRequest, request: RoleRequest, rows: int) -> list[int]:
    """Sequences of a forward pass, at their longest, for a replica that has `rows` of them at a time."""
    longest = plan.workload.longest_tokens
    tokens = request.micro_batch_tokens or plan.workload.micro_batch_tokens
    if tokens is not None:
        return [max(1, int(tokens / longest))]
    most = max(1, min(rows, int(MOST_TOKENS / longest)))
    return [2**k for k in range(most.bit_length())]


def scored(plan: PlanRequest, request: RoleRequest, micro_batch: int) -> int:
    """Sequences of a forward pass of a role that trains on `micro_batch` at a time."""
    tokens = request.scoring_tokens
    return micro_batch if tokens is None else max(1, int(tokens / plan.workload.longest_tokens))


def at_once(plan: PlanRequest, request: RoleRequest, rows: int) -> list[int]:
    """Sequences that generate at once on a replica that has `rows` of them to generate."""
    tokens = request.micro_batch_tokens or (BATCH_TOKENS if request.engine == "hf" else None)
    if tokens is not None:
        return [min(max(1, int(tokens / plan.workload.longest_tokens)), rows)]
    return sorted({max(1, math.ceil(rows / waves)) for waves in WAVES})


def recomputes(plan: PlanRequest, role: str) -> tuple[Recompute, ...]:
    """What the backward pass may make anew; fused attention keeps no scores, so `selective` saves nothing."""
    pinned = plan.roles[role].recompute
    if not plan.trains(role):
        return ("none",)
    return ("none", "full") if pinned is None else (pinned,)


def offloads(plan: PlanRequest, role: str) -> tuple[bool, ...]:
    """Whether states may wait on the host; those of our engines stay where they are."""
    pinned = plan.roles[role].offload
    if pinned is not None:
        return (pinned,)
    return (False,) if plan.runnable and plan.generates(role) else (False, True)
