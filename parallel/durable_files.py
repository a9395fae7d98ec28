"""Files that survive a crash: hashed as they are written, and on the disk before anything relies on them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """What a whole file holds: its size and the SHA-256 of its bytes, in hexadecimal."""

    n_bytes: int
    sha256: str


class HashedFile:
    """A new file, written from front to back; `record` says what it holds. Leaving the block flushes it to
    disk.

    OSError (a full disk, say) comes from the write that failed.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115  closed by __exit__
        self._hash = hashlib.sha256()
        self._n_bytes = 0
        self._failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Append bytes (anything with a buffer)."""
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
        except OSError as error:
            self._failure = error
            raise
        self._hash.update(view)
        self._n_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        """Bytes written so far."""
        return self._n_bytes

    def flush(self) -> None:
        """Hand over to the system what is still buffered."""
        self._file.flush()

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._n_bytes, self._hash.hexdigest())

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if self._failure is not None and error is not self._failure:
                raise self._failure from None  # torch.save hides it behind what follows from it
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())


def write_file(path: str | Path, data: bytes) -> FileRecord:
    """Write a small file, flushed to disk."""
    with HashedFile(path) as file:
        file.write(data)
    return file.record


def read_record(path: str | Path) -> FileRecord:
    """Size and hash of a file as it is on disk now."""
    digest, n_bytes = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            n_bytes += len(chunk)
    return FileRecord(n_bytes, digest.hexdigest())


def sync_files(paths: Iterable[str | Path]) -> None:
    """Flush files that others wrote."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def sync_folder(path: str | Path) -> None:
    """Flush a folder's entries: what was created, renamed or removed in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
