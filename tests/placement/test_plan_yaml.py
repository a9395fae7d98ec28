"""A plan with everything it can hold: there and back, read by a person, hand edits refused, differences."""

import re
from dataclasses import replace

import pytest

from rolemesh.placement.cluster import ClusterSpec, NodeSpec
from rolemesh.placement.layout import Layout, LayoutError
from rolemesh.placement.plan import PlacementPlan, make_plan
from rolemesh.placement.plan_diff import diff_plans
from rolemesh.placement.plan_values import Prediction, RoleSettings, say_nodes
from rolemesh.placement.pools import PlacementError, PoolSpec, Where
from rolemesh.placement.search.plans import Proof
from rolemesh.placement.steps import step_graph

GIB = 2**30
GRAPH = step_graph("ppo", reference=True, reward="model", kl_in="reward")
A100, V100 = (NodeSpec("a", 8, device_type=kind) for kind in ("a100-80", "v100-32"))
ORDER = {
    "left": ("generate", "old_log_prob", "ref_log_prob", "update_actor", "sync_weights"),
    "right": ("values", "reward", "advantage", "update_critic"),
}
PLAN = PlacementPlan(
    "auto",
    (
        PoolSpec("left", ("actor", "rollout", "ref"), (8, 8), where=Where(labels={"kind": "big"})),
        PoolSpec("right", ("critic", "reward"), (8,)),
    ),
    {
        "actor": Layout(tp=8, pp=2, sequence_parallel=True),
        "rollout": Layout(tp=4, dp=4),
        "ref": Layout(tp=8, dp=2),
        "critic": Layout(tp=8),
        "reward": Layout(dp=8),
    },
    {"left": (("n0", 8), ("n1", 8)), "right": (("n2", 8),)},
    {"n3": 8},
    {"left": "h100-80", "right": "a100-80"},
    {
        "actor": RoleSettings(micro_batch=2, recompute="full", offload=True),
        "ref": RoleSettings(micro_batch=4),
    },
    ORDER,
    Prediction(
        step_s=100 / 3,
        operations_s={name: 0.1 * (i + 1) / 7 for i, name in enumerate(ORDER["left"] + ORDER["right"])},
        memory={"actor": {"weights": 16.4 * GIB + 12345, "gradients": 1e-3 * GIB}, "ref": {"weights": 1e9}},
        host={"actor": 32 * GIB},
        peak={"left": 71.23456789 * GIB},
        limit={"left": 79.1 * GIB},
    ),
    Proof(33.3333333, 0.0, 1234, 0.81234567, "spread nodes"),
)


def test_everything_survives_yaml_exactly():
    again = PlacementPlan.from_yaml(PLAN.to_yaml())
    assert again == PLAN
    assert again.to_yaml() == PLAN.to_yaml()


def test_memory_is_written_in_gib_and_figures_with_five_digits():
    text = PLAN.to_yaml()
    assert "  step_s: 33.333\n" in text
    assert "    actor: {weights: 16.4, gradients: 0.001}\n" in text
    assert "  peak_gib: {left: 71.235}\n" in text
    assert "    order: [values, reward, advantage, update_critic]\n" in text
    assert (
        "settings:\n  actor: {micro_batch: 2, recompute: full, offload: true}\n  ref: {micro_batch: 4}\n"
        in text
    )
    assert (
        "proof: {bound_s: 33.333, gap: 0.0, nodes_visited: 1234, seconds: 0.81235, scope: spread nodes}"
        in text
    )
    assert PLAN.prediction.memory["ref"]["weights"] == pytest.approx(1e9, rel=1e-4)


