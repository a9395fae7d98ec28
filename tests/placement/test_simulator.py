"""The simulator against a hand-worked schedule, the best orders, and what the controller records."""

import concurrent.futures
import random
from collections import Counter
from collections.abc import Iterable
from importlib import import_module
from types import SimpleNamespace

import pytest

from rolemesh.placement.graph import StepGraph
from rolemesh.placement.schedule import best_order, waits_for
from rolemesh.placement.simulator import (
    SimulatedPool,
    SimulationError,
    sample_range,
    simulate,
    simulate_period,
)
from rolemesh.placement.steps import step_graph
from rolemesh.placement.timeline import Span

PPO = step_graph("ppo", reference=True, reward="model", kl_in="reward")
SECONDS = {
    "generate": 10.0,
    "old_log_prob": 3.0,
    "ref_log_prob": 2.0,
    "values": 4.0,
    "reward": 1.0,
    "advantage": 0.5,
    "update_critic": 7.0,
    "update_actor": 9.0,
    "sync_weights": 2.0,
}
POOLS = (
    SimulatedPool("actor_side", ("rollout", "actor", "ref"), 2),
    SimulatedPool("critic_side", ("critic", "reward"), 3),
)
ORDER = {
    "actor_side": ("generate", "ref_log_prob", "old_log_prob", "update_actor", "sync_weights"),
    "critic_side": ("values", "reward", "advantage", "update_critic"),
}
BY_HAND = {  # start and end in the first step
    "generate": (0, 10),
    "ref_log_prob": (10, 12),
    "old_log_prob": (12, 15),
    "values": (10, 14),
    "reward": (14, 15),
    "advantage": (15, 15.5),
    "update_critic": (15.5, 22.5),
    "update_actor": (15.5, 24.5),
    "sync_weights": (24.5, 26.5),
}


def times(spans: Iterable[Span], step: int) -> dict[str, tuple[float, float]]:
    return {span.name: (span.start_s, span.end_s) for span in spans if span.args["step"] == step}


def test_steps_are_those_worked_by_hand():
    result = simulate(PPO, SECONDS, POOLS, order=ORDER, steps=2)
    assert times(result.timeline.spans, 0) == BY_HAND
    assert times(result.timeline.spans, 1) == {n: (a + 26.5, b + 26.5) for n, (a, b) in BY_HAND.items()}
    assert result.period_s == (26.5, 26.5)
    assert result.busy_s == {"actor_side": 2 * 26, "critic_side": 2 * 12.5}
    assert result.idle_s == {"actor_side": 1.0, "critic_side": 28.0}
    assert result.utilisation["critic_side"] == 25 / 53
    assert result.timeline.overlap_s("update_actor", "update_critic") == 14.0


def test_one_step_off_works_on_the_step_before():
    """Generation on its own pool takes 30 s, the rest 21.5 s, the transfer 2 s: a period is 32 s."""
    pools = (
        SimulatedPool("generate", ("rollout",)),
        SimulatedPool("train", ("actor", "ref", "critic", "reward")),
    )
    result = simulate(PPO, {**SECONDS, "generate": 30.0}, pools, steps=3, staleness=1)
    # first only generation; then twice generation beside the rest; then the rest alone
    assert result.period_s == (30.0, 32.0, 32.0, 28.5)
    assert times(result.timeline.spans, 1)["generate"] == (30.0, 60.0)
    assert times(result.timeline.spans, 0)["sync_weights"] == (60.0, 62.0)
    best = best_order(
        PPO,
        {**SECONDS, "generate": 30.0},
        {role: pool.name for pool in pools for role in pool.roles},
        staleness=1,
    )
    assert best.makespan_s == 32.0


def test_two_steps_off_a_short_generation_makes_up_for_a_long_one():
    """Generation takes 40 s and 4 s in turn, the rest 26.5 s, the transfer 2 s."""
    pools = (
        SimulatedPool("generate", ("rollout",)),
        SimulatedPool("train", ("actor", "ref", "critic", "reward")),
    )

    def seconds(name: str, step: int, seed: int) -> float:
        return SECONDS[name] if name != "generate" else 4.0 if step % 2 else 40.0

    one = simulate(PPO, seconds, pools, steps=5, staleness=1)
    assert one.period_s == (40.0, 28.5, 42.0, 28.5, 42.0, 28.5)
    two = simulate(PPO, seconds, pools, steps=5, staleness=2)
    assert two.period_s == (40.0, 55.0, 55.0, 26.5)  # two steps each, and the transfer; the last has none
    assert times(two.timeline.spans, 2)["generate"] == (44.0, 84.0)
    assert [s.args["step"] for s in two.timeline.spans if s.name == "sync_weights" and s.role == "actor"] == [
        1,
        3,
    ]


