"""What the search says beside the plan: proof, strategies and why they lose, pins, and why nothing fits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from rolemesh.placement.cluster import ClusterSpec, NodeSpec
from rolemesh.placement.costs import DeviceSet, RoleCost, RoleOption
from rolemesh.placement.layout import Layout
from rolemesh.placement.search import Infeasible, Pin, PinError, SearchError, SearchResult, search
from rolemesh.placement.steps import step_graph

pytestmark = pytest.mark.full

PPO = step_graph("ppo", reference=True, reward="function", kl_in="reward")
ROLES = ("rollout", "actor", "ref", "critic")
WORK = {
    "generate": 64.0,
    "old_log_prob": 16.0,
    "ref_log_prob": 16.0,
    "values": 16.0,
    "advantage": 0.0,
    "update_critic": 48.0,
    "update_actor": 48.0,
}
GIB = 2.0**30


@dataclass(frozen=True)
class ScaledCosts:
    """Work divided by the devices, with a fixed part; `gib` of a role are cut over tp."""

    work: Mapping[str, float] = field(default_factory=lambda: WORK)
    fixed_s: float = 0.0
    gib: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(ROLES, 8.0))
    device_gib: float = 80.0
    tp: Sequence[int] = (1, 2, 4, 8)
    offload: bool = True
    transfer: Callable[[bool], float] = lambda together: 0.0 if together else 1.0

    def options(self, role: str, devices: DeviceSet) -> list[RoleCost]:
        own = [op.name for op in PPO.operations if op.role == role and op.kind != "transfer"]
        made = []
        for tp in (tp for tp in self.tp if all(count % tp == 0 for count in devices.counts)):
            for offload in (False, True) if self.offload else (False,):
                held = self.gib[role] / tp * GIB
                made.append(
                    RoleCost(
                        RoleOption(Layout(tp=tp, dp=devices.world // tp), offload=offload),
                        {name: self.work[name] / devices.world + self.fixed_s + offload for name in own},
                        0.0 if offload else held,
                        dict.fromkeys(own, GIB + (held if offload else 0.0)),
                        held if offload else 0.0,
                        {"weights": held},
                    )
                )
        return made

    def transfer_s(self, operation, source, source_devices, target, target_devices, *, together) -> float:
        return self.transfer(together)

    def device_bytes(self, device_type: str) -> float:
        return self.device_gib * GIB

    def host_bytes(self, device_type: str) -> float:
        return 64 * GIB


def plan(cluster: ClusterSpec, costs: ScaledCosts, **options) -> SearchResult:
    result = search(PPO, ROLES, cluster, costs, seconds={"reward": 0.0}, **options)
    assert isinstance(result, SearchResult), str(result)
    return result


def refuse(cluster: ClusterSpec, costs: ScaledCosts, **options) -> Infeasible:
    result = search(PPO, ROLES, cluster, costs, seconds={"reward": 0.0}, **options)
    assert isinstance(result, Infeasible)
    return result


def pools(result: SearchResult) -> set[frozenset[str]]:
    return {frozenset(pool.roles) for pool in result.best.pools}


def test_work_that_scales_is_colocated_and_the_others_say_why_they_lose():
    result = plan(ClusterSpec.uniform(2, 8), ScaledCosts())
    assert pools(result) == {frozenset(ROLES)}
    assert result.best.makespan_s == sum(WORK.values()) / 16
    assert result.proof.optimal
    assert result.proof.bound_s == result.best.objective_s
    assert result.strategies["colocate"].reason == "is the best plan"
    split = result.strategies["split"]
    assert split.plan is not None
    # actor's side on 8 devices: 64 + 16 + 16 + 48 over 8, and the critic's side hides behind it
    assert split.plan.makespan_s == 144 / 8
    assert "longer" in split.reason
    assert "on 8 x  instead of 16 x" in split.reason
    assert "pool critic (8 devices) is idle" in split.reason
    for other in result.runners_up:
        assert other.plan is not None
        assert {frozenset(pool.roles) for pool in other.plan.pools} != pools(result)
        assert other.plan.makespan_s >= result.best.makespan_s
    assert len(result.runners_up) == 3


def test_work_that_does_not_scale_is_split():
    """With 4 s of each operation fixed, sides that run beside each other win."""
    result = plan(ClusterSpec.uniform(2, 8), ScaledCosts(fixed_s=4.0))
    assert frozenset(ROLES) not in pools(result)
    colocate = result.strategies["colocate"].plan
    assert colocate is not None
    assert colocate.makespan_s == sum(WORK.values()) / 16 + 7 * 4
    assert "the best plan runs it beside others" in result.strategies["colocate"].reason


def test_memory_decides_when_it_binds():
    """Two of four roles of 24 GiB stay on a device of 80 GiB while a third works with its own 24 GiB."""
    costs = ScaledCosts(gib=dict.fromkeys(ROLES, 24.0), tp=(1,))
    result = plan(ClusterSpec.uniform(1, 8), costs, pins=[Pin(ROLES, "together")])
    offloaded = [role for role, cost in result.best.costs.items() if cost.option.offload]
    assert sorted(offloaded) == ["ref", "rollout"]  # a second each; actor and critic have more operations
    assert result.best.makespan_s == sum(WORK.values()) / 8 + 2


def test_the_transfer_counts():
    costs = ScaledCosts(transfer=lambda together: 500.0 if together else 0.0)
    result = plan(ClusterSpec.uniform(2, 8), costs)
    assert result.best.pool_of("actor") != result.best.pool_of("rollout")


def test_generation_a_step_ahead_runs_beside_the_rest():
    costs = ScaledCosts(fixed_s=2.0)
    ahead = plan(ClusterSpec.uniform(4, 8), costs, staleness=1)
    assert len(ahead.best.pools) > 1
    assert ahead.best.makespan_s < plan(ClusterSpec.uniform(4, 8), costs).best.makespan_s


def test_devices_of_a_type_that_is_slower_are_used_where_they_pay():
    class TwoTypes(ScaledCosts):
        def options(self, role, devices):
            slow = 3.0 if devices.device_type == "old" else 1.0
            return [
                RoleCost(c.option, {n: s * slow for n, s in c.seconds.items()}, c.resident, c.working, c.host)
                for c in super().options(role, devices)
            ]

    nodes = [NodeSpec(f"n{i}", 8, device_type="new") for i in range(2)]
    nodes += [NodeSpec(f"o{i}", 8, device_type="old") for i in range(4)]
    result = plan(ClusterSpec(tuple(nodes)), TwoTypes())
    assert result.best.pool_of("critic").devices.device_type == "old"
    assert result.best.pool_of("actor").devices.device_type == "new"
    assert all(name.startswith("o") for name, _ in result.best.pool_of("critic").nodes)


@pytest.mark.parametrize(
    ("pin", "holds"),
    [
        (Pin(("actor", "ref"), "apart"), lambda best: best.pool_of("actor") != best.pool_of("ref")),
        (Pin("critic", "devices", 4), lambda best: best.pool_of("critic").devices.world == 4),
        (Pin("actor", "tp", 4), lambda best: best.costs["actor"].option.layout.tp == 4),
        (Pin("ref", "offload", True), lambda best: best.costs["ref"].option.offload),
        (
            Pin("rollout", "label", "rack=b"),
            lambda best: {n for n, _ in best.pool_of("rollout").nodes} == {"n1"},
        ),
    ],
)
def test_what_must_hold_holds_and_what_is_only_preferred_gives_way(pin: Pin, holds):
    racks = [NodeSpec("n0", 8, labels={"rack": "a"}), NodeSpec("n1", 8, labels={"rack": "b"})]
    cluster = ClusterSpec(tuple(racks))
    must = plan(cluster, ScaledCosts(), pins=[pin])
    assert holds(must.best)
    free = plan(cluster, ScaledCosts())
    wish = Pin(pin.roles, pin.what, pin.value, "prefer", weight=100.0)
    assert plan(cluster, ScaledCosts(), pins=[wish]).best.makespan_s == must.best.makespan_s
    faint = Pin(pin.roles, pin.what, pin.value, "prefer", weight=1e-6)
    weak = plan(cluster, ScaledCosts(), pins=[faint])
    assert weak.best.makespan_s == free.best.makespan_s
    assert bool(weak.best.unmet) == (must.best.makespan_s > free.best.makespan_s)


def test_what_is_to_be_avoided_is_avoided_when_it_costs_little():
    avoid = Pin("actor", "tp", 1, "avoid")
    result = plan(ClusterSpec.uniform(1, 8), ScaledCosts(), pins=[avoid])
    assert result.best.costs["actor"].option.layout.tp > 1
    assert not result.best.unmet


def test_a_role_too_large_for_any_device_is_named_with_its_bytes_and_the_cluster_that_fits():
    """200 GiB over tp=1 leave 121 GiB over (with 1 GiB at work); tp=4 would do, and is pinned away."""
    costs = ScaledCosts(gib={**dict.fromkeys(ROLES, 8.0), "actor": 200.0}, offload=False)
    answer = refuse(ClusterSpec.uniform(1, 8), costs, pins=[Pin("actor", "tp", 1)])
    assert answer.proven
    assert answer.overrun.roles == ("actor",)
    assert answer.overrun.item == "device memory"
    assert answer.overrun.over == 121 * GIB
    assert answer.nearest is not None
    assert answer.nearest.dropped == (Pin("actor", "tp", 1),)
    text = str(answer)
    assert "actor on 1 x : device memory over by 121.00 GiB (largest item: weights)" in text
    assert "without actor: tp=1, actor with tp=" in text


def test_roles_that_do_not_fit_beside_each_other_are_named_and_more_nodes_would_do():
    """Each role fits one device; all four on two devices do not."""
    costs = ScaledCosts(gib=dict.fromkeys(ROLES, 60.0), offload=False, tp=(1,))
    answer = refuse(ClusterSpec.uniform(2, 1), costs)
    assert answer.overrun.item == "device memory"
    assert len(answer.overrun.roles) == 2
    assert answer.overrun.over == pytest.approx(41 * GIB)  # 120 + 1 at work - 80
    assert answer.nearest is not None
    assert answer.nearest.added == (("1 x ", 2),)


def test_roles_that_must_be_apart_need_as_many_devices():
    answer = refuse(ClusterSpec.uniform(1, 2), ScaledCosts(), pins=[Pin(("actor", "ref", "critic"), "apart")])
    assert answer.overrun.item == "devices"
    assert answer.overrun.over == 1
    assert answer.nearest is not None
    assert answer.nearest.dropped


def test_a_role_that_no_layout_cuts_is_named():
    answer = refuse(ClusterSpec.uniform(1, 8), ScaledCosts(), pins=[Pin("ref", "tp", 3)])
    assert str(answer).startswith("ref: no legal way to run it on any devices of the cluster")
    assert (answer.proven, answer.nodes_visited) == (True, 0)  # known without a search


def test_time_that_runs_out_leaves_a_plan_with_its_gap_or_says_so():
    result = search(
        PPO, ROLES, ClusterSpec.uniform(40, 8), ScaledCosts(), seconds={"reward": 0.0}, time_limit_s=0.0
    )
    assert isinstance(result, Infeasible)
    assert not result.proven
    assert "no plan was found in" in str(result)
    result = search(
        PPO, ROLES, ClusterSpec.uniform(400, 8), ScaledCosts(), seconds={"reward": 0.0}, time_limit_s=1.0
    )
    if isinstance(result, SearchResult):
        assert 0 <= result.proof.gap <= 1
        assert result.proof.bound_s <= result.best.objective_s


def test_the_same_input_gives_the_same_plan():
    first, second = (plan(ClusterSpec.uniform(3, 8), ScaledCosts(fixed_s=1.0)) for _ in range(2))
    assert first.best == second.best
    assert first.proof.nodes_visited == second.proof.nodes_visited


def test_what_does_not_match_the_step_is_refused():
    cluster = ClusterSpec.uniform(1, 8)
    with pytest.raises(PinError, match=r"is about 'reward', which needs no devices"):
        search(PPO, ROLES, cluster, ScaledCosts(), seconds={"reward": 0.0}, pins=[Pin("reward", "tp", 1)])
    with pytest.raises(PinError, match="nothing to pin is called 'colour'"):
        Pin("actor", "colour", 1)
    with pytest.raises(PinError, match="together needs at least two roles"):
        Pin("actor", "together")
    with pytest.raises(SearchError, match="reward of 'reward', which has no devices, needs its seconds"):
        search(PPO, ROLES, cluster, ScaledCosts())
    with pytest.raises(SearchError, match="the costs of role 'critic' lack the seconds of values"):
        search(PPO, ROLES, cluster, WithoutValues(), seconds={"reward": 0.0})


class WithoutValues(ScaledCosts):
    def options(self, role, devices):
        return [
            RoleCost(c.option, {n: s for n, s in c.seconds.items() if n != "values"}, c.resident, c.working)
            for c in super().options(role, devices)
        ]
