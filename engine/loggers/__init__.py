"""Where a run's metrics and samples go: loggers by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from rolemesh.engine.loggers.base import Logger, RunInfo, installed
from rolemesh.engine.loggers.console import Console
from rolemesh.engine.loggers.guard import Guarded
from rolemesh.engine.loggers.jsonl import JsonLines
from rolemesh.engine.loggers.mlflow import MLflow
from rolemesh.engine.loggers.tensorboard import TensorBoard
from rolemesh.engine.loggers.wandb import Wandb

LOGGERS: Mapping[str, type[Logger]] = {
    "console": Console,
    "jsonl": JsonLines,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
}
OFFLINE = ("wandb", "mlflow")  # those that otherwise send what they get

__all__ = ["LOGGERS", "OFFLINE", "Logger", "Loggers", "RunInfo", "logger_problems"]


def logger_problems(
    names: Sequence[str], *, offline: bool, environ: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """Why loggers of these names could not log, each with what to do."""
    for name in names:
        kind = LOGGERS.get(name)
        if kind is None:
            yield f"no logger is named {name}; there are {', '.join(LOGGERS)}"
        elif not installed(kind.package):
            yield (
                f"{name} needs the package {kind.package}, which is not installed: "
                f"pip install {kind.package}, or 'rolemesh[loggers]' for all"
            )
        elif problem := kind.problem(offline, environ):
            yield f"{name}: {problem}"


class Loggers:
    """The loggers of one run. Use as a context manager: leaving it ends them.

    None of its methods raises: a logger that fails is told once (by `run.write`) and left to try again.
    """

    def __init__(self, names: Sequence[str], run: RunInfo) -> None:
        self.all = [Guarded(name, LOGGERS[name], run) for name in names]

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's metrics, to each."""
        kept = dict(metrics)
        for guarded in self.all:
            guarded.call(lambda logger: logger.metrics(step, kept))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """One step's validation samples, to each."""
        kept = [dict(row) for row in rows]
        for guarded in self.all:
            guarded.call(lambda logger: logger.samples(step, kept))

    def close(self, finished: bool) -> None:
        """The run is over."""
        for guarded in self.all:
            guarded.close(finished)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(finished=error is None)
