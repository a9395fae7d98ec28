"""Calls that make parts of their result, and a step whose reward starts while others are generated."""

import concurrent.futures
import os
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rolemesh.engine.controller import Controller, StepResult
from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.errors import CallTimeout, WorkerDied, WorkerError
from rolemesh.engine.parts import Part, PartRef
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.ray import host
from rolemesh.engine.ray.blocks import fetch_batch, put_batch
from rolemesh.engine.ray.pools import ResourcePool
from rolemesh.engine.ray.process_pool import ProcessPool
from rolemesh.engine.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup
from rolemesh.engine.rewards.function import FunctionReward
from rolemesh.engine.rollout import SamplingOptions
from rolemesh.engine.worker import Worker
from rolemesh.engine.workers.rollout import RolloutSpec, RolloutWorker
from rolemesh.placement.graph import StepGraph
from rolemesh.placement.layout import Layout
from rolemesh.placement.steps import step_graph
from rolemesh.placement.timeline import Timeline
from tests.tiny import char_tokenizer, tiny_checkpoint

pytestmark = [pytest.mark.full, pytest.mark.alone]

N_ROWS, SAMPLES = 12, 4
SCORER = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.05)
    return {"score": len(solution_str) + ground_truth / 10, "length": len(solution_str)}
"""


def dies_after_a_second():
    """A part's blocks, in a process that ends once the driver has heard of the part's head."""
    time.sleep(1)
    os._exit(3)
    yield


class Parts(Worker):
    """`x` doubled, the last row of the share first, one row at a time."""

    @register(Dispatch.DP_COMPUTE_PROTO, parts=True)
    def doubled(self, data: DataProto, fails_at: int = -1, how: str = ""):
        for row in reversed(range(len(data))) if len(data) else [None]:
            rows = [] if row is None else [row]
            if fails_at in data.batch["x"][rows].tolist():
                if how == "raise":
                    raise KeyError("in the middle")
                if how == "die":
                    os._exit(3)
                time.sleep(3600)
            yield Part(rows, DataProto.from_dict({"x": data.batch["x"][rows] * 2}))

    @register(Dispatch.DP_COMPUTE_PROTO, parts=True)
    def ends_within_a_part(self, data: DataProto):
        pack = host.pack
        host.pack = lambda proto, cuts: (pack(proto, cuts)[0], dies_after_a_second())
        yield Part([0], data[:1])

    @register(Dispatch.DP_COMPUTE_PROTO, parts=True)
    def forgets(self, data: DataProto):
        yield Part([0], data[:1])


class Trained(RolloutWorker):
    """A rollout with the checkpoint's own weights."""

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self) -> None:
        model = AutoModelForCausalLM.from_pretrained(self.spec.path)
        self.engine.load_weights(model.named_parameters())
        self.version = 0


class Scores(Worker):
    """A function reward, as the worker of the role has it."""

    def __init__(self, path: str) -> None:
        self.reward = FunctionReward(path, char_tokenizer(), limit_s=30.0, workers=2)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_score(self, data: DataProto) -> DataProto:
        return self.reward.score(data)


@pytest.fixture(scope="module")
def pool(cluster):
    pool = ResourcePool([4], name_prefix="parts", device="cpu")
    yield pool
    pool.shutdown()


@pytest.fixture
def lost_pool(cluster):
    """A pool whose workers a test leaves dead or hanging."""
    pool = ResourcePool([4], name_prefix="lost", device="cpu")
    yield pool
    pool.shutdown()


@pytest.mark.parametrize(("dp", "n_rows"), [(4, 10), (2, 7), (4, 3)])
def test_parts_are_heard_of_as_they_are_made_and_come_back_in_order(pool: ResourcePool, dp: int, n_rows: int):
    layout = Layout(tp=4 // dp, dp=dp)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Parts), layout=layout, role=f"parts_{dp}_{n_rows}")
    heard: list[tuple[PartRef, bool]] = []
    x = torch.arange(n_rows)
    future = group.doubled(DataProto.from_dict({"x": x}), blocking=False)
    future.on_part(lambda part: heard.append((part, future.done())))
    assert future.get().batch["x"].tolist() == (2 * x).tolist()
    assert not any(done for _, done in heard)
    assert sorted(row for part, _ in heard for row in part.rows) == list(range(n_rows)), "a replica's tp once"
    for part, _ in heard:
        assert fetch_batch(part.ref).batch["x"].tolist() == [2 * row for row in part.rows]
    assert future.spans[0].nbytes_fetched > 0


def test_a_call_that_raises_after_some_parts_fails_as_any_other_and_the_pool_goes_on(pool: ResourcePool):
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Parts), role="raising")
    x = DataProto.from_dict({"x": torch.arange(8)})
    assert_fails_after_a_part(group, x, "raise", WorkerError)
    assert group.doubled(x).batch["x"].tolist() == list(range(0, 16, 2))


