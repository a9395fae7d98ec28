"""Best orders against hand-worked schedules and against every permutation on every pool."""

import itertools
import random
import time
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from rolemesh.placement.graph import Operation, StepGraph
from rolemesh.placement.schedule import ScheduleError, Scheduler, best_order, waits_for
from rolemesh.placement.steps import step_graph

PPO = step_graph("ppo", reference=True, reward="model", kl_in="reward")
ROLES = PPO.roles()
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


def partitions(items: tuple[str, ...]) -> Iterator[list[list[str]]]:
    if not items:
        yield []
        return
    for smaller in partitions(items[1:]):
        for k, block in enumerate(smaller):
            yield [*smaller[:k], [items[0], *block], *smaller[k + 1 :]]
        yield [[items[0]], *smaller]


def pools_of(partition: list[list[str]]) -> dict[str, str]:
    return {role: f"pool{k}" for k, block in enumerate(partition) for role in block}


def brute_force(
    graph: StepGraph, seconds: Mapping[str, float], pools: Mapping[str, str], staleness: int
) -> float:
    """The least makespan over all permutations of the operations of every pool."""
    waits = waits_for(graph, staleness)
    on = {
        pool: [op.name for op in graph.operations if pool in {pools.get(r) for r in op.roles}]
        for pool in dict.fromkeys(pools.values())
    }
    best = float("inf")
    for orders in itertools.product(*(itertools.permutations(names) for names in on.values())):
        before = {name: set(waits[name]) for name in seconds}
        for order in orders:
            for first, second in itertools.pairwise(order):
                before[second].add(first)
        end: dict[str, float] = {}
        while len(end) < len(seconds):
            ready = [n for n in seconds if n not in end and before[n] <= end.keys()]
            if not ready:
                break  # the orders contradict one another
            for name in ready:
                end[name] = max((end[other] for other in before[name]), default=0.0) + seconds[name]
        else:
            best = min(best, max(end.values()))
    return best


def random_graph(rng: random.Random, n_operations: int, n_roles: int) -> StepGraph:
    operations: list[Operation] = []
    for i in range(n_operations):
        role = f"r{rng.randrange(n_roles)}"
        reads = {f"c{j}" for j in range(i) if rng.random() < 0.3}
        kind = rng.choice(["generate", "infer", "train", "transfer"])
        state = {f"r{rng.randrange(n_roles)}.w"} if kind == "transfer" else set()
        operations.append(Operation(f"o{i}", role, kind, "m", reads, {f"c{i}"}, state))
    return StepGraph("random", tuple(operations))


def test_a_split_step_worked_by_hand():
    """critic and reward beside actor, ref and rollout: the critic side is done when the update starts."""
    pools = {"actor": "a", "ref": "a", "rollout": "a", "critic": "c", "reward": "c"}
    schedule = best_order(PPO, SECONDS, pools)
    assert schedule.makespan_s == 10 + 5 + 0.5 + 9 + 2  # values and reward take the same 5 s
    assert schedule.order["c"][-2:] == ("advantage", "update_critic")
    assert schedule.start_s["update_critic"] == schedule.start_s["update_actor"] == 15.5
    assert schedule.critical_path[0] == "generate"
    assert schedule.critical_path[-3:] == ("advantage", "update_actor", "sync_weights")
    assert schedule.idle_s("c") == 26.5 - 12.5


def test_a_transfer_takes_both_pools():
    """The rollout's pool also holds the critic, whose update must not run during the transfer."""
    pools = {"actor": "a", "rollout": "b", "critic": "b", "ref": "a", "reward": "a"}
    seconds = {**SECONDS, "update_critic": 20.0}
    schedule = best_order(PPO, seconds, pools)
    start, end = schedule.start_s, schedule.end_s
    assert end["sync_weights"] <= start["update_critic"] or end["update_critic"] <= start["sync_weights"]
    assert schedule.makespan_s == 16.5 + 20 + 2  # 10 + 6 + 0.5, then the critic's update and the transfer


def test_a_role_without_devices_runs_beside_everything():
    graph = step_graph("grpo", reference=True, reward="function", kl_in="loss")
    seconds = {op.name: 1.0 for op in graph.operations} | {"reward": 5.0}
    schedule = best_order(graph, seconds, {"actor": "p", "ref": "p", "rollout": "p"})
    assert schedule.makespan_s == 1 + 5 + 1 + 1 + 1  # old_log_prob and ref_log_prob hide behind the reward
    assert "reward" not in schedule.order["p"]
    assert schedule.pools["reward"] == frozenset()


