import itertools
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rolemesh.engine.protocol import (
    DataProto,
    DataProtoItem,
    pad_dataproto_to_divisor,
    union_numpy_dict,
    unpad_dataproto,
)


def batch_of(n_rows: int, **meta) -> DataProto:
    tensors = {
        "ids": torch.arange(n_rows * 4).view(n_rows, 4),
        "score": torch.arange(n_rows).to(torch.bfloat16),
    }
    objects = {
        "uid": [f"u{row}" for row in range(n_rows)],
        "turns": [["a"] * (row % 3) for row in range(n_rows)],
    }
    return DataProto.from_dict(tensors, objects, meta)


def rows_of(data: DataProto) -> list[int]:
    """The original row numbers, after checking that every column agrees on them."""
    rows = (data.batch["ids"][:, 0] // 4).tolist()
    assert data.batch["score"].tolist() == [float(torch.tensor(row).to(torch.bfloat16)) for row in rows]
    assert data.non_tensor_batch["uid"].tolist() == [f"u{row}" for row in rows]
    assert [len(turns) for turns in data.non_tensor_batch["turns"]] == [row % 3 for row in rows]
    return rows


@pytest.mark.parametrize(("n_rows", "parts"), [(512, 6), (2, 4), (206, 4), (1001, 3), (0, 2)])
def test_any_number_of_rows_cuts_into_any_number_of_parts_and_back(n_rows, parts):
    chunks = batch_of(n_rows).chunk(parts)
    assert [len(chunk) for chunk in chunks] == [
        len(part) for part in np.array_split(np.arange(n_rows), parts)
    ]
    assert all(chunk.batch["score"].dtype == torch.bfloat16 for chunk in chunks)
    assert rows_of(DataProto.concat(chunks)) == list(range(n_rows))


def test_split_keeps_a_short_last_part():
    parts = batch_of(146).split(4)
    assert [len(part) for part in parts] == [4] * 36 + [2]


@pytest.mark.parametrize(("n_rows", "divisor", "padded"), [(512, 6, 516), (2, 4, 4), (5, 5, 5), (1, 7, 7)])
def test_padding_to_a_divisor_is_undone_in_the_original_order(n_rows, divisor, padded):
    data, pad_size = pad_dataproto_to_divisor(batch_of(n_rows), divisor)
    assert (len(data), pad_size) == (padded, padded - n_rows)
    assert rows_of(unpad_dataproto(data, pad_size)) == list(range(n_rows))


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(1, 4), [1, 2, 3]),
        (slice(None, None, 2), [0, 2, 4]),
        (slice(None, None, -1), [4, 3, 2, 1, 0]),
        ([4, 0, -1], [4, 0, 4]),
        ([True, False, False, True, False], [0, 3]),
        (np.array([2, 1]), [2, 1]),
        (np.array([False, True, True, False, False]), [1, 2]),
        (torch.tensor([3, 3]), [3, 3]),
        (torch.tensor([False] * 4 + [True]), [4]),
        ([], []),
        (np.zeros(5, dtype=bool), []),
    ],
)
def test_indexing_selects_the_same_rows_of_every_column(index, rows):
    assert rows_of(batch_of(5)[index]) == rows


def test_an_integer_gives_one_row_without_a_batch_dimension():
    item = batch_of(3, step=1)[-1]
    assert isinstance(item, DataProtoItem)
    assert item.batch["ids"].tolist() == [8, 9, 10, 11]
    assert (item.non_tensor_batch["uid"], item.meta_info) == ("u2", {"step": 1})


@pytest.mark.parametrize("index", [5, -6, [0, 5], [True, False], [0.5], "ids"])
def test_an_index_outside_the_batch_is_an_error(index):
    with pytest.raises((IndexError, TypeError)):
        batch_of(5)[index]


@pytest.mark.parametrize(
    "derive",
    [
        lambda data: data.chunk(2),
        lambda data: [data.slice(0, 2)],
        lambda data: [data.select(["ids"])],
        lambda data: [data.select_idxs([0])],
        lambda data: [data.repeat(2)],
        lambda data: [DataProto.concat([data, data])],
        lambda data: [data[0]],
        lambda data: list(data.make_iterator(2, 1)),
    ],
)
def test_results_share_no_mutable_meta(derive):
    data = batch_of(4, n=1, nested={"seen": [0]})
    first, *others = derive(data)
    first.meta_info["n"] = 2
    first.meta_info["nested"]["seen"].append(1)
    for other in [data, *others]:
        assert other.meta_info == {"n": 1, "nested": {"seen": [0]}}


def test_columns_taken_from_a_selection_stay_in_its_source():
    data = batch_of(4)
    data.select().pop(["ids"], ["uid"])
    assert data.columns == ("ids", "score", "uid", "turns")


