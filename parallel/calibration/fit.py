"""From measured points to figures and constants of the time model: those under which it errs least."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rolemesh.parallel.calibration.kernels import HEAD_WIDTH
from rolemesh.parallel.calibration.points import Point
from rolemesh.placement.hardware import HardwareProfile
from rolemesh.placement.timing import collectives as net
from rolemesh.placement.timing.efficiency import Efficiency, Machine, efficiency
from rolemesh.placement.timing.gemm import gemm_seconds
from rolemesh.placement.timing.links import Links

_FAR = 1e4  # no parameter is farther from where it starts
_STEPS = (8.0, 4.0, 2.0, 1.4, 1.2, 1.1, 1.05, 1.02, 1.01)
BITS = {"float32": 32, "bfloat16": 16}


def best_fit(start: Mapping[str, float], error: Callable[[Mapping[str, float]], float]) -> dict[str, float]:
    """Parameters above 0 with the least error: each in turn is multiplied and divided by smaller and smaller
    factors for as long as that helps."""
    best = dict(start)
    bounds = {name: (value / _FAR, value * _FAR) for name, value in start.items()}
    least = error(best)
    for factor in _STEPS:
        improved = True
        while improved:
            improved = False
            for name in best:
                least_value, most = bounds[name]
                for tried in (min(best[name] * factor, most), max(best[name] / factor, least_value)):
                    if (now := error({**best, name: tried})) < least * (1 - 1e-6):
                        best, least, improved = {**best, name: tried}, now, True
    return best


def mean_error(pairs: Sequence[tuple[float, float]]) -> float:
    """Mean of |log(predicted / measured)|: 0.1 is about 10% off either way."""
    return sum(abs(math.log(predicted / measured)) for predicted, measured in pairs) / len(pairs)


def peak_flops(points: Sequence[Point]) -> dict[str, float]:
    """FLOP/s of the fastest matrix product, by dtype."""
    best: dict[str, float] = {}
    for point in points:
        if point.kind == "gemm":
            rate = 2.0 * math.prod(point.sizes) / point.seconds
            best[point.dtype] = max(best.get(point.dtype, 0.0), rate)
    return best


def rates(points: Sequence[Point]) -> dict[str, float]:
    """Bytes/s of each kind of memory-bound operator and copy."""
    kinds = ("copy", "add", "sum", "to_host", "from_host")
    return {p.kind: p.sizes[0] / p.seconds for p in points if p.kind in kinds}


def fit_gemm(points: Sequence[Point], profile: HardwareProfile) -> tuple[dict[str, float], float]:
    """`gemm32`, `gemm16` and `tile_start`, and the mean error with them."""
    measured = [p for p in points if p.kind == "gemm" and p.dtype in profile.flops]
    base = efficiency(profile.name).with_(**profile.constants)

    def error(constants: Mapping[str, float]) -> float:
        machine = Machine.of(profile, base.with_(**constants))
        return mean_error([(_product(p, machine), p.seconds) for p in measured])

    names = sorted({f"gemm{BITS[p.dtype]}" for p in measured})
    found = best_fit({**dict.fromkeys(names, 1.0), "tile_start": base.tile_start}, error)
    return found, error(found)


def _product(point: Point, machine: Machine) -> float:
    m, n, k = point.sizes
    start = machine.efficiency.kernel
    return start + gemm_seconds(m, n, k, machine, point.dtype, rows=(k, k, n))


def fit_attention(
    points: Sequence[Point], profile: HardwareProfile, dtype: str
) -> tuple[dict[str, float], float]:
    """`flash` and `flash_backward` in `dtype`, and the mean error with them."""
    machine = Machine.of(profile)
    fill = (
        HEAD_WIDTH / (HEAD_WIDTH + machine.efficiency.head_half) * (128 + machine.efficiency.head_half) / 128
    )

    def ideal(point: Point) -> float:
        batch, heads, tokens, width = point.sizes
        flops = 2.0 * batch * heads * tokens * tokens * width * (1 + 128 / tokens)  # causal: half of them
        work = 2.5 if point.kind == "attention_backward" else 1.0
        return work * flops / (machine.peak(dtype) * fill)

    found, pairs = {}, []
    for kind, name in (("attention_forward", "flash"), ("attention_backward", "flash_backward")):
        measured = [p for p in points if p.kind == kind and p.dtype == dtype]
        share = math.exp(sum(math.log(ideal(p) / p.seconds) for p in measured) / len(measured))
        found[name] = share
        pairs += [(ideal(p) / share, p.seconds) for p in measured]
    return found, mean_error(pairs)


def host_seconds(points: Sequence[Point]) -> float:
    """`host` from what a further layer costs; half of it without gradients, twice as much backward."""
    of = {(p.kind, p.sizes[0]): p.seconds for p in points if p.kind.startswith("layers_")}
    few, many = min(n for _, n in of), max(n for _, n in of)
    infer, train = (
        (of[kind, many] - of[kind, few]) / (many - few) for kind in ("layers_infer", "layers_train")
    )
    return math.sqrt(max(infer, 1e-7) / 0.5 * max(train, 1e-7) / 3)


def fit_links(points: Sequence[Point], world: int) -> tuple[float, float, float]:
    """Bytes/s of the link between two ranks, the latency in NCCL's, and the mean error with them.

    From the collectives alone: gloo's start so much later than its sends that one latency cannot tell both.
    """
    measured = [p for p in points if p.kind in _COLLECTIVES]
    group, constants = net.Group(world, world), replace(Efficiency(), link=1.0)

    def error(links: Mapping[str, float]) -> float:
        given = Links(per_node=world, intra=links["rate"], latency=links["latency"])
        return mean_error([(_COLLECTIVES[p.kind](p, group, given, constants), p.seconds) for p in measured])

    fastest = max(p.sizes[0] / p.seconds for p in measured)
    found = best_fit({"rate": fastest, "latency": 1.0}, error)
    return found["rate"], found["latency"], error(found)


_COLLECTIVES: dict[str, Callable[[Point, net.Group, Links, Efficiency], float]] = {
    "all_reduce": lambda p, group, links, eff: net.all_reduce(p.sizes[0], group, links, eff),
    "all_gather": lambda p, group, links, eff: net.all_gather(p.sizes[0], group, links, eff),
    "reduce_scatter": lambda p, group, links, eff: net.reduce_scatter(p.sizes[0], group, links, eff),
}
