import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolemesh.engine.data.files import DataError, columns_and_rows, data_files, read_rows, rows_per_source
from rolemesh.engine.data.prompts import PromptDataset

ROWS = [{"prompt": [{"role": "user", "content": f"w{i}"}], "data_source": "ab"[i % 2]} for i in range(5)]


def save_to_disk(folder: Path, rows: list[dict], n_files: int = 2) -> Path:
    """The files that `datasets` writes: Arrow streams, listed in state.json beside other state."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{n_files:05d}.arrow" for i in range(n_files)]
    table = pa.Table.from_pylist(rows)
    per_file = -(-len(rows) // n_files)
    for i, name in enumerate(names):
        part = table.slice(i * per_file, per_file)
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            for batch in part.to_batches(max_chunksize=2):
                writer.write_batch(batch)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "0123456789abcdef",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


def test_a_folder_that_datasets_saved_is_read_in_its_order(tmp_path, tokenizer):
    folder = save_to_disk(tmp_path / "sums", ROWS)
    places, rows = zip(*read_rows(folder), strict=True)
    assert list(rows) == ROWS
    assert [(place.file.name[:10], place.row) for place in places] == [
        *(("data-00000", i) for i in (1, 2, 3)),
        *(("data-00001", i) for i in (1, 2)),
    ]
    assert columns_and_rows(folder) == (["prompt", "data_source"], 5)
    dataset = PromptDataset(folder, tokenizer)
    assert tokenizer.decode(dataset[4]["raw_prompt_ids"]) == "<s> user w4 assistant"
    assert dataset.sources() == {"a": [0, 2, 4], "b": [1, 3]}


def test_one_split_of_a_saved_folder_has_the_folders_name(tmp_path):
    split = save_to_disk(tmp_path / "gsm8k" / "train", [{"prompt": "w1"}], 1)
    (tmp_path / "gsm8k" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert rows_per_source([split]) == {"gsm8k": 1}
    with pytest.raises(
        DataError, match=r"holds the splits \['train', 'test'\]: give one, such as .*gsm8k/train"
    ):
        data_files(tmp_path / "gsm8k")


def test_folders_that_cannot_be_read_are_explained(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "train-0.parquet")
    with pytest.raises(
        DataError, match=r"no state\.json\); it holds \['train-0\.parquet'\]: .*pattern such as"
    ):
        data_files(tmp_path)
    broken = save_to_disk(tmp_path / "broken", ROWS)
    (broken / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"not whole: .*data-00001-of-00002\.arrow"):
        data_files(broken)
    chosen = save_to_disk(tmp_path / "chosen", ROWS)
    (chosen / "state.json").write_text(
        '{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}'
    )
    with pytest.raises(DataError, match="flatten_indices"):
        data_files(chosen)
    (tmp_path / "cut.arrow").write_bytes(b"ARROW1 and no more")
    with pytest.raises(DataError, match=r"cut\.arrow is not a readable Arrow"):
        list(read_rows(tmp_path / "cut.arrow"))


def test_the_parts_of_a_split_are_found_by_a_pattern_and_are_one_source(tmp_path):
    for i in range(2):
        rows = [{"prompt": f"w{i}{j}"} for j in range(2)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"train-{i:05d}-of-00002.parquet")
    pattern = tmp_path / "train-*.parquet"
    assert [row["prompt"] for _, row in read_rows(pattern)] == ["w00", "w01", "w10", "w11"]
    assert rows_per_source([pattern]) == {"train": 4}
    assert columns_and_rows(pattern) == (["prompt"], 4)
    with pytest.raises(DataError, match=r"no file matches .*test-\*"):
        data_files(tmp_path / "test-*.parquet")


def test_an_arrow_file_is_read_as_a_stream_of_batches_is(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert [row for _, row in read_rows(tmp_path / "a.arrow")] == ROWS


def test_sources_are_counted_without_the_other_columns(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "x.parquet")
    (tmp_path / "y.jsonl").write_text('{"prompt": "w1"}\n\n{"prompt": "w2", "data_source": "a"}\n')
    assert rows_per_source([tmp_path / "x.parquet", tmp_path / "y.jsonl"]) == {"a": 4, "b": 2, "y": 1}
    assert next(row for _, row in read_rows(tmp_path / "x.parquet", ["data_source"])) == {"data_source": "a"}
