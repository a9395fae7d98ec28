"""The manifest of a checkpoint: what every file in it must be. A folder without one is no checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rolemesh.parallel.checkpoint_error import CheckpointError, listed
from rolemesh.parallel.durable_files import FileRecord, read_record, write_file

MANIFEST = "manifest.json"
FORMAT = 1
_READERS = 8


@dataclass(frozen=True)
class Manifest:
    """Step, the run that wrote it, the validation score of that step (None: not validated), files by path."""

    step: int
    run_id: str
    score: float | None
    files: Mapping[str, FileRecord]

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(record.n_bytes for record in self.files.values())

    def write(self, folder: Path) -> None:
        """Write the manifest as the last file of the folder."""
        content: dict[str, Any] = {"rolemesh_checkpoint": FORMAT, **asdict(self)}
        content["files"] = {name: asdict(record) for name, record in sorted(self.files.items())}
        write_file(folder / MANIFEST, (json.dumps(content, indent=1) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder, whose other files are not looked at. Raises CheckpointError."""
        try:
            content = json.loads((folder / MANIFEST).read_text())
            if content["rolemesh_checkpoint"] != FORMAT:
                raise CheckpointError(f"{folder} has format {content['rolemesh_checkpoint']}, not {FORMAT}")
            files = {name: FileRecord(**record) for name, record in content["files"].items()}
            return cls(content["step"], content["run_id"], content["score"], files)
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} has no {MANIFEST}: it was not finished, or is no checkpoint"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{folder / MANIFEST} is damaged: {error}") from error

    def check_sizes(self, folder: Path) -> None:
        """Raise CheckpointError unless every file is there with its size; quick."""
        sizes = {name: _size(folder / name) for name in self.files}
        if missing := [name for name, size in sizes.items() if size is None]:
            raise CheckpointError(f"{folder} lacks {listed(missing)}")
        wrong = [
            f"{name} ({sizes[name]} bytes instead of {record.n_bytes})"
            for name, record in self.files.items()
            if sizes[name] != record.n_bytes
        ]
        if wrong:
            raise CheckpointError(f"{folder}: wrong size of {listed(wrong)}")

    def check(self, folder: Path) -> None:
        """Raise CheckpointError unless every file is what it was when it was written; reads all of them."""
        self.check_sizes(folder)
        with ThreadPoolExecutor(_READERS) as readers:
            found = readers.map(lambda name: read_record(folder / name), self.files)
            changed = [
                name
                for (name, record), now in zip(self.files.items(), found, strict=True)
                if now.sha256 != record.sha256
            ]
        if changed:
            raise CheckpointError(f"{folder}: {listed(changed)} changed since it was written (another hash)")


def _size(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None
