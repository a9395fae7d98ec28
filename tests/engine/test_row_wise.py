"""The controller and operations that take rows as they come, over groups whose calls take a moment."""

import concurrent.futures
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rolemesh.engine.batch_ref import BatchRef, pack, unpack
from rolemesh.engine.controller import Controller, StepResult
from rolemesh.engine.future import DataProtoFuture, Outcome, RankSpan
from rolemesh.engine.parts import PartFeed, PartRef, join_parts
from rolemesh.engine.protocol import DataProto
from rolemesh.placement.graph import StepGraph
from rolemesh.placement.steps import step_graph

PART_S = 0.05
STORED: dict[Any, Any] = {}


def graph_of(**features: Any) -> StepGraph:
    return step_graph("grpo", reward="function", kl_in=None, **features).select(["generate", "reward"])


def stored(columns: dict[str, np.ndarray], metrics: dict[str, float] | None = None) -> BatchRef:
    data = DataProto.from_dict(
        {name: torch.as_tensor(column) for name, column in columns.items()},
        meta_info={"metrics": metrics} if metrics else {},
    )
    manifest, blocks = pack(data)
    handles = [len(STORED) + i for i in range(len(blocks))]
    STORED.update(zip(handles, blocks, strict=True))
    return manifest.stored(handles)


def column(ref: BatchRef, name: str) -> list[int]:
    return unpack(ref.select([name]), STORED).batch[name].tolist()


class Calls:
    """A rollout that finishes its last rows first, and a reward whose score of a row is the row's number."""

    def __init__(self, graph: StepGraph, *, n_rows: int = 6, n_parts: int = 3, failing: int = -1) -> None:
        self.graph, self.n_rows, self.n_parts, self.failing = graph, n_rows, n_parts, failing
        self.part_s = PART_S * 3 / n_parts
        self.scored: list[list[int]] = []
        self.scored_columns: set[str] = set()
        self.log: list[str] = []
        pools = {role: SimpleNamespace(name=f"pool of {role}") for role in ("rollout", "reward")}
        self.groups = {
            "rollout": SimpleNamespace(generate_sequences=self.generate, resource_pool=pools["rollout"]),
            "reward": SimpleNamespace(compute_score=self.score, resource_pool=pools["reward"]),
        }

    def run(self, groups: list[str] | None = None, **options: Any) -> StepResult:
        inputs = stored({name: np.arange(self.n_rows) for name in self.graph.inputs})
        return Controller(self.graph, self.groups, **options).run(inputs, groups=groups)

    def generate(self, prompts: BatchRef, blocking: bool) -> DataProtoFuture:
        feed, made = PartFeed(), []

        def work() -> Outcome:
            for rows in np.array_split(np.arange(self.n_rows), self.n_parts)[::-1]:
                time.sleep(self.part_s)
                ref = stored(dict.fromkeys(self.graph["generate"].writes, rows))
                made.append(PartRef(tuple(rows.tolist()), ref))
                feed.put(made[-1])
            time.sleep(PART_S)
            self.log.append("generated")
            return Outcome(join_parts(made, self.n_rows), (RankSpan(0, 10.0, 12.0, 0),))

        return self.future("generate", work, feed)

    def score(self, data: BatchRef, blocking: bool) -> DataProtoFuture:
        assert "scoring" not in self.log[-1:], "one call at a time"
        rows = column(data, "responses")
        assert column(data, "data_source") == rows, "inputs of the same rows"
        self.scored_columns |= set(data.columns)
        self.scored.append(rows)
        self.log.append("scoring")

        def work() -> Outcome:
            time.sleep(PART_S * 1.5)
            if self.failing in rows:
                raise RuntimeError(f"rows {rows} failed")
            self.log.append("scored")
            metrics = {"reward/calls": 1.0, "reward/row/mean": float(np.mean(rows))}
            at_s = 10.0 + 3 * len(self.scored)
            return Outcome(stored({"rm_scores": np.array(rows)}, metrics), (RankSpan(0, at_s, at_s + 1, 0),))

        return self.future("score", work)

    def future(self, name: str, work: Callable[[], Outcome], feed: PartFeed | None = None) -> DataProtoFuture:
        source: concurrent.futures.Future[Outcome] = concurrent.futures.Future()

        def run() -> None:
            try:
                source.set_result(work())
            except Exception as error:
                source.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return DataProtoFuture(source, name=name, fetch=lambda *_: None, timeout_s=10.0, parts=feed)  # type: ignore[arg-type,return-value]


class Counted:
    def __init__(self) -> None:
        self.phases: list[tuple[str, str]] = []
        self.counts: list[tuple[int, int]] = []

    def start(self, phase: str) -> None:
        self.phases.append(("start", phase))

    def end(self, phase: str) -> None:
        self.phases.append(("end", phase))

    def advance(self, done: int, total: int) -> None:
        self.counts.append((done, total))