def test_with_staleness_a_reward_takes_the_samples_of_the_next_step_as_they_are_made():
    graph = step_graph("grpo", reward="function", kl_in="loss")
    pools = (SimulatedPool("generate", ("rollout",)), SimulatedPool("train", ("actor", "ref")))
    spans = simulate(graph, SECONDS, pools, steps=2, staleness=1, parts=5).timeline.spans
    # A period ends with the last score: generation goes from 10.2 s to 20.2 s.
    assert times(spans, 1)["reward"] == (12.2, pytest.approx(20.4))
    assert times(spans, 0)["advantage"] == pytest.approx((15.2, 15.7))


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_period_is_a_step_in_the_long_run(staleness: int):
    pools = (
        SimulatedPool("generate", ("rollout",)),
        SimulatedPool("train", ("actor", "ref", "critic", "reward")),
    )
    seconds = {**SECONDS, "generate": 30.0}
    period = simulate_period(PPO, seconds, pools, staleness=staleness)
    assert period.total_s == (32.0 if staleness else 58.5)
    assert len(period.timeline.spans) == len(PPO.operations) + 1
    assert period.busy_s == {"generate": 32.0, "train": 28.5}
    assert min(span.start_s for span in period.timeline.spans) == 0.0


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_best_order_plays_as_it_was_scheduled(staleness: int):
    rng = random.Random(staleness)
    for _ in range(40):
        roles = PPO.roles()
        where = {role: f"p{rng.randrange(3)}" for role in roles}
        pools = [
            SimulatedPool(p, tuple(r for r in roles if where[r] == p)) for p in sorted(set(where.values()))
        ]
        seconds = {name: rng.randint(0, 40) / 4 for name in SECONDS}
        best = best_order(PPO, seconds, where, staleness=staleness)
        result = simulate(PPO, seconds, pools, order=best.order, steps=3, staleness=staleness)
        assert result.period_s[1] == best.makespan_s
        queued = simulate(PPO, seconds, pools, steps=3, staleness=staleness)
        assert queued.period_s[1] >= best.makespan_s


def test_a_timeline_has_the_structure_of_a_run_that_the_controller_recorded():
    """Operations, roles, pools, ranks and arguments of a step are the same; only the seconds differ."""
    recorded = recorded_spans(PPO, {role: pool for pool in POOLS for role in pool.roles})
    simulated = simulate(PPO, SECONDS, POOLS, order=ORDER, steps=1).timeline.spans
    shape = [
        Counter((s.name, s.role, s.pool, s.rank, *s.args) for s in spans) for spans in (recorded, simulated)
    ]
    assert shape[0] == shape[1]
    for spans in (recorded, simulated):
        at = times(spans, 0)
        for name, others in waits_for(PPO).items():
            assert all(at[other][1] <= at[name][0] for other in others)


def recorded_spans(graph: StepGraph, pool_of: dict[str, SimulatedPool]) -> list[Span]:
    """What the controller records over groups that answer at once; operations end one after the other."""
    controller = import_module("rolemesh.engine.controller")
    future = import_module("rolemesh.engine.future")
    batch_ref = import_module("rolemesh.engine.batch_ref")
    clock = iter(range(1000))
    written = SimpleNamespace(
        meta_info={}, n_rows=0, tokens=None, columns=(), select=lambda names: batch_ref.BatchRef({}, 0)
    )

    def call(operation, pool: SimulatedPool):
        begin, end = next(clock), next(clock)
        spans = tuple(future.RankSpan(rank, begin, end, 0) for rank in range(pool.world))
        source = concurrent.futures.Future()
        source.set_result(future.Outcome(written if operation and operation.writes else [{}], spans))
        return future.DataProtoFuture(source, name="", fetch=lambda ref, timeout_s: None, timeout_s=1.0)

    class Group:
        def __init__(self, role: str) -> None:
            self.pool = pool_of[role]
            self.resource_pool = SimpleNamespace(name=self.pool.name)
            for operation in graph.operations:
                if operation.role == role:
                    setattr(self, operation.method, lambda _, blocking, op=operation: self.answer(op))

        def answer(self, operation):
            return call(operation, self.pool)

        def export_weights(self, blocking: bool):
            return call(None, self.pool)

    groups = {role: Group(role) for role in pool_of}
    return controller.Controller(graph, groups).run(batch_ref.BatchRef({}, 0), step=0).spans


@pytest.mark.parametrize(
    ("reward_s", "parts", "start_s", "end_s"),
    [
        (4.0, 1, 10.0, 14.0),
        (4.0, 5, 2.0, 10.8),  # a fifth of it is left when generation ends
        (20.0, 5, 2.0, 22.0),  # it is the slower one
        (0.0, 5, 2.0, 10.0),
    ],
)
def test_a_reward_on_no_pool_scores_the_parts_of_generation(
    reward_s: float, parts: int, start_s: float, end_s: float
):
    graph = step_graph("grpo", reward="function", kl_in="loss")
    seconds = {**SECONDS, "reward": reward_s}
    pools = [SimulatedPool("all", ("rollout", "actor", "ref"))]
    result = simulate(graph, seconds, pools, steps=1, parts=parts)
    at = times(result.timeline.spans, 0)
    assert at["reward"] == (start_s, pytest.approx(end_s))
    assert at["advantage"][0] == max(15.0, at["reward"][1])
    assert at["old_log_prob"][0] >= 10.0, "what takes the batch waits for all of it"


def test_an_order_that_contradicts_the_graph_is_refused():
    order = {**ORDER, "critic_side": ("update_critic", "values", "reward", "advantage")}
    with pytest.raises(SimulationError, match="critic_side next runs update_critic"):
        simulate(PPO, SECONDS, POOLS, order=order)
    with pytest.raises(SimulationError, match=r"pool 'critic_side' runs advantage, reward, .* none of them"):
        simulate(PPO, SECONDS, POOLS, order={"actor_side": ORDER["actor_side"]})


def test_sampled_lengths_give_a_range_that_the_seeds_reproduce():
    def sampler(name: str, step: int, seed: int) -> float:
        spread = random.Random(f"{seed}-{step}").uniform(0.8, 1.5) if name == "generate" else 1.0
        return SECONDS[name] * spread

    first = sample_range(PPO, sampler, POOLS, order=ORDER, steps=2, seeds=range(20))
    assert first == sample_range(PPO, sampler, POOLS, order=ORDER, steps=2, seeds=range(20))
    low, middle, high = (first.step_s[q] for q in (0.05, 0.5, 0.95))
    assert 26.5 - 2 < low < middle < high < 26.5 + 5
    assert first.utilisation["critic_side"][0.95] == pytest.approx(12.5 / low, rel=0.05)
