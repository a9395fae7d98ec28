"""What a worker process prints, as a file of the run folder: time, role, rank and step on each line.

A process of its own writes it, so that the last words of one that is killed arrive too. It runs this file by
its path, with nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

_MARK = b"\x1e"  # what follows it on the line says who prints from now on, and in what
_LONGEST_LINE = 65536  # bytes; the rest is a line of its own


class WorkerLog:
    """Sends what this process prints from now on to `path`, however it prints it; `name` is who prints.

    Raises OSError where the file cannot be written.
    """

    def __init__(self, path: Path, name: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        writer = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
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


def write_lines(path: str, name: str) -> None:
    """Write standard input to `path` until it ends, a prefix before each line; a full disk loses lines."""
    prefix = name.encode()
    with open(path, "ab", buffering=0) as file:
        while line := sys.stdin.buffer.readline(_LONGEST_LINE):
            text, marked, who = line.rstrip(b"\n").partition(_MARK)
            lines = [(prefix, text)] if text or not marked else []
            if marked:
                prefix = who
                lines.append((prefix, b"begins"))
            now = time.strftime("%H:%M:%S").encode()
            with contextlib.suppress(OSError):
                file.write(b"".join(b"%s %s | %s\n" % (now, *line) for line in lines))


if __name__ == "__main__":
    write_lines(*sys.argv[1:])