def test_concat_takes_the_slowest_timing_and_lists_metrics():
    metas = [
        {"timing.gen": 73.946373, "timing": {"gen": 1.0}, "metrics": {"loss": 0.5}, "eos": 2, "only": "here"},
        {"timing.gen": 73.946381, "timing": {"gen": 3.0, "sync": 1.0}, "metrics": [{"loss": 0.6}], "eos": 2},
        {"metrics": None},
    ]
    merged = DataProto.concat([batch_of(2, **meta) for meta in metas]).meta_info
    assert merged == {
        "timing.gen": 73.946381,
        "timing": {"gen": 3.0, "sync": 1.0},
        "metrics": {"loss": [0.5, 0.6]},
        "eos": 2,
        "only": "here",
    }


def test_concat_of_concats_lists_metrics_flat():
    parts = [batch_of(1, metrics={"loss": float(part)}) for part in range(4)]
    nested = DataProto.concat([DataProto.concat(parts[:2]), DataProto.concat(parts[2:])])
    assert nested.meta_info["metrics"] == {"loss": [0.0, 1.0, 2.0, 3.0]}


@pytest.mark.parametrize("error", [ValueError, AssertionError])
def test_conflicting_meta_names_the_key(error):
    with pytest.raises(error, match="'eos': 2 and 3"):
        DataProto.concat([batch_of(2, eos=2), batch_of(2, eos=3)])
    with pytest.raises(error, match="'eos': 2 and 3"):
        batch_of(2, eos=2).union(batch_of(2, eos=3))


def test_concat_loses_no_rows_and_no_columns():
    parts = [DataProto.from_dict({"x": torch.ones(3)}), DataProto.from_dict({"x": torch.ones(2)})]
    assert len(DataProto.concat(parts)) == 5
    with pytest.raises(ValueError, match=r"\['y'\].*part 1"):
        DataProto.concat([parts[0], DataProto.from_dict({"x": torch.ones(2), "y": torch.ones(2)})])
    with pytest.raises(ValueError, match=r"'x' is float32 \[\] .* part 0 and int64 \[\] .* part 1"):
        DataProto.concat([parts[0], DataProto.from_dict({"x": torch.ones(2, dtype=torch.int64)})])
    with pytest.raises(ValueError, match=r"'x' is float32 \[\] .* float32 \[7\]"):
        DataProto.concat([parts[0], DataProto.from_dict({"x": torch.ones(2, 7)})])


def test_union_accepts_equal_columns_that_hold_nan():
    nan = float("nan")
    tensors = {"x": torch.tensor([1.0, nan])}
    objects = {"o": np.array([{"acc": nan}, [nan, None]], dtype=object)}
    left, right = (DataProto.from_dict(tensors, dict(objects), {"m": nan}) for _ in range(2))
    assert left.union(right).columns == ("x", "o")
    assert union_numpy_dict({"a": np.array([nan])}, {"a": np.array([nan])})["a"].shape == (1,)


def test_union_of_different_columns_of_one_name_is_an_error():
    other = batch_of(3)
    other.batch["ids"] = other.batch["ids"] + 1
    with pytest.raises(ValueError, match="ids"):
        batch_of(3).union(other)
    with pytest.raises(ValueError, match="3 rows with 4 rows"):
        batch_of(3).union(batch_of(4))


def test_union_joins_tensors_with_objects():
    objects = DataProto.from_dict(non_tensors={"uid": ["a", "b"]})
    joined = objects.union(DataProto.from_dict({"x": torch.ones(2)}))
    assert (joined.columns, len(joined)) == (("x", "uid"), 2)


def test_two_columns_can_be_renamed_and_swapped():
    data = batch_of(2).rename(["ids", "uid"], ["input_ids", "group"])
    assert data.columns == ("input_ids", "score", "group", "turns")
    swapped = DataProto.from_dict({"a": torch.zeros(1), "b": torch.ones(1)}).rename(["a", "b"], ["b", "a"])
    assert swapped.batch["b"].item() == 0
    with pytest.raises(ValueError, match="two columns"):
        swapped.rename("a", "b")


def test_a_name_that_is_not_there_is_an_error_that_lists_what_is():
    for act in (
        lambda data: data.select(["nope"]),
        lambda data: data.pop(non_tensor_batch_keys=["nope"]),
        lambda data: data.rename("nope", "x"),
    ):
        with pytest.raises(KeyError, match=r"nope.*ids|nope.*uid"):
            act(batch_of(2))


def test_pop_moves_columns_and_keeps_the_number_of_rows():
    data = batch_of(3, step=1)
    popped = data.pop(["ids", "score"], ["uid", "turns"], ["step"])
    assert rows_of(popped) == [0, 1, 2]
    assert (popped.meta_info, data.columns, data.meta_info, len(data)) == ({"step": 1}, (), {}, 3)


def test_repeats():
    assert rows_of(batch_of(2).repeat(2)) == [0, 0, 1, 1]
    assert rows_of(batch_of(2).repeat(2, interleave=False)) == [0, 1, 0, 1]
    assert rows_of(batch_of(3).sample_level_repeat([2, 0, 1])) == [0, 0, 2]
    assert rows_of(batch_of(3).sample_level_repeat(torch.tensor([1, 1, 2]))) == [0, 1, 2, 2]


