"""Calls that succeed: what ranks receive, what moves, what overlaps."""

import asyncio
import os
import time

import numpy as np
import psutil
import pytest
import ray
import torch
import torch.distributed as dist

from rolemesh.engine.dispatch import Dispatch, Execute, register
from rolemesh.engine.errors import PoolBroken, WorkerError
from rolemesh.engine.future import as_completed
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.ray.blocks import batch_future
from rolemesh.engine.ray.pools import ResourcePool, ResourcePoolManager
from rolemesh.engine.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup
from rolemesh.engine.read_only import ReadOnlyError
from rolemesh.engine.roles import Role
from rolemesh.engine.worker import Worker
from rolemesh.kernels import gae
from rolemesh.kernels.forms import form_of
from rolemesh.placement.layout import Layout, LayoutError
from rolemesh.placement.pools import PlacementError

pytestmark = [pytest.mark.full, pytest.mark.alone]


class Plain(Worker):
    def __init__(self, scale: int = 1) -> None:
        self.scale = scale
        self.seen: DataProto | None = None
        self.world = dist.get_world_size()  # the world is there before the constructor

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def scaled(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(
            {"x": batch.batch["x"] * self.scale},
            {"rank": np.full(len(batch), self.rank, dtype=object)},
        )

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def echo(self, batch: DataProto) -> DataProto:
        self.seen = batch
        return batch

    @register(Dispatch.DP_COMPUTE_METRIC)
    def rows(self, batch: DataProto) -> int:
        return len(batch)

    @register(Dispatch.DP_COMPUTE_METRIC, materialize_futures=False)
    def sum_of_y(self, handle) -> int:  # BatchRef: an annotation the worker need not import
        return int(self.context.fetch(handle.select(["y"])).batch["y"].sum())

    @register(Dispatch.ONE_TO_ALL)
    def advantages(self) -> None:
        gae(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3), gamma=1.0, lam=1.0)

    @register(Dispatch.ONE_TO_ALL)
    def place(self) -> dict:
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
        return {
            "rank": self.rank,
            "coords": tuple(self.layout.coords(self.rank)),
            "pid": os.getpid(),
            "world": self.world,
            "leaked": [name for name in names if name in os.environ],
            "collective_timeout_s": self.context.collective_timeout_s,
            "threads": (os.environ["OMP_NUM_THREADS"], torch.get_num_threads()),
        }

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def sleep(self, seconds: float) -> None:
        self.context.phase("asleep")
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def shared(self, batch: DataProto) -> tuple[int, bool]:
        column = batch.batch["x"]
        try:
            column[0, 0] = -1
            refused = False
        except ReadOnlyError:
            refused = True
        return int(column[0, 0]), refused

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def leader(self) -> int:
        return self.rank

    @register(
        dispatch_mode={
            "dispatch_fn": lambda group, batch: ([batch.chunk(group.world_size)], {}),
            "collect_fn": lambda group, values: sum(values),
        }
    )
    def custom(self, batch: DataProto) -> int:
        return int(batch.batch["x"].sum()) * 10**self.rank

    @register(Dispatch.ONE_TO_ALL)
    def total(self, numbers: list[int]) -> int:
        return sum(numbers)


@pytest.fixture(scope="module")
def groups(cluster):
    """Pool a with four ranks and two roles of different layouts; pool b with two ranks."""
    manager = ResourcePoolManager(
        {"a": [4], "b": [2]}, {Role.Actor: "a", Role.RefPolicy: "a", Role.Critic: "b"}
    )
    manager.create_resource_pool()
    on = manager.get_resource_pool
    built = {
        "actor": RayWorkerGroup(
            on(Role.Actor), RayClassWithInitArgs(Plain, scale=2), layout=Layout(tp=2, dp=2), role="actor"
        ),
        "ref": RayWorkerGroup(on(Role.RefPolicy), RayClassWithInitArgs(Plain, 3), role="ref"),
        "critic": RayWorkerGroup(on(Role.Critic), RayClassWithInitArgs(Plain, 5), role="critic"),
    }
    yield built
    manager.shutdown()


def numbered(n_rows: int, width: int = 1) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(n_rows)[:, None].repeat(1, width)})


def test_roles_of_a_pool_share_its_processes_each_with_its_own_layout(groups):
    actor, ref, critic = (groups[role].place() for role in ("actor", "ref", "critic"))
    assert [place["pid"] for place in actor] == [place["pid"] for place in ref] == groups["actor"].pids
    assert not {place["pid"] for place in critic} & {place["pid"] for place in actor}
    assert [place["world"] for place in (*actor, *critic)] == [4, 4, 4, 4, 2, 2]
    assert [place["coords"] for place in actor] == [(0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 0, 0), (0, 1, 0, 1)]
    assert [place["coords"] for place in ref] == [(0, rank, 0, 0) for rank in range(4)]


