"""The built-in steps: what may run at the same time, and what each feature adds."""

import pytest

from rolemesh.placement.graph import GraphError, StepGraph
from rolemesh.placement.steps import register_step, step_graph, step_names


def _ancestors(graph: StepGraph, name: str) -> set[str]:
    waits = graph.dependencies()
    return set().union(*({other} | _ancestors(graph, other) for other in waits[name]))


def _independent(graph: StepGraph, *names: str) -> bool:
    return not any(other in _ancestors(graph, name) for name in names for other in names)


def test_ppo_updates_may_overlap_and_so_may_the_scores():
    graph = step_graph("ppo", reference=True, reward="model", kl_in="reward")
    assert _independent(graph, "update_actor", "update_critic")
    assert _independent(graph, "ref_log_prob", "values", "reward", "old_log_prob")
    assert [operation.name for operation in graph.ready(["generate"])] == [
        "old_log_prob",
        "ref_log_prob",
        "values",
        "reward",
    ]
    assert graph.roles() == ("rollout", "actor", "ref", "critic", "reward")


def test_weights_are_synced_last_and_never_under_a_reader():
    graph = step_graph("ppo")
    assert _ancestors(graph, "sync_weights") >= {"generate", "update_actor", "old_log_prob"}
    assert "values" in _ancestors(graph, "update_critic")
    assert "old_log_prob" in _ancestors(graph, "update_actor")
    assert graph["sync_weights"].roles == {"actor", "rollout"}


def test_every_operation_but_the_sync_leads_to_an_update():
    for name in step_names():
        graph = step_graph(name)
        needed = {"sync_weights"} | _ancestors(graph, "sync_weights")
        needed |= {"update_critic"} & {operation.name for operation in graph.operations}
        assert needed == {operation.name for operation in graph.operations}


def test_grpo_has_no_critic_and_groups_by_uid():
    graph = step_graph("grpo", reward="function", kl_in=None)
    assert graph.roles() == ("rollout", "actor", "reward")
    assert graph["advantage"].role == "actor"
    assert "uid" in graph["advantage"].reads
    assert graph["reward"].method == "compute_score"


@pytest.mark.parametrize("name", ["ppo", "grpo"])
@pytest.mark.parametrize(
    ("reference", "kl_in", "readers"),
    [
        (False, None, None),
        (True, None, set()),
        (False, "reward", {"advantage"}),
        (True, "loss", {"update_actor"}),
    ],
)
def test_the_reference_runs_when_asked_for_or_needed(name, reference, kl_in, readers):
    graph = step_graph(name, reference=reference, kl_in=kl_in)
    assert ("ref" in graph.roles()) == (readers is not None)
    assert {operation.name for operation in graph.operations if "ref_log_prob" in operation.reads} == (
        readers or set()
    )


def test_unknown_names_and_features_are_refused():
    with pytest.raises(GraphError, match=r"'pppo' \(registered: .*grpo, ppo.*did you mean ppo"):
        step_graph("pppo")
    with pytest.raises(GraphError, match="model, function, remote, judge, composite, got 'modle'"):
        step_graph("ppo", reward="modle")
    with pytest.raises(GraphError, match="'reward', 'loss' or None, got 'both'"):
        step_graph("ppo", kl_in="both")


def test_a_step_is_registered_once():
    with pytest.raises(GraphError, match="registered already"):
        register_step("ppo")(lambda: None)
