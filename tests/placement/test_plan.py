"""Plans: layouts filled and checked, YAML that a person can edit, totals for a dry run."""

import subprocess
import sys

import pytest

from rolemesh.placement.cluster import ClusterSpec, NodeSpec
from rolemesh.placement.layout import Layout, LayoutError
from rolemesh.placement.model import ModelShape
from rolemesh.placement.plan import PlacementPlan, device_totals, make_plan
from rolemesh.placement.pools import PlacementError

PPO = ("actor", "rollout", "ref", "critic", "reward")
SHAPE = ModelShape("llama", 4, 64, 128, 4, 2, 16, 100, 64)
EXPLICIT = {
    "left": {"roles": ["actor", "rollout"], "nodes": 1, "per_node": 2, "where": {"labels": {"kind": "big"}}},
    "right": {"roles": ["ref", "critic", "reward"], "devices": 2},
}
CLUSTER = ClusterSpec((NodeSpec("n1", 4, cpus=2, labels={"kind": "big"}), NodeSpec("n2", 1, cpus=1)), "cpu")


def test_layouts_are_filled_from_the_pools_size_and_the_pins():
    pins = {"actor": {"tp": 2}, "critic": {"pp": 2, "dp": 1}}
    plan = make_plan("split", PPO, ClusterSpec.uniform(2, 2), layouts=pins, shapes={"actor": SHAPE})
    assert plan.layout_of("actor") == Layout(tp=2)
    assert plan.layout_of("ref") == Layout(dp=2)
    assert plan.layout_of("critic") == Layout(pp=2)
    assert plan.pool_of("reward").name == "critic_side"
    assert plan.n_devices == 4


def test_a_layout_that_does_not_fit_names_role_and_pool():
    with pytest.raises(
        LayoutError, match="role 'critic' on pool 'all': tp=8 does not divide the 4 attention heads"
    ):
        make_plan(
            "colocate",
            PPO,
            ClusterSpec.uniform(1, 8),
            layouts={"critic": {"tp": 8}},
            shapes={"critic": SHAPE},
        )
    with pytest.raises(LayoutError, match=r"role 'actor' on pool 'actor_side': .*legal tp: 1, 2, 4$"):
        make_plan("split", PPO, ClusterSpec.uniform(1, 8), layouts={"actor": {"tp": 3}})
    with pytest.raises(LayoutError, match=r"'critik', which needs no devices .*did you mean critic"):
        make_plan("split", PPO, ClusterSpec.uniform(1, 8), layouts={"critik": {"tp": 2}})


def test_what_no_pool_uses_is_told():
    plan = make_plan("split", PPO, ClusterSpec.uniform(3, 1))
    assert plan.summary()[-1] == "node node-2: left over, 1 devices idle"
    plan = make_plan("split", PPO, ClusterSpec.uniform(1, 3))
    assert plan.summary() == [
        "split: 2 pools, 2 devices",
        "pool actor_side: 1 devices (node-0: 1)",
        "  actor: one rank",
        "  rollout: one rank",
        "  ref: one rank",
        "pool critic_side: 1 devices (node-0: 1)",
        "  critic: one rank",
        "  reward: one rank",
        "node node-0: 1 devices idle",
    ]


@pytest.mark.parametrize("strategy", ["colocate", "split", EXPLICIT], ids=["colocate", "split", "explicit"])
def test_a_plan_survives_yaml(strategy):
    pins = {} if strategy == "colocate" else {"actor": {"tp": 2, "sequence_parallel": True}}
    roles = PPO if strategy != "split" else ("actor", "rollout", "critic")
    cluster = CLUSTER if strategy != "split" else ClusterSpec.uniform(2, 2)
    plan = make_plan(strategy, roles, cluster, layouts=pins)
    assert PlacementPlan.from_yaml(plan.to_yaml()) == plan


def test_a_plan_reads_as_a_person_would_write_it():
    plan = make_plan(EXPLICIT, PPO, CLUSTER, layouts={"actor": {"tp": 2}})
    assert plan.to_yaml() == (
        "strategy: explicit\n"
        "pools:\n"
        "  left:\n"
        "    roles: [actor, rollout]\n"
        "    process_on_nodes: [2]\n"
        "    device_kind: cpu\n"
        "    cpus_per_process: 0.5\n"
        "    where:\n"
        "      labels: {kind: big}\n"
        "    nodes: {n1: 2}\n"
        "  right:\n"
        "    roles: [ref, critic, reward]\n"
        "    process_on_nodes: [2]\n"
        "    device_kind: cpu\n"
        "    cpus_per_process: 0.5\n"
        "    nodes: {n1: 2}\n"
        "layouts:\n"
        "  actor: {tp: 2, dp: 1, pp: 1}\n"
        "  rollout: {tp: 1, dp: 2, pp: 1}\n"
        "  ref: {tp: 1, dp: 2, pp: 1}\n"
        "  critic: {tp: 1, dp: 2, pp: 1}\n"
        "  reward: {tp: 1, dp: 2, pp: 1}\n"
        "idle: {n2: 1}\n"
    )


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (("roles:", "rols:"), PlacementError, "no key 'rols' .*did you mean roles"),
        (("strategy: split\n", ""), PlacementError, "plan lacks strategy"),
        (
            ("  actor: {tp: 1", "  actr: {tp: 1"),
            PlacementError,
            "'actr' is in no pool",
        ),
        (
            ("actor: {tp: 1", "actor: {tp: 2"),
            LayoutError,
            "'actor': tp=2 is 2 ranks, pool 'actor_side' has 1",
        ),
        (("process_on_nodes: [1]", "process_on_nodes: [0]"), PlacementError, "whole numbers of at least 1"),
        (("actor: {tp: 1", "actor: {tpp: 1"), PlacementError, "no key 'tpp'"),
    ],
)
def test_an_edit_that_does_not_fit_together_is_refused(edit, error, message):
    text = make_plan("split", ("actor", "critic"), ClusterSpec.uniform(1, 2)).to_yaml()
    assert edit[0] in text
    with pytest.raises(error, match=message):
        PlacementPlan.from_yaml(text.replace(*edit, 1))


def test_a_role_without_devices_is_not_in_the_plan():
    plan = make_plan("colocate", ("actor", "rollout"), ClusterSpec.uniform(1, 2))
    with pytest.raises(PlacementError, match=r"'reward' is not in the plan \(placed: actor, rollout\)"):
        plan.layout_of("reward")


def test_totals_tell_how_many_devices_each_grouping_needs():
    totals = device_totals({"ref": 8, "reward": 8, "critic": 8, "actor": 8, "rollout": 4 * 2})
    assert totals == {
        "each role on its own": 40,
        "actor+ref, critic+reward": 24,
        "split": 16,
        "colocate": 8,
    }
    assert device_totals({"actor": 4, "rollout": 2})["colocate"] == 4


def test_planning_loads_neither_torch_nor_ray():
    code = (
        "import importlib, pkgutil, sys, rolemesh.placement as package\n"
        "names = [m.name for m in pkgutil.walk_packages(package.__path__, 'rolemesh.placement.')]\n"
        "assert len(names) > 10, names\n"
        "for name in names: importlib.import_module(name)\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
