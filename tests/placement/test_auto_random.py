"""Random clusters and requests: a plan fits, and what is refused fits in no way that a product tries."""

import itertools
import random
from dataclasses import replace

import pytest
from plan_requests import LLAMA_1B, LLAMA_8B, SHORT

from rolemesh.placement.auto import plan_auto
from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.costs import DeviceSet
from rolemesh.placement.lengths import Fixed
from rolemesh.placement.pools import PlacementError
from rolemesh.placement.roles import PlannerCosts, PlanRequest, RoleRequest
from rolemesh.placement.steps import step_graph

MEDIUM = replace(LLAMA_1B, n_layers=28, hidden=3072, n_heads=24, head_dim=128)
EVERYTHING = ("tp", "pp", "dp", "micro_batch", "recompute", "offload")


def drawn(seed):
    """A GRPO step on one node of a few small devices."""
    rng = random.Random(seed)
    shape = rng.choice([LLAMA_1B, MEDIUM, LLAMA_8B])
    device, count = rng.choice(["a100-40", "v100-32", "l40s-48"]), rng.choice([1, 2, 3, 4])
    dtype = "float16" if device.startswith("v100") or rng.random() < 0.2 else "bfloat16"
    length = rng.choice([64, 512, 2048])
    load = replace(
        SHORT, prompts=rng.choice([4, 16]), mini_batch_samples=None, response_lengths=Fixed(length)
    )
    roles = {role: RoleRequest(shape, dtype) for role in ("actor", "rollout", "ref")}
    for role in roles:
        if rng.random() < 0.3:
            roles[role] = replace(roles[role], pins={"tp": rng.choice([1, 2, 4])})
    graph = step_graph("grpo", reference=True)
    return PlanRequest(
        graph, roles, load, ClusterSpec.preset(f"1 x {device}x{count}"), runnable=rng.random() < 0.5
    )


def some_way_fits(request):
    """Whether any grouping, any sizes of pools and any options fit: a plain product."""
    costs = PlannerCosts(request, keep=EVERYTHING)
    node = request.cluster.usable[0]
    kind, shares = node.device_type, range(1, node.devices + 1)
    shares = [n for n in shares if n.bit_count() == 1 or node.devices % n == 0]
    groupings = [
        [["actor", "rollout", "ref"]],
        [["actor", "rollout"], ["ref"]],
        [["actor", "ref"], ["rollout"]],
        [["actor"], ["rollout", "ref"]],
        [["actor"], ["rollout"], ["ref"]],
    ]
    for pools in groupings:
        for sizes in itertools.product(shares, repeat=len(pools)):
            if sum(sizes) > node.devices:
                continue
            if all(
                _fits(request, costs, pool, DeviceSet(kind, (n,)))
                for pool, n in zip(pools, sizes, strict=True)
            ):
                return True
    return False


def _fits(request, costs, roles, devices):
    options = [costs.options(role, devices) for role in roles]
    device, host = costs.device_bytes(devices.device_type), costs.host_bytes(devices.device_type)
    for chosen in itertools.product(*(_lean(some) for some in options)):
        working = [
            sum(c.working.get(op.name, 0) for role, c in zip(roles, chosen, strict=True) if role in op.roles)
            for op in request.graph.operations
        ]
        if sum(c.resident for c in chosen) + max(working) <= device and sum(c.host for c in chosen) <= host:
            return True
    return False


def _lean(options):
    """Of options with equal bytes one; seconds do not matter here."""
    return {
        (cost.resident, cost.host, tuple(sorted(cost.working.items()))): cost for cost in options
    }.values()


def check(seed):
    """Plan one request; returns whether there was a plan."""
    request = drawn(seed)
    try:
        plan = plan_auto(request, time_limit_s=30)
    except PlacementError:
        assert not some_way_fits(request), f"request {seed} was refused"
        return False
    for pool in plan.pools:
        assert plan.prediction.peak[pool.name] <= plan.prediction.limit[pool.name] * (1 + 1e-4)
        assert pool.world <= request.cluster.n_devices
    for role, layout in plan.layouts.items():
        layout.check_cut(request.roles[role].shape)
        assert all(getattr(layout, name) == size for name, size in request.roles[role].pins.items())
    return True


def test_a_few_random_requests():
    assert {check(seed) for seed in range(8)} == {True, False}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_random_requests():
    planned = [check(seed) for seed in range(8, 150)]
    assert 0.2 < sum(planned) / len(planned) < 0.95
