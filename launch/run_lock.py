"""One run at a time in a run folder: a lock that ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rolemesh.engine.loggers.secrets import hide
from rolemesh.launch.fields import RecipeError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def only_run_in(folder: str | Path) -> Iterator[None]:
    """Hold the run folder `folder`, which need not be there yet, for this process alone.

    The lock is the file `<folder>.lock` beside it, so that the folder may be renamed meanwhile. Where the
    file system has no locks, a line says so. Raises RecipeError that names who holds it.
    """
    path = _lock_file(Path(folder))
    path.parent.mkdir(parents=True, exist_ok=True)
    held = _take(path)
    if isinstance(held, str):
        raise RecipeError(f"run.dir: {folder} {held}")
    try:
        yield
    finally:
        if held is not None:
            path.unlink(missing_ok=True)  # while it is held: who waits for it looks again
            os.close(held)


def holder_of(folder: str | Path) -> str:
    """Who holds the run folder, and what to do about it; empty when nobody does."""
    path = _lock_file(Path(folder))
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return ""
    except OSError as error:
        return "" if error.errno in _NO_LOCKS else _said(descriptor)
    finally:
        os.close(descriptor)


def is_held(folder: str | Path) -> bool | None:
    """Whether a process holds the run folder; None without a lock, or where the file system has none.

    On another machine than that process's some file systems say False.
    """
    try:
        descriptor = os.open(_lock_file(Path(folder)), os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _take(path: Path) -> int | str | None:
    """The descriptor of the lock, or who has it; None where there are no locks."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            said = None if error.errno in _NO_LOCKS else _said(descriptor)
            os.close(descriptor)
            if said is None:
                print(
                    f"note: {path.parent} has no file locks: a second run in there goes unnoticed", flush=True
                )
            return said
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                break
        os.close(descriptor)  # its holder removed it just now
    os.ftruncate(descriptor, 0)
    told = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.pwrite(descriptor, json.dumps(told | {"command": hide(shlex.join(sys.argv))}).encode(), 0)
    return descriptor


def _said(descriptor: int) -> str:
    try:
        told = json.loads(os.pread(descriptor, 1 << 16, 0))
        who = f"process {told['pid']} on {told['host']}, since {told['since']} ({told['command']})"
    except (ValueError, KeyError, TypeError):
        who = "a process that has not written its name yet"
    return f"is in use by another run, {who}: wait for its end, or give this run a run.dir of its own"


def _lock_file(folder: Path) -> Path:
    folder = folder.absolute()
    return folder.with_name(f"{folder.name}.lock")