@pytest.mark.parametrize(("how", "error"), [("die", WorkerDied), ("hang", CallTimeout)])
def test_workers_lost_after_some_parts_fail_the_call_as_any_other(
    lost_pool: ResourcePool, how: str, error: type[Exception]
):
    group = RayWorkerGroup(lost_pool, RayClassWithInitArgs(Parts), role="parts")
    assert_fails_after_a_part(group, DataProto.from_dict({"x": torch.arange(8)}), how, error)


def assert_fails_after_a_part(group: RayWorkerGroup, x: DataProto, how: str, error: type[Exception]) -> None:
    made: concurrent.futures.Future[PartRef] = concurrent.futures.Future()
    future = group.doubled(x, fails_at=2, how=how, blocking=False, timeout_s=5)
    future.on_part(lambda part: made.done() or made.set_result(part))
    assert fetch_batch(made.result(timeout=60).ref).batch["x"].tolist()
    with pytest.raises(error, match="doubled"):
        future.get()


def test_a_part_whose_process_ended_before_its_blocks_came_is_never_told_of(lost_pool: ResourcePool):
    group = RayWorkerGroup(lost_pool, RayClassWithInitArgs(Parts), role="parts")
    heard: list[PartRef] = []
    future = group.ends_within_a_part(DataProto.from_dict({"x": torch.arange(8)}), blocking=False)
    future.on_part(heard.append)
    with pytest.raises(WorkerDied, match="ends_within_a_part"):
        future.get(timeout=60)
    assert heard == []


def test_rows_that_a_worker_forgets_are_an_error(pool: ResourcePool):
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Parts), role="forgetful")
    with pytest.raises(ValueError, match=r"a batch of 2 rows hold 1 rows; missing: \[1\]"):
        group.forgets(DataProto.from_dict({"x": torch.arange(8)}))


@pytest.fixture(scope="module")
def groups(cluster, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("models")
    (folder / "reward.py").write_text(SCORER)
    sampling = SamplingOptions(max_response_tokens=24, eos_ids=(2,), pad_id=0, max_batch_tokens=2 * (6 + 24))
    spec = RolloutSpec(str(tiny_checkpoint(folder / "actor", "llama")), "float32", 10**7, sampling)
    pools = [ResourcePool([2], name_prefix="generating", device="cpu"), ProcessPool("scoring")]
    rollout = RayWorkerGroup(pools[0], RayClassWithInitArgs(Trained, spec), role="rollout")
    scorer = RayClassWithInitArgs(Scores, f"{folder / 'reward.py'}:compute_score")
    reward = RayWorkerGroup(pools[1], scorer, role="reward")
    rollout.init_model()
    rollout.load_checkpoint()
    yield {"rollout": rollout, "reward": reward}
    for pool in pools:
        pool.shutdown()


def step(groups: dict[str, RayWorkerGroup], graph: StepGraph, *, overlap: bool = True) -> StepResult:
    ids = torch.randint(4, 100, (N_ROWS, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    prompts = DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": mask.cumsum(-1) - 1,
            "row_ids": torch.arange(N_ROWS),
        },
        {"reward_model": [{"ground_truth": row} for row in range(N_ROWS)], "uid": uids()},
    )
    return Controller(graph, groups, overlap=overlap).run(put_batch(prompts, {2}), groups=uids())


def uids() -> list[str]:
    return [str(row // SAMPLES) for row in range(N_ROWS)]


def graph_of(takes: str) -> StepGraph:
    graph = step_graph("grpo", reward="function", kl_in=None, reward_takes=takes)
    return graph.select(["generate", "reward"])


@pytest.mark.parametrize("takes", ["rows", "groups"])
def test_scoring_starts_before_generation_ends_and_changes_no_number(groups, takes: str, tmp_path: Path):
    apart = step(groups, graph_of(takes), overlap=False)
    result = step(groups, graph_of(takes))
    spans = [span for span in result.spans if span.name == "reward"]
    assert len([span for span in apart.spans if span.name == "reward"]) == 1 < len(spans)
    generated_s = max(span.end_s for span in result.spans if span.name == "generate")
    assert min(span.start_s for span in spans) < generated_s
    Timeline(result.spans).save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json").overlap_s("generate", "reward") > 0

    ours, theirs = fetch_batch(result.batch), fetch_batch(apart.batch)
    for name in ours.batch.keys() | theirs.batch.keys():
        assert torch.equal(ours.batch[name], theirs.batch[name]), name
    assert result.batch.tokens == apart.batch.tokens
    assert result.metrics.pop("reward/length/mean") == pytest.approx(apart.metrics.pop("reward/length/mean"))
    assert result.metrics == apart.metrics == {"reward/timeouts": 0, "reward/died": 0}
    inputs = result.batch.select({"reward_model", "uid"} & graph_of(takes)["reward"].reads)
    fetched, at_once = (
        sum(span.args["bytes_fetched"] for span in run.spans if span.name == "reward")
        for run in (result, apart)
    )
    again = (len(spans) - 1) * inputs.fetch_nbytes
    assert 0 < fetched <= at_once + again, "of what is generated each call fetches its own rows"
