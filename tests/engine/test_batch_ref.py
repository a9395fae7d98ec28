import dataclasses
import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolemesh.engine.batch_ref import BatchRef, pack, split_points, unpack
from rolemesh.engine.columns import values_equal
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.read_only import ReadOnlyError, ReadOnlyTensor


class Store:
    """A block store in a dict; every value gets a handle of its own."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}

    def put(self, proto: DataProto, cuts=()) -> BatchRef:
        manifest, values = pack(proto, cuts)
        handles = [f"block{len(self.values) + ordinal}" for ordinal in range(len(values))]
        self.values.update(zip(handles, values, strict=True))
        return manifest.stored(handles, node="n0")

    def get(self, ref: BatchRef) -> DataProto:
        return unpack(ref, {block.ref: self.values[block.ref] for block in ref.blocks})


def batch_of(n_rows: int, width: int = 4, seed: int = 0) -> DataProto:
    rng = torch.Generator().manual_seed(seed)
    tensors = {
        "input_ids": torch.randint(0, 1000, (n_rows, width), generator=rng),
        "attention_mask": torch.randint(0, 2, (n_rows, width), generator=rng),
        "values": torch.randn(n_rows, width, generator=rng).to(torch.bfloat16),
        "score": torch.randn(n_rows, generator=rng),
        "flag": torch.randn(n_rows, generator=rng) > 0,
    }
    return DataProto.from_dict(
        tensors, {"uid": [f"{seed}-{row}" for row in range(n_rows)]}, {"temperature": 1.0}
    )


def assert_same(left: DataProto, right: DataProto) -> None:
    assert len(left) == len(right)
    assert left.meta_info == right.meta_info
    assert sorted(left.columns) == sorted(right.columns)
    for name, column in right.non_tensor_batch.items():
        assert values_equal(left.non_tensor_batch[name], column)
    for name in right.batch.keys() if right.batch is not None else ():
        assert left.batch[name].dtype == right.batch[name].dtype
        assert torch.equal(left.batch[name].clone(), right.batch[name])


def random_operation(pick: random.Random, ref: BatchRef, data: DataProto, store: Store):
    """One random operation, on the handle and on the data."""
    n_rows = len(data)
    match pick.choice(["slice", "take", "mask", "chunk", "concat", "select", "union", "rename"]):
        case "slice":
            start, stop = pick.randint(-2, n_rows), pick.randint(0, n_rows + 2)
            return ref.slice(start, stop), data.slice(start, stop)
        case "take":
            rows = [pick.randrange(n_rows) for _ in range(pick.randint(0, 12))] if n_rows else []
            return ref.take(rows), data.select_idxs(rows)
        case "mask":
            mask = np.array([pick.random() < 0.7 for _ in range(n_rows)], dtype=bool)
            return ref.take(mask), data[mask]
        case "chunk":
            parts = pick.randint(1, 4)
            part = pick.randrange(parts)
            return ref.chunk(parts)[part], data.chunk(parts)[part]
        case "concat":
            parts = pick.randint(1, 4)
            order = pick.sample(range(parts), parts)
            refs, datas = ref.chunk(parts), data.chunk(parts)
            return BatchRef.concat([refs[i] for i in order]), DataProto.concat([datas[i] for i in order])
        case "select":
            keep = [name for name in data.columns if name == "score" or pick.random() < 0.8]
            tensors, objects = (
                [n for n in keep if n in part]
                for part in (ref_kinds(ref, "tensor"), ref_kinds(ref, "object"))
            )
            return ref.select(keep), data.select(tensors, objects)
        case "union":
            name = f"extra{pick.randrange(10**9)}"
            extra = DataProto.from_dict({name: torch.randn(n_rows, 2)}, meta_info={name: 1})
            return ref.union(store.put(extra, [n_rows // 2])), data.slice().union(extra)
        case "rename":
            name = f"score{pick.randrange(10**9)}"
            renamed = ref.rename({"score": name}).rename({name: "score"})
            return renamed, data


def ref_kinds(ref: BatchRef, kind: str) -> list[str]:
    return [name for name, column in ref.columns.items() if column.kind == kind]


@settings(max_examples=150, deadline=None)
@given(
    n_rows=st.integers(0, 30),
    cuts=st.lists(st.integers(-1, 31), max_size=5),
    seed=st.integers(0, 10**9),
    n_ops=st.integers(1, 8),
)
def test_operations_on_handles_equal_the_same_on_data(n_rows, cuts, seed, n_ops):
    store, pick, data = Store(), random.Random(seed), batch_of(n_rows)
    ref = store.put(data, cuts)
    for _ in range(n_ops):
        ref, data = random_operation(pick, ref, data, store)
    assert_same(store.get(ref), data)
    if "attention_mask" in data.columns:
        assert list(ref.tokens) == data.batch["attention_mask"].sum(-1).tolist()
    assert ref.fetch_nbytes == sum(block.nbytes for block in ref.blocks)


@pytest.mark.parametrize("n_rows", [1024, 1001, 5, 2])
@pytest.mark.parametrize(("producer_dp", "consumer_dp"), [(4, 2), (2, 3), (3, 4), (1, 4), (4, 1)])
def test_consumers_over_fetch_nothing_when_blocks_end_where_they_cut(n_rows, producer_dp, consumer_dp):
    store, data = Store(), batch_of(n_rows, width=64)
    sizes = {producer_dp, consumer_dp}
    parts, start = [], 0
    for shard in data.chunk(producer_dp):
        stop = start + len(shard)
        parts.append(store.put(shard, split_points(n_rows, sizes, start, stop)))
        start = stop
    whole = BatchRef.concat(parts)
    assert_same(store.get(whole), data)
    for shard, expected in zip(whole.chunk(consumer_dp), data.chunk(consumer_dp), strict=True):
        assert shard.fetch_nbytes == shard.nbytes
        assert_same(store.get(shard), expected)


def test_a_consumer_of_two_columns_fetches_two_columns():
    ref = Store().put(batch_of(1000, width=512), split_points(1000, [2, 4]))
    two = ref.select(["score", "flag"]).chunk(4)[1]
    assert two.fetch_nbytes == two.nbytes == 250 * (4 + 1)


def test_split_points_are_the_boundaries_of_every_dp_size():
    assert split_points(1001, [2, 3]) == (334, 501, 668)
    assert split_points(1001, [2, 3], start=334, stop=668) == (167,)
    assert split_points(2, [4]) == (1,)
    assert split_points(0, [4]) == ()


def test_a_column_in_one_block_is_the_blocks_memory_and_read_only():
    store, data = Store(), batch_of(8)
    ref = store.put(data, [4])
    received = store.get(ref.slice(4, 8)).batch["values"]
    assert received.data_ptr() == data.batch["values"][4:].data_ptr()
    assert isinstance(received, ReadOnlyTensor)
    with pytest.raises(ReadOnlyError, match="clone"):
        received += 1
    with pytest.raises(ReadOnlyError):
        store.get(ref).batch["values"].zero_()


def test_chunks_put_together_again_are_one_piece():
    ref = Store().put(batch_of(10))
    again = BatchRef.concat(ref.chunk(3))
    assert again == ref


def test_a_0_row_shard_keeps_columns_and_dtypes_and_fetches_nothing():
    store, data = Store(), batch_of(2)
    last = store.put(data).chunk(4)[3]
    assert (last.fetch_nbytes, last.blocks, last.tokens) == (0, (), ())
    empty = store.get(last)
    assert_same(empty, data[[]])
    assert_same(store.get(BatchRef.concat([store.put(empty), store.put(data)])), data)


def test_pop_gives_the_named_columns_and_the_others():
    popped, rest = Store().put(batch_of(3)).pop(["uid"])
    assert (list(popped.columns), "uid" in rest.columns, len(rest.columns)) == (["uid"], False, 5)


def test_meta_follows_the_rules_of_the_batch_itself():
    store = Store()
    parts = [
        batch_of(2).union(DataProto(meta_info={"timing.gen": t, "metrics": {"loss": t}})) for t in (1.0, 2.0)
    ]
    merged = BatchRef.concat([store.put(part) for part in parts])
    assert merged.meta_info == DataProto.concat(parts).meta_info
    merged.slice(0, 1).meta_info["metrics"]["loss"].append(3.0)
    assert merged.meta_info["metrics"]["loss"] == [1.0, 2.0]
    with pytest.raises(ValueError, match="'eos': 2 and 3"):
        BatchRef.concat([store.put(DataProto(meta_info={"eos": eos})) for eos in (2, 3)])


def test_what_does_not_fit_together_is_an_error_that_says_why():
    store, wide = Store(), batch_of(2, width=7)
    ref = store.put(batch_of(2))
    with pytest.raises(ValueError, match=r"'input_ids' is int64 \[4\] .* int64 \[7\]"):
        BatchRef.concat([ref, store.put(wide)])
    with pytest.raises(ValueError, match="uid"):
        BatchRef.concat([ref, ref.pop(["uid"])[1]])
    with pytest.raises(ValueError, match="select or rename"):
        ref.union(store.put(batch_of(2, seed=1)))
    with pytest.raises(ValueError, match="2 rows with 3 rows"):
        ref.union(store.put(batch_of(3)))
    with pytest.raises(KeyError, match=r"nope.*input_ids"):
        ref.select(["nope"])
    with pytest.raises(ValueError, match=r"'o'.*pickled"):
        pack(DataProto.from_dict(non_tensors={"o": [lambda: 0]}))
    with pytest.raises(ValueError, match="rows"):
        dataclasses.replace(ref, n_rows=5)


def test_a_manifest_is_small_and_travels():
    ref = Store().put(batch_of(1001, width=2048), split_points(1001, [2, 3, 4]))
    assert pickle.loads(pickle.dumps(ref)) == ref
    assert len(pickle.dumps(ref)) < 20_000


def test_rows_taken_in_any_order_coalesce_into_runs():
    ref = Store().put(batch_of(20), [10])
    taken = ref.take([*range(5, 15), 3, 4, 4]).columns["score"]
    assert [(piece.start, piece.stop) for piece in taken.pieces] == [(5, 10), (0, 5), (3, 5), (4, 5)]
    assert len({piece.block.ref for piece in itertools.chain(taken.pieces)}) == 2
