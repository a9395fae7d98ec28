"""The controller over worker groups whose calls take a moment and write what their operation says."""

import concurrent.futures
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rolemesh.engine.batch_ref import BatchRef, pack
from rolemesh.engine.controller import Controller, StepResult
from rolemesh.engine.future import DataProtoFuture, Outcome, RankSpan
from rolemesh.engine.protocol import DataProto
from rolemesh.placement.graph import StepGraph
from rolemesh.placement.steps import step_graph

GRAPH = step_graph("ppo", reference=True, reward="model", kl_in="reward")
CALL_S = 0.05


def columns(*names: str) -> BatchRef:
    manifest, blocks = pack(DataProto.from_dict({name: torch.zeros(3) for name in names}))
    return manifest.stored(list(range(len(blocks))))


class Calls:
    """Worker groups for every role of a graph; `log` holds ("start" or "end", method) and `given` columns."""

    def __init__(self, graph: StepGraph, failing: str = "") -> None:
        self.failing = failing
        self.writes = {op.method: op.writes for op in graph.operations}
        self.log: list[tuple[str, str]] = []
        self.given: dict[str, tuple[str, ...]] = {}
        self.groups = {op.role: self.group(op.role) for op in graph.operations}

    def group(self, role: str) -> Any:
        calls = self

        class Group:
            resource_pool = SimpleNamespace(name=f"pool of {role}")

            def __getattr__(self, method: str) -> Any:
                return lambda argument, **keywords: calls.call(method, argument)

            def export_weights(self, blocking: bool) -> DataProtoFuture:
                return calls.call("export_weights", None)

        return Group()

    def call(self, method: str, argument: Any) -> DataProtoFuture:
        source: concurrent.futures.Future[Outcome] = concurrent.futures.Future()
        self.log.append(("start", method))
        if isinstance(argument, BatchRef):
            self.given[method] = tuple(argument.columns)

        def end() -> None:
            self.log.append(("end", method))
            if method == self.failing:
                source.set_exception(RuntimeError(f"{method} failed"))
                return
            written = (
                columns(*self.writes.get(method, ())) if self.writes.get(method) else [{f"{method}/x": 1.0}]
            )
            source.set_result(Outcome(written, (RankSpan(0, 10.0, 12.0, 0, ("gae/avx2",)),)))

        threading.Timer(CALL_S, end).start()
        return DataProtoFuture(source, name=method, fetch=lambda ref, timeout_s: None, timeout_s=10.0)

    def most_at_once(self) -> int:
        running = most = 0
        for event, method in self.log:
            if method != "export_weights":
                running += 1 if event == "start" else -1
            most = max(most, running)
        return most


class Counted:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.counts: list[tuple[int, int]] = []

    def start(self, phase: str) -> None:
        self.running.add(phase)

    def end(self, phase: str) -> None:
        self.running.remove(phase)

    def advance(self, done: int, total: int) -> None:
        self.counts.append((done, total))


def run(calls: Calls, **options: Any) -> StepResult:
    return Controller(GRAPH, calls.groups, **options).run(columns(*GRAPH.inputs), step=4)


@pytest.mark.parametrize("overlap", [True, False])
def test_an_operation_starts_when_what_it_reads_is_there_and_gets_just_that(overlap: bool):
    calls = Calls(GRAPH)
    result = run(calls, overlap=overlap)
    methods = {op.name: op.method for op in GRAPH.operations}
    for name, needed in GRAPH.dependencies().items():
        for other in needed:
            end, start = ("end", methods[other]), ("start", methods[name])
            assert calls.log.index(end) < calls.log.index(start), (name, other)
    for op in GRAPH.operations:
        if op.kind != "transfer":
            assert set(calls.given[op.method]) <= op.reads
    assert set().union(*(op.writes for op in GRAPH.operations)) <= set(result.batch.columns)
    assert (calls.most_at_once() > 1) is overlap


@pytest.mark.parametrize(
    "order", [("ref_log_prob", "values", "reward", "old_log_prob"), ("reward", "old_log_prob", "values")]
)
def test_a_plans_order_decides_what_is_handed_over_first(order: tuple[str, ...]):
    calls = Calls(GRAPH)
    run(
        calls,
        order={"a pool": ("generate", *order), "another": ("advantage", "update_actor", "update_critic")},
    )
    started = [method for event, method in calls.log if event == "start"]
    methods = [GRAPH[name].method for name in (*order, "advantage", "update_actor", "update_critic")]
    assert [method for method in started if method in methods] == methods


def test_an_order_also_holds_for_a_part_of_the_step():
    part = GRAPH.select(["generate", "reward"])
    calls = Calls(GRAPH)
    order = {"a pool": ("values", "generate", "old_log_prob", "reward")}
    Controller(part, calls.groups, order=order).run(columns(*part.inputs))
    assert [method for event, method in calls.log if event == "start"] == [
        "generate_sequences",
        "compute_rm_score",
    ]


def test_progress_counts_the_operations_of_the_step():
    progress = Counted()
    run(Calls(GRAPH), progress=progress)
    total = len(GRAPH.operations)
    assert progress.counts == [(done, total) for done in range(total)]
    assert not progress.running


def test_a_result_holds_metrics_times_and_a_span_per_rank_with_its_pool_and_step():
    result = run(Calls(GRAPH))
    assert result.metrics["update_actor/x"] == 1.0
    assert result.timing_s.keys() == {op.name for op in GRAPH.operations}
    assert result.timing_s["generate"] == 2.0
    span = next(span for span in result.spans if span.name == "update_critic")
    assert (span.pool, span.args["step"]) == ("pool of critic", 4)
    assert json.loads(json.dumps(span.args))["kernels"] == ["gae/avx2"]


def test_the_first_failure_ends_the_step():
    with pytest.raises(RuntimeError, match="compute_values failed"):
        run(Calls(GRAPH, failing="compute_values"))


def test_a_role_without_workers_is_named():
    groups = dict(Calls(GRAPH).groups)
    del groups["critic"]
    with pytest.raises(ValueError, match=r"needs roles \['critic'\]"):
        Controller(GRAPH, groups)
