"""Models copied onto a node's own disk: once, whole or not at all, whoever asks for it at the same time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

SPARE_BYTES = 64 << 20  # that a disk keeps free
_NOT_READ = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")  # weights in forms that are never loaded


class StageError(RuntimeError):
    """A model that cannot be copied; the message has the node, the folder and the sizes."""


def staged_path(source: str | Path, folder: str | Path) -> Path:
    """Where a model's folder will be below `folder`, on every node: other files make another name.

    Raises StageError for a source that is no folder.
    """
    source = Path(source)
    digest = hashlib.sha256(str(source.resolve()).encode())
    for path in _files(source):
        stat = path.stat()
        digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return Path(folder) / f"{source.resolve().name}-{digest.hexdigest()[:12]}"


def stage(source: str | Path, folder: str | Path) -> tuple[Path, int]:
    """Copy a model's folder to `staged_path`, unless it is there; the path, and the bytes that were copied.

    Subfolders, and weights that are not safetensors, are left out. Processes of one node wait for each other.
    Raises StageError where it does not fit or cannot be written; then nothing of it stays.
    """
    source, target = Path(source), staged_path(source, folder)
    here = f"run.stage on {socket.gethostname()}: {target.parent}"
    try:
        with _only_one(target):
            if _is_whole(source, target):
                return target, 0
            return target, _copy(source, target, here)
    except OSError as error:
        full = " is full" if error.errno == errno.ENOSPC else " cannot be written"
        raise StageError(f"{here}{full} ({error}): free space there, or set run.stage elsewhere") from error


def stage_bytes(source: str | Path) -> int:
    """Bytes that `stage` would copy. Raises StageError for a source that is no folder."""
    return sum(path.stat().st_size for path in _files(Path(source)))


def _copy(source: Path, target: Path, here: str) -> int:
    files = _files(source)
    partial = target.with_name(f".{target.name}.partial")
    for old in (partial, target):  # of a copy that was killed, or that lost files
        shutil.rmtree(old, ignore_errors=True)
    needed, free = stage_bytes(source), shutil.disk_usage(target.parent).free
    if needed + SPARE_BYTES > free:
        raise StageError(
            f"{here} has {free / 2**30:.1f} GiB free, the model {source} takes {needed / 2**30:.1f} GiB: "
            "free space there, or set run.stage elsewhere"
        )
    try:
        partial.mkdir()
        for path in files:
            shutil.copyfile(path, partial / path.name)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return needed


def _is_whole(source: Path, target: Path) -> bool:
    return all(
        (target / path.name).is_file() and (target / path.name).stat().st_size == path.stat().st_size
        for path in _files(source)
    )


def _files(source: Path) -> list[Path]:
    try:
        found = [path for path in source.iterdir() if path.is_file() and path.suffix not in _NOT_READ]
    except OSError as error:
        raise StageError(f"{source} cannot be read on {socket.gethostname()}: {error.strerror}") from error
    return sorted(found)


@contextlib.contextmanager
def _only_one(target: Path) -> Iterator[None]:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(f".{target.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