def test_rows_are_scored_while_others_are_generated_and_come_back_in_order():
    calls, progress = Calls(graph_of()), Counted()
    result = calls.run(progress=progress)
    assert calls.log.index("scoring") < calls.log.index("generated")
    assert calls.scored[0] == [4, 5], "what is made first is scored first"
    assert column(result.batch, "rm_scores") == list(range(6))
    assert calls.scored_columns <= calls.graph["reward"].reads
    assert result.metrics == {"reward/calls": len(calls.scored), "reward/row/mean": 2.5}
    assert [span.name for span in result.spans].count("reward") == len(calls.scored) > 1
    assert result.timing_s == {"generate": 2.0, "reward": len(calls.scored)}, "seconds at work"
    assert progress.counts == [(0, 2), (1, 2)]
    assert sorted(progress.phases) == [
        (at, phase) for at in ("end", "start") for phase in ("generate", "reward")
    ]


def test_what_comes_while_a_call_runs_goes_together_in_the_next():
    calls = Calls(graph_of(), n_rows=30, n_parts=30)
    result = calls.run()
    assert sorted(row for rows in calls.scored for row in rows) == list(range(30))
    assert column(result.batch, "rm_scores") == list(range(30))
    assert len(calls.scored) < 30


def test_whole_groups_are_given_together():
    uids = ["a", "b", "c", "a", "b", "c"]  # parts of two rows: no group is whole before the last part
    calls = Calls(graph_of(reward_takes="groups"))
    calls.run(groups=uids)
    for rows in calls.scored:
        assert {row for row in range(6) if uids[row] in {uids[r] for r in rows}} == set(rows)
    neighbours = Calls(graph_of(reward_takes="groups"))
    neighbours.run(groups=["a", "a", "b", "b", "c", "c"])
    assert neighbours.scored[0] == [4, 5]
    assert "uid" in neighbours.scored_columns


@pytest.mark.parametrize("why", ["no overlap", "one pool", "takes the batch", "no groups"])
def test_the_whole_batch_goes_in_one_call_where_rows_may_not(why: str):
    graph = graph_of(reward_takes="groups" if why == "no groups" else "rows")
    if why == "takes the batch":
        graph = StepGraph("s", (graph["generate"], replace(graph["reward"], takes="batch")), graph.inputs)
    calls = Calls(graph)
    if why == "one pool":
        calls.groups["reward"].resource_pool = calls.groups["rollout"].resource_pool
    result = calls.run(overlap=why != "no overlap")
    assert calls.scored == [list(range(6))]
    assert column(result.batch, "rm_scores") == list(range(6))
    assert result.metrics == {"reward/calls": 1.0, "reward/row/mean": 2.5}


def test_rows_wait_for_their_operations_turn_on_its_pool():
    """A reference that takes rows, on the actor's pool: the plan has the actor's log-probs before it."""
    graph = step_graph("grpo", reward="function", kl_in="loss", ref_takes="rows")
    calls = Calls(graph.select(["generate", "old_log_prob", "ref_log_prob"]))
    pool = SimpleNamespace(name="actor_side")
    handed_over: list[str] = []

    def log_probs(name: str) -> Callable[..., DataProtoFuture]:
        def call(data: BatchRef, blocking: bool) -> DataProtoFuture:
            rows = column(data, "responses")
            handed_over.append(f"{name} of {len(rows)} rows")
            written = stored({name: np.array(rows)})
            return calls.future(name, lambda: Outcome(written, (RankSpan(0, 20.0, 21.0, 0),)))

        return call

    actor = SimpleNamespace(compute_log_prob=log_probs("old_log_probs"), resource_pool=pool)
    ref = SimpleNamespace(compute_ref_log_prob=log_probs("ref_log_prob"), resource_pool=pool)
    calls.groups |= {"actor": actor, "ref": ref}
    result = calls.run(order={"actor_side": ("old_log_prob", "ref_log_prob")})
    assert handed_over == ["old_log_probs of 6 rows", "ref_log_prob of 6 rows"]
    assert column(result.batch, "ref_log_prob") == list(range(6))

    handed_over.clear()
    calls.run(order={"actor_side": ("ref_log_prob", "old_log_prob")})
    assert handed_over[0] == "ref_log_prob of 2 rows"
    assert handed_over[-1] == "old_log_probs of 6 rows"


def test_failed_rows_end_the_step_at_once():
    calls = Calls(graph_of(), failing=5)
    with pytest.raises(RuntimeError, match=r"rows \[4, 5\] failed"):
        calls.run()
    assert "generated" not in calls.log


def test_groups_of_another_number_of_rows_are_refused():
    with pytest.raises(ValueError, match="groups of 2 rows for a batch of 6"):
        Calls(graph_of()).run(groups=["a", "b"])