def test_a_plan_written_by_hand_needs_pools_and_layouts_only():
    plan = PlacementPlan.from_yaml(
        "strategy: mine\npools: {all: {roles: [actor, rollout], process_on_nodes: [2]}}\n"
        "layouts: {actor: {tp: 2}, rollout: {dp: 2}}\n"
    )
    assert plan.layout_of("actor") == Layout(tp=2)
    assert plan.settings_of("actor") == RoleSettings()
    assert (plan.order, plan.proof, bool(plan.prediction)) == ({}, None, False)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "micro_batch: 2",
            "micro_batches: 2",
            "settings of 'actor' has no key 'micro_batches'.*mean micro_batch",
        ),
        ("micro_batch: 2", "micro_batch: 0", "settings of 'actor': micro_batch must be a whole number"),
        (
            "recompute: full",
            "recompute: fulll",
            "settings of 'actor': recompute is one of.*did you mean full",
        ),
        ("offload: true", "offload: maybe", "offload must be true or false, got 'maybe'"),
        (
            "  ref: {micro_batch: 4}",
            "  rfe: {micro_batch: 4}",
            "settings: the plan has no role 'rfe'.*mean ref",
        ),
        ("predicted:", "prediction:", "plan has no key 'prediction' .*did you mean predicted"),
        ("  step_s: 33.333", "  step_s: soon", "predicted step_s must be a number of at least 0, got 'soon'"),
        ("  step_s: 33.333", "  step_s: -1", "predicted step_s must be a number of at least 0, got -1"),
        ("{weights: 16.4,", "{weights: much,", "predicted memory.actor.weights must be a number.*'much'"),
        ("{left: 71.235}", "{lft: 71.235}", "the plan has no pool 'lft'.*did you mean left"),
        (
            "    order: [values, reward",
            "    order: [valeus, reward",
            "no operation 'valeus'.*did you mean values",
        ),
        (
            "    order: [values, reward",
            "    order: [reward, values, reward",
            "'right': order lists reward twice",
        ),
        (
            "    nodes: {n2: 8}",
            "    nodes: {n2: 4}",
            r"'right': nodes hold \[4\].*process_on_nodes says \[8\]",
        ),
        ("idle: {n3: 8}", "idle: {n3: -8}", "idle.n3 must be a whole number of at least 0, got -8"),
        ("{bound_s: 33.333, gap: 0.0", "{bound: 33.333, gap: 0.0", "proof has no key 'bound'"),
        ("pools:", "strategy: again\npools:", r"the plan has 'strategy' twice \(line 2\)"),
        ("    roles: [critic, reward]", "    roles: critic", "'right': roles must be a list, got 'critic'"),
        ("device_kind: cuda", "device_kind: gpu", "device_kind is cuda or cpu, got 'gpu'"),
        ("    process_on_nodes: [8]", "    process_on_nodes: 8", "process_on_nodes must be a list, got 8"),
        ("cpus_per_process: 1.0", "cpus_per_process: one", "cpus_per_process must be a number, got 'one'"),
        ("strategy: auto", "strategy: 3", "strategy must be text, got 3"),
        ("layouts:", "layouts: [", "not YAML"),
    ],
)
def test_a_hand_edit_that_says_nothing_sensible_is_refused(old, new, message):
    text = PLAN.to_yaml()
    assert old in text
    with pytest.raises(PlacementError, match=message):
        PlacementPlan.from_yaml(text.replace(old, new, 1))


def test_a_layout_that_no_longer_fits_its_pool_is_refused():
    with pytest.raises(LayoutError, match="'critic': tp=4 is 4 ranks, pool 'right' has 8 devices"):
        PlacementPlan.from_yaml(PLAN.to_yaml().replace("critic: {tp: 8", "critic: {tp: 4"))


def test_the_order_is_checked_against_the_step():
    PLAN.check_order(GRAPH)
    PLAN.check_order(step_graph("ppo", reference=True, reward="model", kl_in="reward"))
    without = replace(PLAN, order={"right": ("values", "reward", "update_critic")}, prediction=Prediction())
    with pytest.raises(
        PlacementError, match=r"'right': order and the step 'ppo' differ in advantage: .*values"
    ):
        without.check_order(GRAPH)
    late = ("generate", "update_actor", "old_log_prob", "ref_log_prob", "sync_weights")
    with pytest.raises(PlacementError, match=r"no step can run in this order: .*old_log_prob waits for"):
        replace(PLAN, order={"left": late}).check_order(GRAPH)


def test_with_staleness_an_order_is_one_of_a_period():
    """Generation is for the next step: it may come after the update of this one, but before the transfer."""
    late = replace(
        PLAN, order={"left": ("old_log_prob", "ref_log_prob", "update_actor", *ORDER["left"][::4])}
    )
    late.check_order(GRAPH, staleness=1)
    with pytest.raises(PlacementError, match="no step can run in this order"):
        late.check_order(GRAPH)
    swapped = (*ORDER["left"][1:], "generate")
    with pytest.raises(PlacementError, match="sync_weights waits for generate"):
        replace(PLAN, order={"left": swapped}).check_order(GRAPH, staleness=2)


def _cluster(*nodes):
    return ClusterSpec(tuple(nodes))


def _big(name, devices=8, kind="h100-80"):
    return NodeSpec(name, devices, device_type=kind, labels={"kind": "big"})


def test_a_plan_is_fitted_on_other_nodes_and_says_what_stays_idle():
    cluster = _cluster(NodeSpec("a", 8, device_type="A100-80"), _big("b"), _big("c"), _big("d"))
    plan = PLAN.on(cluster)
    assert plan.nodes == {"left": (("b", 8), ("c", 8)), "right": (("a", 8),)}
    assert plan.idle == {"d": 8}
    assert (plan.layouts, plan.order, plan.prediction) == (PLAN.layouts, PLAN.order, PLAN.prediction)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([_big("b"), _big("c", 4), A100], r"asks 16 devices on 2 nodes.*c: 4 devices"),
        ([_big("b"), _big("c")], r"left: \[8, 8\] x h100-80, right: \[8\] x a100-80.*'a100-80'.*h100-80"),
        ([_big("b"), _big("c"), V100], "'right': no node has device type 'a100-80'"),
        (
            [*(NodeSpec(n, 8, device_type="h100-80", labels={"kind": "small"}) for n in "bc"), A100],
            "no node has label kind=big .there are labels: kind=small",
        ),
    ],
)  # fmt: skip
def test_a_cluster_that_differs_is_refused_with_both_sides(nodes, message):
    with pytest.raises(
        PlacementError, match=rf"(?s)^the plan does not fit this cluster\. Planned for: .*{message}"
    ):
        PLAN.on(_cluster(*nodes))


