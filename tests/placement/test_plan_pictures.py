"""What pictures of a plan show: memory over the step, bytes on links, strategies, lengths."""

from dataclasses import replace

import pytest
from plan_requests import LLAMA_1B, TAILED, ppo

from rolemesh.placement.auto import plan_of, plan_strategy
from rolemesh.placement.compare import compare_strategies, price
from rolemesh.placement.length_range import length_range, scaled
from rolemesh.placement.lengths import Fixed, Measured, log_normal
from rolemesh.placement.memory_over_step import memory_over_step
from rolemesh.placement.search import Pin
from rolemesh.placement.timing.transfer import weight_bytes
from rolemesh.placement.traffic import traffic


@pytest.fixture(scope="module")
def request_():
    pins = {role: {"pins": {"tp": 2}} for role in ("actor", "critic", "ref")}
    return ppo("2 x h100x4", workload=TAILED, changes=pins)


@pytest.fixture(scope="module")
def split(request_):
    return plan_strategy(request_, "split")


@pytest.fixture(scope="module")
def compared(request_):
    return compare_strategies(request_, limit_s=60)


def test_memory_over_the_step_peaks_where_the_plan_says(request_, split):
    found = memory_over_step(split, request_)
    assert set(found) == set(split.prediction.peak)
    for pool, memory in found.items():
        assert memory.peak == pytest.approx(split.prediction.peak[pool], rel=1e-4)
        assert memory.limit == pytest.approx(split.prediction.limit[pool], rel=1e-4)
        assert max(memory.at(name) for name in memory.working) == memory.peak
        assert set(memory.resident) == set(split.pools[[p.name for p in split.pools].index(pool)].roles)


def test_links_carry_what_the_layouts_send(request_, split):
    flows = {(flow.what, flow.far): flow for flow in traffic(split, request_)}
    here, there = split.pool_of("actor").name, split.pool_of("rollout").name
    assert here == there  # the actor's side: 4 devices of one node
    actor = split.layout_of("actor")
    assert (actor.tp, actor.dp, actor.pp) == (2, 2, 1)
    # Gradients in four bytes and weights in two, for the second replica, at each of two updates.
    updates = flows["actor: updates over dp", False]
    assert updates.n_bytes == pytest.approx(weight_bytes(LLAMA_1B, 1.0) * 6 * TAILED.updates)
    # One pass to score and two to train; two sums of two layers' ends, two bytes a number, two ranks.
    recomputed = split.settings_of("actor").recompute == "full"
    sums = flows["actor: sums over tp", False]
    each = 2 * TAILED.tokens * LLAMA_1B.hidden
    assert sums.n_bytes == pytest.approx((3 + recomputed) * 2 * LLAMA_1B.n_layers * 2 * each)
    assert list(traffic(split, request_)) == sorted(traffic(split, request_), key=lambda f: -f.n_bytes)


def test_a_plan_has_its_own_price_under_its_request(request_, split, compared):
    mine = price(request_, split)
    assert mine.makespan_s == pytest.approx(split.prediction.step_s, rel=1e-4)
    assert compared.plans["split"].makespan_s == pytest.approx(mine.makespan_s, rel=1e-4)
    assert set(compared.plans) | set(compared.misfits) == {"colocate", "split", "standalone"}
    assert compare_strategies(request_, limit_s=0).unknown == ("colocate", "split", "standalone")


@pytest.mark.full
def test_a_plan_stays_best_up_to_where_another_is_faster(request_, compared):
    """Both ends are checked by pricing the plans anew just beyond them."""
    plans = {name: plan_of(request_, best, name) for name, best in compared.plans.items()}
    best = min(plans, key=lambda name: plans[name].prediction.step_s)
    found = length_range(plans[best], request_, compared, tie=0.0, limit_s=60)
    assert found.now == ""
    assert found.first <= found.low <= found.mean <= found.high <= found.last
    if found.above:
        load = request_.workload
        beyond = found.high * 1.1 / load.response_lengths.mean
        there = replace(
            request_, workload=replace(load, response_lengths=scaled(load.response_lengths, beyond))
        )
        seconds = {name: price(there, plan).makespan_s for name, plan in plans.items()}
        assert min(seconds, key=lambda name: seconds[name]) != best or "own pools" in found.above
    worst = max(plans, key=lambda name: plans[name].prediction.step_s)
    slower = length_range(plans[worst], request_, compared, tie=0.0, limit_s=60)
    assert "is faster" in slower.now
    assert str(slower).startswith("at a mean of 300 response tokens ")
    assert length_range(plans[best], request_, compared, tie=0.0, limit_s=0) is None  # no time: nothing said


def test_a_strategy_that_the_pins_forbid_is_not_priced(request_):
    apart = Pin(("actor", "critic"), "apart", None, "must")
    found = compare_strategies(request_, pins=[apart], limit_s=60)
    assert "colocate" not in found.plans
    assert found.misfits["colocate"].startswith("the pins forbid it: ")
    assert "split" in found.plans


def test_scaled_lengths_keep_their_limit():
    tailed = scaled(log_normal(300, 900, 1024), 2.0)
    assert tailed.maximum == 1024
    assert 300 < tailed.mean < 600  # more of them stop at the limit
    assert (scaled(Fixed(100), 0.5).mean, scaled(Fixed(100), 0.5).maximum) == (50, 100)
    assert scaled(Fixed(100), 2.0).mean == 100
    measured = scaled(Measured((10, 20, 60)), 2.0)
    assert (measured.mean, measured.maximum) == (pytest.approx((20 + 40 + 60) / 3), 60)