def test_reorder_moves_every_column():
    data = batch_of(4)
    data.reorder(torch.tensor([3, 0, 2, 1]))
    assert rows_of(data) == [3, 0, 2, 1]


def test_unfold_column_chunks_cuts_some_columns_and_repeats_the_rest():
    unfolded = batch_of(2).unfold_column_chunks(2, split_keys=["ids"])
    assert unfolded.batch["ids"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert unfolded.batch["score"].tolist() == [0, 0, 1, 1]
    assert unfolded.non_tensor_batch["uid"].tolist() == ["u0", "u0", "u1", "u1"]


def test_iterator_is_a_function_of_its_seed_and_covers_every_row_once_per_epoch():
    def order(seed):
        batches = batch_of(10).make_iterator(4, 2, seed=seed, dataloader_kwargs={"shuffle": True})
        return [rows_of(batch) for batch in batches]

    assert [len(rows) for rows in order(1)] == [4, 4, 2, 4, 4, 2]
    assert order(1) == order(1) != order(2)
    assert sorted(itertools.chain(*order(1)[:3])) == list(range(10))
    assert len(list(batch_of(10).make_iterator(4, 1, dataloader_kwargs={"drop_last": True}))) == 2


@pytest.mark.parametrize("n_rows", [0, 1, 3])
def test_tensordict_round_trip(n_rows):
    merged = batch_of(n_rows, step=1, names=["a"]).to_tensordict()
    assert isinstance(merged, TensorDict)
    back = DataProto.from_tensordict(merged)
    assert rows_of(back) == list(range(n_rows))
    assert back.meta_info == {"step": 1, "names": ["a"]}


def test_an_empty_batch_is_a_batch():
    empty = batch_of(4)[[]]
    assert empty.batch["ids"].shape == (0, 4)
    for same in (
        empty.repeat(3),
        empty.select_idxs([]),
        empty.slice(),
        DataProto.concat([empty, empty]),
        pad_dataproto_to_divisor(empty, 4)[0],
        empty.unfold_column_chunks(2),
        pickle.loads(pickle.dumps(empty)),
    ):
        assert rows_of(same) == []
    assert list(empty.make_iterator(2, 1, dataloader_kwargs={"shuffle": True})) == []
    assert rows_of(DataProto.concat([empty, batch_of(2)])) == [0, 1]
    assert len(DataProto()) == len(DataProto.from_dict(non_tensors={"uid": []})) == 0


def test_pickle_of_a_slice_holds_only_the_slice():
    data = DataProto.from_dict({"x": torch.zeros(1000, 1000)})
    assert len(pickle.dumps(data[:1])) < 10_000


def test_pickle_and_files_keep_every_column(tmp_path):
    data = batch_of(5, step=3, lr=1e-6, table=np.arange(3), names={"a": [None, (1, 2)]})
    data.non_tensor_batch["extra"] = np.array(
        [{"x": np.float32(1.5)}, np.arange(2.0), None, "s", 7], dtype=object
    )
    data[1:4].save_to_disk(tmp_path / "batch.pt")
    for back, rows in (
        (pickle.loads(pickle.dumps(data)), [0, 1, 2, 3, 4]),
        (DataProto.load_from_disk(tmp_path / "batch.pt"), [1, 2, 3]),
    ):
        assert rows_of(back) == rows
        assert back.non_tensor_batch["extra"][rows.index(1)].tolist() == [0.0, 1.0]
        assert back.meta_info.pop("table").tolist() == [0, 1, 2]
        assert back.meta_info == {"step": 3, "lr": 1e-6, "names": {"a": [None, (1, 2)]}}


class Opaque:
    pass


def test_a_file_never_holds_or_runs_foreign_code(tmp_path):
    data = DataProto.from_dict(non_tensors={"o": [Opaque()]})
    with pytest.raises(ValueError, match="cannot be saved"):
        data.save_to_disk(tmp_path / "batch.pt")
    assert not (tmp_path / "batch.pt").exists()
    torch.save({"o": Opaque()}, tmp_path / "foreign.pt")
    with pytest.raises(ValueError, match=r"foreign\.pt"):
        DataProto.load_from_disk(tmp_path / "foreign.pt")


def test_columns_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match="first dimension"):
        DataProto.from_dict({"x": torch.ones(2), "y": torch.ones(3)})
    with pytest.raises(ValueError, match="the batch has 2 rows"):
        DataProto.from_dict({"x": torch.ones(2)}, {"uid": ["a"]})
    with pytest.raises(ValueError, match="both tensor and object"):
        DataProto.from_dict({"x": torch.ones(1)}, {"x": ["a"]})
    with pytest.raises(ValueError, match="list"):
        DataProto.from_single_dict({"x": [1, 2]})
    with pytest.raises(AssertionError):
        DataProto.from_dict({"x": torch.ones(2, 2)}, num_batch_dims=2)
