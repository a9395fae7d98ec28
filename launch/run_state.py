"""What a driver tells of its run in the run folder: small files that any machine that sees the folder reads.

`status.json` is written anew every few seconds and at the end. Whoever wants the Python stacks makes the file
`stacks.ask`; the driver answers with `stacks.json`. Loads neither torch nor Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

STATUS_FILE, ASK_FILE, STACKS_FILE = "status.json", "stacks.ask", "stacks.json"
Ending = Literal["running", "finished", "stopped", "failed"]
_NUMBER = re.compile(r"[0-9a-f]{16}")
_MOST_BYTES = 16 << 20  # of a file that is read


@dataclass(frozen=True)
class RankState:
    """What one worker process said last: the operation (`role.method`; empty: none) and for how long.

    `heard_s` is when it answered, seconds since the epoch; 0 for one that has not yet. `silent` says why
    there is no newer answer.
    """

    pool: str
    rank: int
    node: str
    roles: tuple[str, ...] = ()
    operation: str = ""
    step: int | None = None
    seconds: float = 0.0
    resident_bytes: int = 0
    available_bytes: int = 0
    heard_s: float = 0.0
    silent: str = ""


@dataclass(frozen=True)
class RunState:
    """The driver's last word. Times are seconds since the epoch by the driver's clock.

    `beat` counts the writings, `every_s` apart. `operations` are those that run, with the seconds that they
    have; `done_operations` of how many of the step's are done. `left_s` is the time left, where it is known.
    """

    beat: int
    at_s: float
    every_s: float
    began_s: float
    host: str
    machine: str
    pid: int
    state: Ending = "running"
    exit_code: int | None = None
    error: str = ""
    step: int | None = None
    steps: int | None = None
    done: int = 0
    step_s: float = 0.0
    operations: Mapping[str, float] = field(default_factory=dict)
    done_operations: tuple[int, int] | None = None
    left_s: float | None = None
    ranks: tuple[RankState, ...] = ()

    def write(self, folder: Path) -> None:
        """Put it into the run folder. Raises OSError."""
        write_whole(folder / STATUS_FILE, json.dumps(asdict(self)))


@dataclass(frozen=True)
class RankStack:
    """The Python stacks of one process, the computing thread first; the driver has the pool `driver`."""

    pool: str
    rank: int
    node: str
    roles: tuple[str, ...]
    operation: str
    text: str


@dataclass(frozen=True)
class Stacks:
    """An answer to the question `asked`."""

    asked: str
    at_s: float
    ranks: tuple[RankStack, ...]

    def write(self, folder: Path) -> None:
        """Put it into the run folder. Raises OSError."""
        write_whole(folder / STACKS_FILE, json.dumps(asdict(self)))


def read_state(folder: Path) -> RunState | None:
    """What the driver last wrote; None where there is nothing that can be read."""
    return _read(folder / STATUS_FILE, RunState, RankState)


def read_stacks(folder: Path) -> Stacks | None:
    """The last answer; None where there is none that can be read."""
    return _read(folder / STACKS_FILE, Stacks, RankStack)


def ask_for_stacks(folder: Path) -> str:
    """Ask the run in `folder`; the number of the question, which is another's where that is still open.

    Raises OSError where the folder cannot be written.
    """
    number = secrets.token_hex(8)
    with contextlib.suppress(FileExistsError):
        file = os.open(folder / ASK_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.write(file, number.encode())
        finally:
            os.close(file)
        return number
    return asked_for_stacks(folder) or number


def asked_for_stacks(folder: Path) -> str:
    """The number of the open question; empty where there is none."""
    try:
        with (folder / ASK_FILE).open("rb") as file:
            number = file.read(64).decode(errors="replace")
    except OSError:
        return ""
    return number if _NUMBER.fullmatch(number) else ""


def close_question(folder: Path) -> None:
    """Whoever asks from now on gets a new answer."""
    with contextlib.suppress(OSError):
        (folder / ASK_FILE).unlink()


def this_machine() -> tuple[str, str]:
    """The host's name, and what tells this machine, since its start, from all others."""
    name = socket.gethostname()
    try:
        return name, Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return name, name


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: who reads it sees the old one or the new one. Raises OSError."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def _read(path: Path, kind: Any, of_rank: Any) -> Any:
    try:
        with path.open("rb") as file:
            told = json.loads(file.read(_MOST_BYTES))
        known = {f.name for f in fields(kind)}
        values = {name: value for name, value in told.items() if name in known}
        known = {f.name for f in fields(of_rank)}
        values["ranks"] = tuple(
            of_rank(**{n: tuple(v) if n == "roles" else v for n, v in rank.items() if n in known})
            for rank in told["ranks"]
        )
        if values.get("done_operations"):
            values["done_operations"] = tuple(values["done_operations"])
        return kind(**values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
