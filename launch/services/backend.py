"""What a server needs of the thing it serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Kind = Literal["reward", "function", "reference"]


class ServeError(RuntimeError):
    """A model or file that cannot be served; the message says why and what to do."""


class UnfitError(ValueError):
    """A sample that this model cannot score, now or later; the message names the sample and why."""


@dataclass(frozen=True, eq=False)
class Job:
    """One sample to be worked on. `tokens` is its length, and what a batch is measured by."""

    id: str
    tokens: int
    work: Any


class Backend(Protocol):
    """A model or function. `jobs` is called on any thread, `run` on the thread of one lane at a time.

    `batch_tokens` bounds a batch, padding included; `lanes` is how many batches run at once.
    """

    kind: Kind
    lanes: int
    batch_tokens: int

    def info(self) -> dict[str, Any]:
        """What `/v1/info` says of it: model, revision, vocab_size, max_length, tokenizer."""

    def jobs(self, request: Any) -> list[Job]:
        """A request's samples as jobs, in order. Raises UnfitError."""

    def run(self, jobs: Sequence[Job], lane: int) -> list[Any]:
        """The result of each job, in order; an exception in the place of a result fails that job alone."""

    def close(self) -> None:
        """End what it started."""
