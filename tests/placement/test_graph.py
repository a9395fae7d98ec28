"""Dependencies follow from columns and state, and what is no graph is refused by name."""

import itertools
import random

import pytest

from rolemesh.placement.graph import GraphError, Operation, StepGraph


def _op(name, reads="", writes="", state_reads="", state_writes="", kind="infer", role="actor"):
    sets = (frozenset(words.split()) for words in (reads, writes, state_reads, state_writes))
    return Operation(name, role, kind, "run", *sets)


def test_a_reader_waits_for_the_writer_of_its_column_wherever_it_is_listed():
    graph = StepGraph("s", (_op("late", reads="a"), _op("early", writes="a")))
    assert graph.dependencies() == {"late": {"early"}, "early": frozenset()}
    assert [operation.name for operation in graph.order()] == ["early", "late"]


def test_state_orders_reads_and_writes_as_the_program_lists_them():
    graph = StepGraph(
        "s",
        (
            _op("read_0", state_reads="w"),
            _op("read_1", state_reads="w"),
            _op("write_0", state_writes="w"),
            _op("read_2", state_reads="w"),
            _op("write_1", state_reads="w", state_writes="w"),
            _op("other", state_writes="v"),
        ),
    )
    assert graph.dependencies() == {
        "read_0": frozenset(),
        "read_1": frozenset(),
        "write_0": {"read_0", "read_1"},
        "read_2": {"write_0"},
        "write_1": {"write_0", "read_2"},
        "other": frozenset(),
    }


def test_any_order_that_ready_allows_respects_every_conflict():
    rng = random.Random(0)
    for _ in range(50):
        operations = []
        for i in range(6):
            states = rng.sample("uvw", 2)
            operations.append(_op(f"op{i}", state_reads=states[0], state_writes=rng.choice(["", states[1]])))
        graph = StepGraph("s", tuple(operations))
        done: list[str] = []
        while ready := graph.ready(done):
            done.append(rng.choice(ready).name)
        assert len(done) == len(operations)
        for first, second in itertools.combinations(operations, 2):
            conflict = first.state_writes & (second.state_reads | second.state_writes) or (
                first.state_reads & second.state_writes
            )
            assert not conflict or done.index(first.name) < done.index(second.name)


def test_ready_leaves_out_what_runs_and_what_waits_for_it():
    graph = StepGraph("s", (_op("a", writes="x"), _op("b", reads="x"), _op("c")))
    assert [operation.name for operation in graph.ready((), running=["a"])] == ["c"]
    assert [operation.name for operation in graph.ready(["a"], running=["c"])] == ["b"]


def test_generation_may_rewrite_the_prompts_it_reads():
    generate = _op("generate", reads="input_ids", writes="input_ids responses")
    graph = StepGraph("s", (generate, _op("values", reads="input_ids")), inputs={"input_ids"})
    assert graph.dependencies() == {"generate": frozenset(), "values": {"generate"}}


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ([_op("a", reads="x")], "a reads column 'x', which nobody writes before it .*uid"),
        ([_op("a", reads="x", writes="x")], "a reads column 'x', which nobody writes before it"),
        ([_op("a", writes="x"), _op("b", writes="x")], "'x' has two writers: a and b"),
        ([_op("a", writes="uid")], "'uid' has two writers: the data set and a"),
        ([_op("a", reads="y", writes="x"), _op("b", reads="x", writes="y")], "cycle: "),
        ([_op("a", reads="x", state_writes="w"), _op("b", writes="x", state_reads="w")], "cycle: "),
        ([_op("a"), _op("a")], "several operations named a"),
    ],
)
def test_what_is_no_graph_is_refused(operations, message):
    with pytest.raises(GraphError, match=message):
        StepGraph("s", tuple(operations), inputs={"uid"})


def test_an_unknown_kind_or_operation_is_refused():
    with pytest.raises(GraphError, match="kind 'guess' is none of"):
        _op("a", kind="guess")
    with pytest.raises(GraphError, match=r"no operation 'b' \(it has: a\)"):
        StepGraph("s", (_op("a"),))["b"]


def test_select_turns_missing_columns_into_inputs():
    graph = StepGraph("s", (_op("a", writes="x"), _op("b", reads="x", writes="y"), _op("c", reads="x y")))
    part = graph.select(["c", "b"])
    assert [operation.name for operation in part.operations] == ["b", "c"]
    assert part.inputs == {"x"}


def test_a_transfer_needs_the_workers_of_both_ends():
    sync = _op(
        "sync", state_reads="actor.weights", state_writes="rollout.weights", kind="transfer", role="rollout"
    )
    assert sync.roles == {"actor", "rollout"}
    assert _op("old_log_prob", state_reads="actor.weights").roles == {"actor"}