def test_threads_follow_the_users_choice_or_the_cores(groups):
    cores = int(os.environ.get("OMP_NUM_THREADS") or max(1, os.cpu_count() // 6))
    assert {place["threads"] for place in groups["ref"].place()} == {(str(cores), cores)}


def test_a_call_names_the_kernels_that_each_rank_ran(groups):
    future = groups["ref"].advantages(blocking=False)
    future.get(60)
    assert [span.kernels for span in future.spans] == [(f"gae/{form_of(torch.device('cpu'))}",)] * 4
    other = groups["ref"].scaled(numbered(4))
    other.get(60)
    assert [span.kernels for span in other.spans] == [()] * 4


def test_the_drivers_choice_of_kernels_holds_on_a_cluster_that_ran_before(cluster, monkeypatch):
    monkeypatch.setenv("ROLEMESH_KERNELS", "reference")
    pool = ResourcePool([1], name_prefix="plain")
    try:
        future = RayWorkerGroup(pool, RayClassWithInitArgs(Plain)).advantages(blocking=False)
        future.get(60)
    finally:
        pool.shutdown()
    assert future.spans[0].kernels == ("gae/reference",)


@pytest.mark.parametrize("n_rows", [0, 1, 2, 7, 206])
def test_any_number_of_rows_comes_back_in_order(groups, n_rows):
    batch = numbered(n_rows)
    for role, scale in (("actor", 2), ("ref", 3), ("critic", 5)):
        result = groups[role].scaled(batch).get(60)
        assert torch.equal(result.batch["x"], batch.batch["x"] * scale), role
        collecting = {groups[role].layout.collect_rank(i) for i in range(groups[role].layout.dp)}
        assert set(result.non_tensor_batch["rank"]) <= collecting


def test_chained_calls_return_at_once_and_follow_their_inputs(groups):
    start = time.monotonic()
    groups["actor"].sleep(1.5)
    first = groups["actor"].scaled(numbered(7))
    second = groups["critic"].scaled(first)
    third = groups["ref"].scaled(second.chunk(2)[1])
    assert time.monotonic() - start < 0.5
    assert not first.done()
    assert third.get(60).batch["x"].ravel().tolist() == [row * 2 * 5 * 3 for row in (4, 5, 6)]


def test_calls_on_two_pools_overlap_and_on_one_pool_take_turns(groups):
    start = time.monotonic()
    apart = [groups["actor"].sleep(2), groups["critic"].sleep(2)]
    order = [future.name for future in as_completed([groups["critic"].sleep(0.1), *apart], timeout=60)]
    assert time.monotonic() - start < 3.5
    assert order[-1] == "critic.sleep"
    assert min(future.spans[0].end_s for future in apart) - max(f.spans[0].start_s for f in apart) > 1.5
    together = [groups["actor"].sleep(0.3), groups["ref"].sleep(0.3)]
    for future in together:
        future.get(60)
    assert together[1].spans[0].start_s >= max(span.end_s for span in together[0].spans)


def test_blocking_may_be_chosen_per_call(groups):
    assert groups["critic"].scaled(numbered(3), blocking=True).batch["x"].ravel().tolist() == [0, 5, 10]
    future = groups["critic"].rows(numbered(3), blocking=False)
    assert future.get(60) == [2, 1]


def test_await_and_other_modes(groups):
    async def both() -> tuple:
        return await asyncio.gather(*(groups[role].scaled(numbered(2)) for role in ("actor", "critic")))

    assert [batch.batch["x"][1].item() for batch in asyncio.run(both())] == [2, 5]
    assert groups["critic"].leader() == 0
    assert groups["critic"].custom(numbered(4)) == 1 + 50
    assert groups["critic"].custom(groups["ref"].scaled(numbered(4))) == 3 + 150


def test_replicas_without_rows_add_no_metric(groups):
    assert groups["ref"].rows(numbered(2)) == [1, 1]


def test_own_partition_reaches_the_ranks_and_results_come_back_in_order(groups):
    result = groups["critic"].scaled(numbered(5), rows=[[4, 0], [3, 1, 2]], blocking=True)
    assert result.batch["x"].ravel().tolist() == [0, 5, 10, 15, 20]
    assert result.non_tensor_batch["rank"].tolist() == [0, 1, 1, 1, 0]


def test_consumers_fetch_the_blocks_of_their_rows_and_columns_only(groups):
    n_rows, width = 301, 4096
    columns = {f"c{i}": torch.full((n_rows, width), i, dtype=torch.float32) for i in range(10)}
    produced = groups["ref"].echo(DataProto.from_dict(columns))
    produced.get(60)
    for role in ("actor", "critic"):  # dp 4 to dp 2
        consumed = groups[role].echo(produced.select(["c1", "c7"]))
        assert len(consumed.get(60)) == n_rows
        wanted = produced.ref().select(["c1", "c7"]).chunk(2)
        for span in consumed.spans:
            replica = groups[role].layout.coords(span.rank).dp
            assert span.nbytes_fetched <= 1.1 * wanted[replica].nbytes


def test_a_handle_may_be_fetched_in_parts_by_the_method(groups):
    batch = batch_future(DataProto.from_dict({"x": torch.zeros(6, 50_000), "y": torch.arange(6)}), (2,))
    future = groups["critic"].sum_of_y(batch, blocking=False)
    assert future.get(60) == [3, 12]
    assert max(span.nbytes_fetched for span in future.spans) < 100


def test_one_object_serves_all_ranks_of_a_replica(groups):
    payload = DataProto.from_dict({"x": torch.zeros(8, 2**18)})  # 8 MiB
    before = _store_bytes()
    future = groups["actor"].echo(payload)
    blocks = future.ref(60).blocks
    stored = _store_bytes() - before
    assert sum(block.nbytes for block in blocks) == 8 * 2**20
    assert stored <= 3.1 * 8 * 2**20, "the batch once, and the result of both ranks of each replica"


def _store_bytes() -> int:
    total = ray.cluster_resources()["object_store_memory"]
    time.sleep(1.5)  # Ray reports the store's use once a second
    return int(total - ray.available_resources()["object_store_memory"])


def test_no_rank_can_write_into_what_others_see(groups):
    batch = numbered(4, width=40_000)
    assert groups["actor"].shared(batch_future(batch)) == [(0, True)] * 4
    received = groups["actor"].echo(batch).get(60)
    with pytest.raises(ReadOnlyError):
        received.batch["x"].add_(1)
    assert torch.equal(groups["ref"].scaled(batch).get(60).batch["x"], batch.batch["x"] * 3)


def test_the_drivers_memory_does_not_grow_with_what_workers_exchange(groups):
    def step() -> None:
        batch = batch_future(DataProto.from_dict({"x": torch.zeros(64, 2**18)}), (2, 4))  # 64 MiB
        a = groups["actor"].echo(batch)
        groups["critic"].echo(groups["ref"].echo(a)).ref(60)

    def private_bytes() -> int:
        memory = psutil.Process().memory_info()
        return memory.rss - memory.shared  # without the object store, which is mapped

    step()
    start = private_bytes()
    for _ in range(5):
        step()
    assert private_bytes() - start < 16 * 2**20


def test_ranks_answer_with_stacks_while_they_compute(groups):
    future = groups["critic"].sleep(2)
    time.sleep(0.5)
    start = time.monotonic()
    stacks, states = groups["critic"].stacks(), groups["critic"].states()
    assert time.monotonic() - start < 1.5
    assert not future.done()
    assert all("time.sleep(seconds)" in stack for stack in stacks.values())
    assert [states[rank].doing for rank in (0, 1)] == ["critic.sleep (asleep)"] * 2
    future.get(60)
    assert str(groups["critic"].states()[0]).startswith("between operations, after critic.sleep, for 0 s, ")


def test_a_wrong_layout_or_a_second_role_of_one_name_is_refused(groups):
    pool = groups["critic"].resource_pool
    with pytest.raises(LayoutError, match=r"tp=4.*4 ranks.*2 processes"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Plain), layout=Layout(tp=4), role="x")
    with pytest.raises(PlacementError, match="'critic' already"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Plain), role="critic")
    with pytest.raises(PlacementError, match="max_colocate_count=1"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Plain), role="apart", own_process=True)


def test_a_role_may_have_its_own_process_on_a_shared_device(cluster):
    pool = ResourcePool([1], max_colocate_count=2, name_prefix="shared", collective_timeout_s=77.0)
    try:
        one = RayWorkerGroup(pool, RayClassWithInitArgs(Plain, 2), role="one")
        two = RayWorkerGroup(pool, RayClassWithInitArgs(Plain, 3), role="two", own_process=True)
        assert one.pids != two.pids
        assert two.place()[0]["collective_timeout_s"] == 77.0
        assert two.scaled(one.scaled(numbered(3))).get(60).batch["x"].ravel().tolist() == [0, 6, 12]
    finally:
        pool.shutdown()
    with pytest.raises(PoolBroken, match="shut down"):
        one.place()


def test_an_error_leaves_a_pool_that_works(groups):
    with pytest.raises(WorkerError, match=r"critic rank \d on node .* failed in total"):
        groups["critic"].total(3)
    assert groups["critic"].rows(numbered(2)) == [1, 1]
