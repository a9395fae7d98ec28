"""Sharing out and collecting, on handles kept in a plain dictionary instead of an object store."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from rolemesh.engine.batch_ref import BatchRef, pack, split_points, unpack
from rolemesh.engine.dispatch import (
    Dispatch,
    DispatchError,
    Execute,
    OutputCuts,
    Registration,
    collect,
    register,
    registered_methods,
    share,
)
from rolemesh.engine.protocol import DataProto
from rolemesh.placement.layout import Layout

LAYOUTS = [Layout(), Layout(dp=4), Layout(tp=2, dp=2), Layout(tp=2, pp=2, dp=3), Layout(pp=3, dp=2)]


@dataclass
class Group:
    layout: Layout

    @property
    def world_size(self) -> int:
        return self.layout.world


@dataclass
class Store:
    values: dict[Any, Any] = field(default_factory=dict)

    def put(self, proto: DataProto, cuts=()) -> BatchRef:
        manifest, blocks = pack(proto, cuts)
        handles = [len(self.values) + i for i in range(len(blocks))]
        self.values.update(zip(handles, blocks, strict=True))
        return manifest.stored(handles)

    def get(self, ref: BatchRef) -> DataProto:
        return unpack(ref, self.values)


@pytest.fixture
def store() -> Store:
    return Store()


def registration(mode, **options) -> Registration:
    class Registered:
        @register(dispatch_mode=mode, **options)
        def method(self) -> None: ...

    return registered_methods(Registered)["method"]


def numbered(n_rows: int) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(n_rows)}, {"name": np.array([f"row {i}" for i in range(n_rows)], dtype=object)}
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("n_rows", [0, 1, 2, 7, 512])
@pytest.mark.parametrize("mode", [Dispatch.DP_COMPUTE_PROTO, Dispatch.MEGATRON_COMPUTE_PROTO])
def test_any_batch_on_any_layout_comes_back_whole_and_in_order(store, layout, n_rows, mode):
    group, method = Group(layout), registration(mode)
    shares = share(method, group, [store.put(numbered(n_rows)), 3], {})
    sizes = [len(store.get(args[0])) for args in shares.args]
    assert max(sizes) - min(sizes) <= 1
    for replica in range(layout.dp):
        shards = {id(shares.args[rank][0]) for rank in layout.replica(replica)}
        assert len(shards) == 1, "the ranks of a replica share one shard"
    results = [
        store.put(DataProto.from_dict({"y": store.get(args[0]).batch["x"] * args[1]})) for args in shares.args
    ]
    whole = store.get(collect(method, group, shares, results))
    assert torch.equal(whole.batch["y"], torch.arange(n_rows) * 3)


def test_a_replica_without_rows_gets_the_columns_and_counts_for_nothing(store):
    group = Group(Layout(dp=4))
    metric = registration(Dispatch.DP_COMPUTE_METRIC)
    shares = share(metric, group, [store.put(numbered(2))], {})
    empty = store.get(shares.args[3][0])
    assert len(empty) == 0
    assert empty.batch["x"].dtype == torch.int64
    assert collect(metric, group, shares, [10, 20, float("nan"), float("nan")]) == [10, 20]


def test_results_are_taken_once_per_replica_from_its_last_stage(store):
    layout = Layout(tp=2, pp=2, dp=2)
    method = registration(Dispatch.DP_COMPUTE_METRIC)
    shares = share(method, Group(layout), [store.put(numbered(8))], {})
    assert collect(method, Group(layout), shares, list(range(8))) == [
        layout.collect_rank(0),
        layout.collect_rank(1),
    ]


@pytest.mark.parametrize("per_row", [0, 1, 3])
def test_own_partition_gives_results_in_the_callers_order(store, per_row):
    group, method = Group(Layout(tp=2, dp=3)), registration(Dispatch.DP_COMPUTE_PROTO)
    rows = [[6, 0, 3], [5], [1, 2, 4]]
    shares = share(method, group, [store.put(numbered(7))], {}, rows)
    results = []
    for (shard,) in shares.args:
        x = store.get(shard).batch["x"]
        results.append(store.put(DataProto.from_dict({"y": x.repeat_interleave(per_row)})))
    whole = store.get(collect(method, group, shares, results))
    assert whole.batch["y"].tolist() == np.repeat(np.arange(7), per_row).tolist()


def test_a_partition_may_come_from_the_manifest(store):
    def longest_first(batch: BatchRef, layout: Layout) -> list[list[int]]:
        order = np.argsort(batch.tokens)[::-1]
        return [order[i :: layout.dp].tolist() for i in range(layout.dp)]

    mask = torch.tril(torch.ones(5, 5, dtype=torch.int64))
    method = registration(Dispatch.DP_COMPUTE_PROTO, rows=longest_first)
    shares = share(
        method, Group(Layout(dp=2)), [store.put(DataProto.from_dict({"attention_mask": mask}))], {}
    )
    assert [part.tolist() for part in shares.rows] == [[4, 2, 0], [3, 1]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 1, 2]], "1 parts.*dp=2"),
        ([[0, 1], [1, 2]], "more than one place"),
        ([[0, 1], [3]], "0 to 3.*3 rows"),
    ],
)
def test_a_wrong_partition_is_refused_with_its_numbers(store, rows, message):
    method = registration(Dispatch.DP_COMPUTE_PROTO)
    with pytest.raises(DispatchError, match=message):
        share(method, Group(Layout(dp=2)), [store.put(numbered(3))], {}, rows)


def test_the_other_modes_repeat_or_take_lists(store):
    group = Group(Layout(tp=2, dp=2))
    one = registration(Dispatch.ONE_TO_ALL)
    shares = share(one, group, ["a"], {"k": 1})
    assert shares.args == [("a",)] * 4
    assert shares.kwargs == [{"k": 1}] * 4
    assert collect(one, group, shares, [1, 2, 3, 4]) == [1, 2, 3, 4]

    each = registration(Dispatch.ALL_TO_ALL)
    assert share(each, group, [[1, 2, 3, 4]], {}).args == [(1,), (2,), (3,), (4,)]
    with pytest.raises(DispatchError, match="lists of 4 entries, got 2"):
        share(each, group, [[1, 2]], {})

    replica = registration(Dispatch.DP_COMPUTE)
    assert share(replica, group, [["a", "b"]], {}).args == [("a",), ("a",), ("b",), ("b",)]
    assert collect(replica, group, share(replica, group, [], {}), list("wxyz")) == ["w", "y"]

    zero = registration(Dispatch.RANK_ZERO)
    shares = share(zero, group, ["a"], {})
    assert zero.execute is Execute.RANK_ZERO
    assert shares.args == [("a",)]
    assert collect(zero, group, shares, ["only"]) == "only"


def test_with_func_wants_a_function_first_and_repeats_it(store):
    method = registration(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    shares = share(method, Group(Layout(dp=2)), [len, store.put(numbered(4))], {})
    assert [args[0] for args in shares.args] == [len, len]
    assert [args[1].n_rows for args in shares.args] == [2, 2]
    with pytest.raises(DispatchError, match="function as its first argument"):
        share(method, Group(Layout(dp=2)), [store.put(numbered(4))], {})


def test_batches_of_one_call_must_agree_in_rows(store):
    method = registration(Dispatch.DP_COMPUTE_PROTO)
    with pytest.raises(DispatchError, match=r"\[3, 4\]"):
        share(method, Group(Layout(dp=2)), [store.put(numbered(3)), store.put(numbered(4))], {})


def test_custom_functions_decide_both_ways(store):
    method = registration(
        {
            "dispatch_fn": lambda group, n: ([list(range(n, n + group.world_size))], {}),
            "collect_fn": lambda group, values: sum(values),
        }
    )
    group = Group(Layout(dp=3))
    shares = share(method, group, [5], {})
    assert shares.args == [(5,), (6,), (7,)]
    assert collect(method, group, shares, [5, 6, 7]) == 18
    with pytest.raises(DispatchError, match="exactly dispatch_fn and collect_fn"):
        registration({"dispatch_fn": len})


@pytest.mark.parametrize(
    ("n_rows", "producer", "consumer"), [(1001, 4, 2), (1001, 2, 3), (1024, 3, 4), (5, 4, 3)]
)
def test_blocks_cut_for_known_consumers_are_fetched_whole(store, n_rows, producer, consumer):
    parts = np.array_split(np.arange(n_rows), producer)
    cuts = [OutputCuts(part, n_rows, (1, producer, consumer)) for part in parts]
    for part, cut in zip(parts, cuts, strict=True):
        if len(part):
            expected = split_points(n_rows, (1, producer, consumer), int(part[0]), int(part[-1]) + 1)
            assert cut.of(len(part)) == expected
    whole = BatchRef.concat(
        [store.put(numbered(n_rows)[part], cut.of(len(part))) for part, cut in zip(parts, cuts, strict=True)]
    )
    for shard in whole.chunk(consumer):
        assert shard.fetch_nbytes <= 1.1 * shard.nbytes


def test_registered_methods_are_found_in_bases_too():
    class Base:
        @register(Dispatch.ONE_TO_ALL, blocking=False)
        def inherited(self) -> None: ...

    class Derived(Base):
        @register(Dispatch.DP_COMPUTE_PROTO)
        def own(self) -> None: ...

        def unmarked(self) -> None: ...

    found = registered_methods(Derived)
    assert set(found) == {"inherited", "own"}
    assert found["own"].blocking
    assert not found["inherited"].blocking
