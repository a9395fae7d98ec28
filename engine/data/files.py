"""Rows of data files: JSONL, parquet, Arrow, folders that `datasets` saved; each with where it came from."""

import glob
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rows = Iterator[tuple["Place", dict[str, Any]]]
STATE, SPLITS = "state.json", "dataset_dict.json"  # that `save_to_disk` writes
_NUMBERED = re.compile(r"-\d+-of-\d+$")  # train-00000-of-00002.parquet is a part of train


class DataError(ValueError):
    """Data files that cannot be used as they are."""


@dataclass(frozen=True)
class Place:
    """Where a row came from: its number counts from 1 (in JSONL, the line). `source` names the whole that
    the file is a part of."""

    file: Path
    row: int
    source: str = ""

    def __str__(self) -> str:
        return f"{self.file} row {self.row}"


@dataclass(frozen=True)
class DataFile:
    """One file, and the name of the whole that it is a part of."""

    path: Path
    source: str


def data_files(entry: str | Path) -> list[DataFile]:
    """The files that one entry of a recipe stands for.

    A file (`.jsonl`, `.parquet`, `.arrow`) is itself; a folder that `datasets` saved with `save_to_disk` its
    parts, in their order; a pattern (`data/train-*.parquet`) the files that match, by name.

    Raises:
        DataError: nothing there, another kind of file, or a folder of something else or of several splits.
    """
    path = Path(entry)
    if path.is_dir():
        return _saved_folder(path)
    paths = [path]
    if not path.exists() and glob.has_magic(str(path)):
        paths = [Path(name) for name in sorted(glob.glob(str(path)))]
        if not paths:
            raise DataError(f"no file matches {path}")
    for file in paths:
        if file.suffix not in _READERS:
            raise DataError(
                f"{file}: prompts are read from {', '.join(_READERS)} files and from folders of `datasets`"
            )
        if not file.is_file():
            there = sorted(other.name for other in file.parent.glob("*") if other.suffix in _READERS)
            held = f"holds {there}" if there else f"has no {' or '.join(_READERS)} file"
            folder = held if file.parent.is_dir() else "is no folder"
            raise DataError(f"no file {file}; {file.parent} {folder}")
    return [DataFile(file, _NUMBERED.sub("", file.stem)) for file in paths]


def read_rows(entry: str | Path, columns: Sequence[str] | None = None) -> Rows:
    """The rows of `data_files(entry)` as dicts of plain Python values, a part of a file at a time.

    Args:
        columns: read no others, where the format allows that.

    Raises:
        DataError: as `data_files`, and for a file or row that cannot be read.
    """
    for file in data_files(entry):
        for number, row in _READERS[file.path.suffix](file.path, columns):
            yield Place(file.path, number, file.source), row


def columns_and_rows(entry: str | Path) -> tuple[list[str], int]:
    """Names of the columns (in JSONL: of the first row), and the number of rows. Raises DataError."""
    columns: dict[str, None] = {}
    n_rows = 0
    for file in data_files(entry):
        names, rows = _shape(file.path)
        columns |= dict.fromkeys(names)
        n_rows += rows
    return list(columns), n_rows


def source_of(place: Place, row: dict[str, Any]) -> str:
    """The source of a row: its column `data_source`, or the name of its file (or folder)."""
    return str(row.get("data_source") or place.source)


def rows_per_source(entries: Sequence[str | Path]) -> Counter[str]:
    """How many rows each source has. Raises DataError."""
    return Counter(
        source_of(place, row) for entry in entries for place, row in read_rows(entry, ["data_source"])
    )


def _saved_folder(folder: Path) -> list[DataFile]:
    if (folder / SPLITS).is_file():
        splits = json.loads((folder / SPLITS).read_text()).get("splits", [])
        raise DataError(f"{folder} holds the splits {splits}: give one, such as {folder / 'train'}")
    if not (folder / STATE).is_file():
        there = sorted(path.name for path in folder.iterdir())[:10]
        raise DataError(
            f"{folder} was not saved by `datasets` (it has no {STATE}); it holds {there}: give files, or a "
            f"pattern such as {folder / 'train-*.parquet'}"
        )
    state = json.loads((folder / STATE).read_text())
    if state.get("_indices_data_files"):
        raise DataError(f"{folder} is a selection of other rows: save it after `.flatten_indices()`")
    split = (folder.parent / SPLITS).is_file()
    source = folder.parent.name if split else folder.name
    files = [DataFile(folder / part["filename"], source) for part in state["_data_files"]]
    if absent := [file.path.name for file in files if not file.path.is_file()]:
        raise DataError(f"{folder} is not whole: {STATE} names {absent}, which are not there")
    return files


def _read_jsonl(file: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = Place(file, number)
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{place} is not JSON: {error.msg} at character {error.colno}") from error
            if not isinstance(row, dict):
                raise DataError(f"{place} is a {type(row).__name__}; each line must be one JSON object")
            yield number, row


def _read_parquet(file: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            chosen = None if columns is None else [c for c in parquet.schema_arrow.names if c in columns]
            number = 0
            for batch in parquet.iter_batches(columns=chosen):
                # A batch without columns still has rows.
                for row in batch.to_pylist() if batch.num_columns else ({} for _ in range(batch.num_rows)):
                    yield (number := number + 1), row
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} is not a readable parquet file: {error}") from error


def _read_arrow(file: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow

    number = 0
    try:
        for batch in _arrow_batches(file):
            for row in batch.to_pylist():
                yield (number := number + 1), row
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} is not a readable Arrow file: {error}") from error


def _arrow_batches(file: Path) -> Iterator[Any]:
    """The record batches of an Arrow stream (as `datasets` writes), or of an Arrow file."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        if source.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(source)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            source.seek(0)
            yield from pyarrow.ipc.open_stream(source)


def _shape(file: Path) -> tuple[list[str], int]:
    if file.suffix == ".jsonl":
        with file.open(encoding="utf-8") as lines:
            first = next((line for line in lines if line.strip()), None)
            rows = (first is not None) + sum(1 for line in lines if line.strip())
        return (list(json.loads(first)) if first else []), rows
    import pyarrow
    import pyarrow.parquet

    try:
        if file.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(file) as parquet:
                return list(parquet.schema_arrow.names), parquet.metadata.num_rows
        names: dict[str, None] = {}
        rows = 0
        for batch in _arrow_batches(file):
            names |= dict.fromkeys(batch.schema.names)
            rows += batch.num_rows
        return list(names), rows
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} is not a readable {file.suffix} file: {error}") from error


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".arrow": _read_arrow}
