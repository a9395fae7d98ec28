"""What a worker process prints, as a file of the run folder: time, role, rank and step on each line.

A process of its own writes it, so that the last words of one that is killed arrive too, without
the secrets in them. It runs this file by its path, with nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import runpy
import select
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

ENDED = "process ended"
_MARK = b"\x1e"  # what follows it on the line says who prints from now on, and in what
_QUIET = b"\x1f"  # before that: nothing begins
_LONGEST_LINE = 65536  # bytes; the rest is a line of its own
_END_S = 5.0  # from the end of the output to that of the process
_INFO_BYTES, _INFO_EXIT = 64, 1 << 3  # of Linux' struct pidfd_info
_GET_INFO = 3 << 30 | _INFO_BYTES << 16 | 0xFF << 8 | 11


class WorkerLog:
    """Sends what this process prints from now on to `path`, however it prints it; `name` is who prints.

    Raises OSError where the file cannot be written.
    """

    def __init__(self, path: Path, name: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        process = _pidfd()
        writer = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(path), name, str(process)],
            pass_fds=[process] if process >= 0 else [],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if process >= 0:
            os.close(process)
        assert writer.stdin is not None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number in (1, 2):
            os.dup2(writer.stdin.fileno(), number)
        writer.stdin.close()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        self.path = path

    def begin(self, name: str, step: int | None, operation: str) -> None:
        """An operation begins; what is printed until the next one is its."""
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
            who = f"{name}{'' if step is None else f' step {step}'} {operation}"
            os.write(2, _MARK + who.encode() + b"\n")

    def end(self, name: str) -> None:
        """The operation is over; what is printed until the next one comes between operations."""
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(2, _MARK + _QUIET + f"{name} between operations".encode() + b"\n")


def write_lines(path: str, name: str, process: str) -> None:
    """Write standard input to `path` until it ends, a prefix before each line, then how the `process` (a file
    descriptor for it) ended, where the kernel (Linux 6.15) tells. A full disk loses lines.
    """
    who = name.encode()
    hide = runpy.run_path(str(Path(__file__).parent / "loggers" / "secrets.py"))["hide"]
    with open(path, "ab", buffering=0) as file:

        def write(text: bytes) -> None:
            with contextlib.suppress(OSError):
                shown = hide(text.decode(errors="replace")).encode()
                file.write(b"%s %s | %s\n" % (time.strftime("%H:%M:%S").encode(), who, shown))

        while line := sys.stdin.buffer.readline(_LONGEST_LINE):
            text, marked, new = line.rstrip(b"\n").partition(_MARK)
            if text or not marked:
                write(text)
            if marked:
                who = new.removeprefix(_QUIET)
                if who == new:
                    write(b"begins")
        if how := _end(int(process)):
            write(f"{ENDED}: {how}".encode())


def _pidfd() -> int:
    """A file descriptor for this process; -1 where the system has none."""
    try:
        return os.pidfd_open(os.getpid())
    except OSError:
        return -1


def _end(process: int) -> str | None:
    """How a process ended that is about to; None where the kernel does not say."""
    if process < 0:
        return None
    deadline, info = time.monotonic() + _END_S, bytearray(_INFO_BYTES)
    ended = select.poll()
    ended.register(process, select.POLLIN)
    ended.poll(_END_S * 1000)
    while time.monotonic() < deadline:
        struct.pack_into("Q", info, 0, _INFO_EXIT)
        try:
            fcntl.ioctl(process, _GET_INFO, info)
        except OSError:
            return None
        if struct.unpack_from("Q", info)[0] & _INFO_EXIT:
            code = os.waitstatus_to_exitcode(struct.unpack_from("i", info, _INFO_BYTES - 4)[0])
            return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
        time.sleep(0.02)  # its parent has not asked yet
    return None


if __name__ == "__main__":
    write_lines(*sys.argv[1:])
