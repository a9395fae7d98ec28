"""The search against trying everything, on random problems that share nothing with it but their values."""

import time

import numpy as np
import placement_brute as brute
import pytest

from rolemesh.placement.search import Infeasible, SearchResult, search

pytestmark = pytest.mark.full


def solve(instance: brute.Instance, **options) -> SearchResult | Infeasible:
    fixed = {op.name: brute.FIXED_S for op in instance.graph.operations if op.role not in instance.roles}
    return search(
        instance.graph,
        instance.roles,
        instance.cluster,
        instance.costs,
        pins=instance.pins,
        seconds=fixed,
        staleness=instance.staleness,
        **options,
    )


def compare(seed: int, most_rows: int, *, pinned: bool = False) -> str:
    instance = brute.random_instance(seed, most_rows, pinned=pinned)
    best = brute.best_by_trying(instance)
    start = time.perf_counter()
    result = solve(instance, compare=False)
    assert time.perf_counter() - start < 60, "hangs"
    if isinstance(result, Infeasible):
        assert best == np.inf, f"seed {seed}: refused, but {best} s is possible"
        assert result.proven
        return "refused"
    assert result.best.objective_s == best, f"seed {seed}"
    assert result.proof.optimal
    check_fits(instance, result)
    return "placed"


def check_fits(instance: brute.Instance, result: SearchResult) -> None:
    """Nodes are there, nobody's devices are another's, memory suffices, and every role has its pool."""
    left = {node.name: node.devices for node in instance.cluster.usable}
    kinds = {node.name: node.device_type for node in instance.cluster.usable}
    for pool in result.best.pools:
        assert sorted(count for _, count in pool.nodes) == sorted(pool.devices.counts)
        for name, count in pool.nodes:
            left[name] -= count
            assert kinds[name] == pool.devices.device_type
        costs = [result.best.costs[role] for role in pool.roles]
        working = max(sum(c.working.get(op.name, 0) for c in costs) for op in instance.graph.operations)
        room = instance.costs.device_bytes(pool.devices.device_type)
        assert sum(cost.resident for cost in costs) + working <= room
        assert sum(cost.host for cost in costs) <= instance.costs.host_bytes(pool.devices.device_type)
    assert min(left.values()) >= 0
    assert sorted(role for pool in result.best.pools for role in pool.roles) == sorted(instance.roles)


@pytest.mark.parametrize("seed", range(12))
def test_the_plan_is_the_best_of_all_combinations(seed: int):
    compare(seed, 12_000)


@pytest.mark.parametrize("seed", range(8))
def test_the_plan_is_the_best_of_all_that_the_pins_allow(seed: int):
    compare(1000 + seed, 12_000, pinned=True)


@pytest.mark.parametrize("seed", range(6))
def test_a_coarse_pass_before_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rolemesh.placement.search.run._MANY_SHAPES", 2)
    compare(1500 + seed, 12_000, pinned=seed % 2 == 0)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_hundred_plans_are_the_best_of_up_to_two_million_combinations():
    answers = [compare(2000 + seed, 2_000_000) for seed in range(200)]
    assert answers.count("placed") > 100


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_five_hundred_requests_are_placed_when_they_fit_and_refused_when_not():
    answers = [compare(5000 + seed, 20_000, pinned=True) for seed in range(500)]
    assert answers.count("placed") > 100
    assert answers.count("refused") > 50
