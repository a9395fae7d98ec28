"""The built-in steps: what may run at the same time, and what each feature adds."""

import pytest

from rolemesh.placement.graph import GraphError, StepGraph
from rolemesh.placement.schedule import waits_for
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


def test_remax_answers_each_prompt_greedily_beside_the_samples():
    graph = step_graph("remax", reward="remote", kl_in=None)
    assert _ancestors(graph, "generate_baseline") == {"generate"}  # which holds the prompts
    assert _ancestors(graph, "reward_baseline") == {"generate", "generate_baseline"}
    assert {op.name for op in graph.operations if op.per == "prompt"} == {
        "generate_baseline",
        "reward_baseline",
    }
    assert graph["advantage"].reads >= {"reward_baselines", "baseline_dropped", "dropped"}
    assert "baseline_dropped" not in step_graph("remax", reward="function")["advantage"].reads
    placed = step_graph("remax", reward="model")["reward_baseline"]
    assert (placed.method, placed.state_reads) == ("compute_baseline", {"reward.weights"})


def test_one_step_off_keeps_the_greedy_answers_after_the_samples():
    waits = waits_for(step_graph("remax", kl_in=None), staleness=1)
    assert waits["generate_baseline"] == {"generate"}
    assert not waits["reward"] & {"generate"}


def test_what_refills_a_step_runs_before_all_the_rest():
    graph = step_graph("grpo", reward="function", kl_in="loss", dynamic_sampling=True)
    assert graph.refill == ("generate", "reward")
    waits = graph.dependencies()
    assert waits["old_log_prob"] >= {"generate", "reward"}
    assert waits["reward"] == {"generate"}
    assert graph.select(["generate", "old_log_prob"]).refill == ("generate",)
    assert not graph.select(["advantage", "update_actor"]).refill
    operations = graph.operations
    with pytest.raises(GraphError, match="refills with old_log_prob, which waits for generate"):
        StepGraph("step", operations, graph.inputs, refill=("old_log_prob",))
    with pytest.raises(GraphError, match="no operation 'reword'"):
        StepGraph("step", operations, graph.inputs, refill=("reword",))


@pytest.mark.parametrize("name", ["ppo", "grpo", "remax"])
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
    with pytest.raises(GraphError, match=r"'pppo' \(registered: .*grpo.*ppo.*did you mean ppo"):
        step_graph("pppo")
    with pytest.raises(GraphError, match="model, function, remote, judge, composite, got 'modle'"):
        step_graph("ppo", reward="modle")
    with pytest.raises(GraphError, match="'reward', 'loss' or None, got 'both'"):
        step_graph("ppo", kl_in="both")


def test_a_step_is_registered_once():
    with pytest.raises(GraphError, match="registered already"):
        register_step("ppo")(lambda: None)
