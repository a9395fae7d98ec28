"""What a logger is: a class that gets a run's metrics and sample tables, step by step."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True)
class RunInfo:
    """What loggers know of a run.

    `config` are the recipe's keys without secrets; `shown` the metrics worth a line on the console. `done`
    steps lie behind when a run goes on. `offline`: nothing leaves the run folder. `write` prints a line.
    """

    folder: Path
    project: str = "rolemesh"
    name: str = ""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    steps: int = 0
    done: int = 0
    shown: Sequence[str] = ()
    offline: bool = True
    write: Callable[[str], None] = field(default=print, repr=False)


class Logger:
    """Gets metrics and samples. Any method may raise: the run goes on, see `Loggers`.

    `package` must be installed for it. `slow` ones talk to others, and so have a thread of their own.
    """

    package: ClassVar[str] = ""
    slow: ClassVar[bool] = False

    def __init__(self, run: RunInfo) -> None:
        self.run = run

    @classmethod
    def problem(cls, offline: bool, environ: Mapping[str, str]) -> str | None:
        """Why it cannot log in this environment, and what to do."""
        return None

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of one step; step 0 is before the first."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Validation samples of one step: `source`, `prompt`, `response`, `score`, and what else there is."""

    def close(self, finished: bool) -> None:
        """The run ends: whether as planned, or by an error."""


def installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported for that."""
    return not package or importlib.util.find_spec(package) is not None


def kept_id(folder: Path, service: str, new: Callable[[], str] = lambda: uuid.uuid4().hex[:12]) -> str:
    """The id that a service knows the run by: the one of before where the run goes on, else a new one."""
    file = folder / f"{service}.id"
    if not file.exists():
        file.write_text(new() + "\n")
    return file.read_text().strip()


def table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Column names and rows of samples; None where a sample lacks a column."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return names, [[row.get(name) for name in names] for row in rows]
