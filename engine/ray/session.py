"""The directory that one Ray cluster of ours lives in, and the reaper that ends what lives in it.

The reaper (`python -m rolemesh.engine.ray.session DRIVER DIRECTORY [LINKS]`) is a process of its own: it
waits until its standard input closes, which happens when the driver says so or dies however it dies. Then it
kills every process but the driver that still writes into the directory, and removes it and its link's folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil

_SOCKET_PATH_LIMIT = 107  # bytes, sun_path of Linux
_LONGEST_SOCKET = len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
_PREFIX = "rm-"
_SPARE_DISK = 0.05
_REAP_S = 10.0


class SessionError(RuntimeError):
    """A directory that Ray's session cannot live in; the message says what to change."""


@contextlib.contextmanager
def session_directory(parent: str | os.PathLike[str] | None) -> Iterator[Path]:
    """A new directory for Ray's session under `parent` (default: the system's), short enough for its sockets.

    Under a long `parent` it is reached by a short link. When the block ends, or the process dies, whatever
    still writes into it is killed and it is removed. Raises SessionError where it cannot be made.
    """
    root = Path(tempfile.gettempdir() if parent is None else parent).absolute()
    system = Path(tempfile.gettempdir())
    if too_long(root) and too_long(system, link=True):
        raise SessionError(
            f"the system's temporary directory {str(system)!r} is too long: Ray's socket paths would have "
            f"{longest_socket_path(system, link=True)} characters, the system allows "
            f"{_SOCKET_PATH_LIMIT}; set TMPDIR"
        )
    session = _new_directory(root)
    folders = [session]
    if too_long(root):
        folders.append(Path(tempfile.mkdtemp(prefix=_PREFIX)))
        (folders[1] / "s").symlink_to(session)
    reaper = subprocess.Popen(
        [sys.executable, "-m", __name__, str(os.getpid()), *map(str, folders)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield session if len(folders) == 1 else folders[1] / "s"
    finally:
        _wait_for(reaper)


def too_long(root: Path, *, link: bool = False) -> bool:
    """Whether sockets in a session under `root` have too long paths; `link`: one that is a link there."""
    return longest_socket_path(root, link=link) > _SOCKET_PATH_LIMIT


def longest_socket_path(root: Path, *, link: bool = False) -> int:
    """Characters of the longest path of a socket in a session under `root`."""
    return len(str(root / f"{_PREFIX}12345678")) + len("/s") * link + _LONGEST_SOCKET


def _new_directory(root: Path) -> Path:
    try:
        root.mkdir(parents=True, exist_ok=True)
        session = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    except OSError as error:
        raise SessionError(f"temp_dir {str(root)!r} cannot be written: {error}") from error
    disk = shutil.disk_usage(root)
    if disk.free < _SPARE_DISK * disk.total:
        warnings.warn(
            f"{str(root)!r} has {disk.free / disk.total:.1%} of its disk free ({disk.free / 2**30:.1f} GiB): "
            f"Ray refuses work on a full disk; give temp_dir on another one",
            stacklevel=5,
        )
    return session


def _wait_for(reaper: subprocess.Popen) -> None:
    assert reaper.stdin is not None
    reaper.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        reaper.wait(timeout=_REAP_S)


def reap(session: Path, driver: int, within_s: float = _REAP_S) -> None:
    """Kill every process but `driver` that writes into `session`, until there is none, and remove it."""
    deadline = time.monotonic() + within_s
    while (writers := _writers(session, driver)) and time.monotonic() < deadline:
        for process in writers:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(writers, timeout=1.0)
    shutil.rmtree(session, ignore_errors=True)


def _writers(session: Path, driver: int) -> list[psutil.Process]:
    """Ray's processes and whatever they started hold a log of the session open; readers of logs are spared.

    So does the driver, while it waits here to go on with something else.
    """
    found = []
    for process in psutil.process_iter():
        if process.pid == driver:
            continue
        with contextlib.suppress(psutil.Error):
            files = process.open_files()
            if any(file.mode != "r" and Path(file.path).is_relative_to(session) for file in files):
                found.append(process)
    return found


def main() -> None:
    session, *links = (Path(folder).resolve() for folder in sys.argv[2:])
    sys.stdin.read()
    reap(session, driver=int(sys.argv[1]))
    for folder in links:  # not earlier: who writes through a link that is gone makes a folder of its name
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