def test_colocated_roles_take_the_sum():
    schedule = best_order(PPO, SECONDS, dict.fromkeys(ROLES, "all"))
    assert schedule.makespan_s == sum(SECONDS.values())
    assert schedule.critical_path == schedule.order["all"]


def test_one_step_off_overlaps_generation_with_the_rest():
    """Generation has a pool of its own: the period is the longer side and the transfer."""
    pools = dict.fromkeys(ROLES, "train") | {"rollout": "generate"}
    slow = best_order(PPO, {**SECONDS, "generate": 50.0}, pools, staleness=1)
    assert slow.makespan_s == 50 + 2
    fast = best_order(PPO, SECONDS, pools, staleness=1)
    assert fast.makespan_s == sum(SECONDS.values()) - 10  # the transfer takes the training pool too
    assert fast.start_s["generate"] == 0.0


@pytest.mark.parametrize("staleness", [0, 1])
def test_makespans_are_those_of_all_permutations(staleness: int):
    rng = random.Random(staleness)
    for _ in range(60):
        graph = random_graph(rng, rng.randint(2, 7), 4)
        pools = {f"r{i}": f"p{rng.randrange(3)}" for i in range(4) if rng.random() < 0.85}
        seconds = {op.name: rng.randint(0, 12) / 4 for op in graph.operations}
        schedule = best_order(graph, seconds, pools, staleness=staleness)
        assert schedule.makespan_s == brute_force(graph, seconds, pools, staleness), (graph, pools, seconds)
        check(graph, seconds, schedule, staleness)


def check(graph: StepGraph, seconds: Mapping[str, float], schedule, staleness: int = 0) -> None:
    """Dependencies, turns on the pools, and the critical path hold."""
    start, end = schedule.start_s, schedule.end_s
    for name, others in waits_for(graph, staleness).items():
        assert end[name] == start[name] + seconds[name]
        assert all(end[other] <= start[name] for other in others)
    for order in schedule.order.values():
        assert all(end[a] <= start[b] for a, b in itertools.pairwise(order))
    path = schedule.critical_path
    assert start[path[0]] == 0
    assert end[path[-1]] == schedule.makespan_s
    assert all(end[a] == start[b] for a, b in itertools.pairwise(path))


def test_bounds_equal_the_best_orders_of_ppo_on_all_partitions():
    rng = np.random.default_rng(0)
    for partition in partitions(ROLES):
        scheduler = Scheduler(PPO, pools_of(partition))
        durations = rng.integers(0, 40, (4, len(scheduler.names))) / 4
        for row, bound in zip(durations, scheduler.bounds(durations), strict=True):
            exact = scheduler.best(dict(zip(scheduler.names, row, strict=True)))
            assert bound <= exact.makespan_s
            if scheduler.exact:
                assert bound == exact.makespan_s, partition


def test_a_typical_step_is_scheduled_in_well_under_a_millisecond():
    taken = []
    for partition in partitions(ROLES):
        scheduler = Scheduler(PPO, pools_of(partition))
        start = time.process_time()
        for _ in range(5):
            scheduler.best(SECONDS)
        taken.append((time.process_time() - start) / 5)
    assert sorted(taken)[len(taken) // 2] < 2e-3  # 0.2 ms on an idle core


def test_twelve_operations_that_all_compete_are_ordered_at_once():
    operations = [Operation(f"o{i}", f"r{i}", "infer", "m", set(), {f"c{i}"}) for i in range(12)]
    operations += [Operation("last", "x", "infer", "m", {"c3"}, {"y"})]
    graph = StepGraph("wide", tuple(operations))
    seconds = {op.name: 1.0 + k for k, op in enumerate(graph.operations)}
    schedule = best_order(graph, seconds, {f"r{i}": "p" for i in range(12)} | {"x": "q"})
    assert schedule.makespan_s == sum(range(1, 13))
    assert schedule.order["p"].index("o3") < 11


def test_seconds_that_do_not_match_are_named():
    with pytest.raises(ScheduleError, match="'values' needs seconds of at least 0, got None"):
        best_order(PPO, {k: v for k, v in SECONDS.items() if k != "values"}, {})
    with pytest.raises(ScheduleError, match="staleness is a number of steps, 0 or more, got -1"):
        best_order(PPO, SECONDS, {}, staleness=-1)