def test_a_cluster_that_does_not_name_its_devices_takes_any_plan():
    nodes = [NodeSpec(n, 8, labels={"kind": "big"}) for n in "abc"]
    assert PLAN.on(_cluster(*nodes)).nodes["right"] == (("c", 8),)


def test_a_cluster_that_names_only_the_chip_has_devices_of_any_size():
    plan = PlacementPlan.from_yaml(PLAN.to_yaml().replace("a100-80", "a100-40"))
    left = [_big("b", kind="H100"), _big("c", kind="H100")]
    assert plan.on(_cluster(*left, NodeSpec("a", 8, device_type="A100"))).nodes["right"] == (("a", 8),)
    with pytest.raises(PlacementError, match="a100-40"):
        plan.on(_cluster(*left, NodeSpec("a", 8, device_type="A100-80G")))


def test_processes_of_a_plan_share_the_cpus_of_a_smaller_machine():
    plan = make_plan("colocate", ("actor",), ClusterSpec.uniform(1, 4, device_kind="cpu"))
    laptop = ClusterSpec((NodeSpec("laptop", 4, cpus=2),), "cpu")
    assert plan.on(laptop).pool_of("actor").cpus_per_process == 0.5


def test_equal_plans_have_no_difference_and_others_show_only_what_differs():
    assert diff_plans(PLAN, PLAN) == []
    assert diff_plans(PLAN, replace(PLAN, proof=replace(PLAN.proof, seconds=9.0, nodes_visited=7))) == []
    other = replace(
        PLAN,
        layouts={**PLAN.layouts, "actor": Layout(tp=4, pp=2, dp=2)},
        settings={"ref": RoleSettings(micro_batch=4)},
        prediction=replace(PLAN.prediction, step_s=30.0, host={}, peak={"left": 80 * GIB}),
    )
    assert diff_plans(PLAN, other, ("a.yaml", "b.yaml")) == [
        "                             a.yaml                       b.yaml",
        "layout actor                 tp=8 pp=2 sequence_parallel  tp=4 dp=2 pp=2",
        "settings actor: micro_batch  2                            -",
        "settings actor: recompute    full                         -",
        "settings actor: offload      True                         -",
        "step, s                      33.333                       30              -10.0%",
        "host memory actor, GiB       32                           -",
        "peak left, GiB               71.235                       80              +12.3%",
    ]


def test_plans_on_other_pools_differ_in_pools_nodes_and_layouts():
    roles = ("actor", "critic")
    one = make_plan("colocate", roles, ClusterSpec.uniform(2, 4, device_type="h100-80"))
    two = make_plan("split", roles, ClusterSpec.uniform(2, 4, device_type="a100-40"))
    lines = diff_plans(one, two)
    cells = [re.split(r" {2,}", line) for line in lines]
    assert ["pool all", "2 x 4 h100-80", "-"] in cells
    assert ["pool critic_side: nodes", "-", "node-1: 4"] in cells
    assert [line.split("  ")[0] for line in lines if line.startswith("layout")] == [
        "layout actor",
        "layout critic",
    ]


def test_the_summary_tells_settings_memory_order_and_proof():
    lines = PLAN.summary()
    assert "pool left: 16 devices of type h100-80 (n0: 8, n1: 8)" in lines
    assert "  actor: tp=8 pp=2 sequence_parallel; micro-batch 2, recompute full, offload; 16.4 GiB" in lines
    assert "  memory: 71.2 of 79.1 GiB at most" in lines
    assert "step: 33.33 s predicted" in lines
    assert lines[-1] == (
        "proof: there is no better plan (not looked at: spread nodes); 1234 choices visited in 0.81 s"
    )


def test_many_equal_nodes_are_named_in_short():
    plan = make_plan("colocate", ("actor",), ClusterSpec.uniform(16, 8))
    assert plan.summary()[1] == "pool all: 128 devices (node-[0-15]: 8)"
    nodes = ("n8", "n9", "n10", "n12", "m13")
    assert say_nodes([(name, 8) for name in nodes]) == "n[8-10]: 8, n12: 8, m13: 8"
    assert say_nodes([("a", 8), ("b", 8), ("c", 4)]) == "a: 8, b: 8, c: 4"
