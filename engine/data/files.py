"""Rows of prompt files: JSONL and parquet, each row with where it came from."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet


class DataError(ValueError):
    """Prompt files that cannot be used as they are."""


@dataclass(frozen=True)
class Place:
    """Where a row came from: its number counts from 1 (in JSONL, the line)."""

    file: Path
    row: int

    def __str__(self) -> str:
        return f"{self.file} row {self.row}"


def read_rows(file: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The rows of a `.jsonl` or `.parquet` file as dicts of plain Python values.

    Raises:
        DataError: no such file, another kind of file, or a row that does not parse.
    """
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if file.suffix not in readers:
        raise DataError(f"{file}: prompts are read from {' and '.join(readers)} files")
    if not file.is_file():
        there = sorted(path.name for path in file.parent.glob("*") if path.suffix in readers)
        folder = f"holds {there}" if file.parent.is_dir() else "is no folder"
        raise DataError(f"no file {file}; {file.parent} {folder}")
    yield from readers[file.suffix](file)


def _read_jsonl(file: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
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
            yield place, row


def _read_parquet(file: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} is not a readable parquet file: {error}") from error
    for number, row in enumerate(rows, start=1):
        yield Place(file, number), row
