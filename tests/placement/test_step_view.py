"""Lanes, waits and the critical path of a step."""

import random

import pytest

from rolemesh.placement.schedule import waits_for
from rolemesh.placement.simulator import SimulatedPool, simulate_period
from rolemesh.placement.step_view import Gap, step_view
from rolemesh.placement.steps import step_graph
from rolemesh.placement.timeline import Span

GRAPH = step_graph("ppo", reward="model", kl_in="reward")
POOLS = {
    "colocate": [SimulatedPool("all", ("actor", "rollout", "ref", "critic", "reward"))],
    "split": [
        SimulatedPool("left", ("actor", "rollout", "ref")),
        SimulatedPool("right", ("critic", "reward")),
    ],
    "standalone": [SimulatedPool(r, (r,)) for r in ("actor", "rollout", "ref", "critic", "reward")],
}


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_critical_path_is_as_long_as_the_step(pools, staleness):
    draw = random.Random(pools)
    for _ in range(20):
        seconds = {op.name: draw.choice([0.0, draw.random(), 10 * draw.random()]) for op in GRAPH.operations}
        played = simulate_period(GRAPH, seconds, POOLS[pools], staleness=staleness)
        view = step_view(played.timeline.spans, waits_for(GRAPH, staleness))
        assert view.length_s == pytest.approx(played.total_s)
        assert view.path_s == pytest.approx(view.length_s)
        for lane in view.lanes:
            busy = sum(piece.end_s - piece.start_s for piece in lane.pieces)
            assert busy + sum(gap.end_s - gap.start_s for gap in lane.gaps) == pytest.approx(view.length_s)
            assert lane.idle == pytest.approx(1 - busy / view.length_s if view.length_s else 0.0)


def test_a_lane_names_what_it_waits_for():
    spans = [
        Span("generate", "rollout", "left", 0, 100.0, 104.0),
        Span("generate", "rollout", "left", 1, 100.0, 103.0),
        Span("values", "critic", "right", 0, 104.0, 106.0),
        Span("update_actor", "actor", "left", 0, 106.0, 110.0),
    ]
    waits = {"values": {"generate"}, "update_actor": {"values", "generate"}}
    view = step_view(spans, waits, ["right", "left"])
    right, left = view.lanes
    assert (right.name, left.name) == ("right", "left")
    assert right.gaps == (Gap(0.0, 4.0, "generate"), Gap(6.0, 10.0, "update_actor"))
    assert left.gaps == (Gap(4.0, 6.0, "values"),)
    assert (right.idle, left.idle) == pytest.approx((0.8, 0.2))
    assert view.critical_path == ("generate", "values", "update_actor")
    assert list(right.waits()) == ["generate", "update_actor"]


def test_a_first_operation_that_starts_late_waits_for_the_controller():
    spans = [Span("a", "x", "one", 0, 0.0, 1.0), Span("b", "y", "two", 0, 0.5, 2.0)]
    view = step_view(spans, {})
    assert view.lanes[1].gaps == (Gap(0.0, 0.5, "the controller"),)
    assert step_view([], {}).lanes == ()
