"""The loop around a training: where workers are lost, it starts them again and goes on from a checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from rolemesh.engine.checkpoint.manifest import Manifest
from rolemesh.engine.checkpoint.saver import Checkpoints
from rolemesh.engine.checkpoint.store import FOLDER, newest_good
from rolemesh.engine.errors import CallError
from rolemesh.engine.recovery import Recoveries, WorkersLost
from rolemesh.launch.progress import Progress
from rolemesh.launch.run_folder import drop_rows_after
from rolemesh.launch.schema import Run
from rolemesh.placement.pools import PlacementError

_NOTICE_S, _PAUSE_S = 60.0, 1.0  # Ray takes a node for gone once it has missed several health checks

Start = Callable[..., AbstractContextManager[Any]]
Lost = Callable[[BaseException, Mapping[str, Any]], CallError | None]


class Trains(Protocol):
    """What a recovery asks of a training loop."""

    done: int
    checkpoints: Checkpoints | None


def recoveries_of(run: Run, progress: Progress) -> Recoveries:
    """As the recipe allows them."""
    return Recoveries(
        Path(run.dir),
        run.recoveries,
        elastic=run.elastic,
        node_wait_s=run.node_wait_s,
        tell=progress.write,
    )


def until_done(
    run: Run,
    recoveries: Recoveries,
    progress: Progress,
    resume: Path | None,
    attempt: Callable[[Path | None], int],
) -> int:
    """The steps done by `attempt(checkpoint)`, which is made again, from the newest good checkpoint, each
    time that it raises WorkersLost.

    Without a checkpoint it starts where the run did, at `resume` or at the first models. Raises the loss
    where there were too many.
    """
    checkpoint = resume
    while True:
        try:
            return attempt(checkpoint)
        except WorkersLost as lost:
            lost.settle()
            recoveries.lost(lost)
        found = newest_good(Path(run.dir) / FOLDER)
        for reason in found.skipped:
            progress.write(f"recovery: skipped {reason}")
        checkpoint = found.path or resume
        drop_rows_after(Path(run.dir), -1 if checkpoint is None else Manifest.read(checkpoint).step)
        progress.clear()


@contextlib.contextmanager
def workers(start: Start, recoveries: Recoveries, replan: Callable[[], Start] | None = None) -> Iterator[Any]:
    """What `start()` gives, for the block: worker groups with their models loaded.

    In a recovery `start(wait_s=...)` waits for lost devices; where they do not come and the run is elastic,
    `replan()` gives another start. Raises WorkersLost where workers die again before they are ready.
    """
    with contextlib.ExitStack() as running:
        if not recoveries.under_way:
            yield running.enter_context(start())
            return
        try:
            try:
                groups = running.enter_context(start(wait_s=recoveries.node_wait_s))
            except PlacementError as error:
                if not recoveries.elastic or replan is None:
                    error.add_note("run.elastic: true goes on with what is left")
                    raise
                groups = _on_what_is_left(running, replan, recoveries.tell)
        except CallError as error:
            raise WorkersLost(error, recoveries.done) from error
        yield groups


def _on_what_is_left(
    running: contextlib.ExitStack, replan: Callable[[], Start], tell: Callable[[str], None]
) -> Any:
    """What a start under another plan gives; it is planned again while a lost node may still seem alive."""
    deadline = time.monotonic() + _NOTICE_S
    while True:
        try:
            return running.enter_context(replan()())
        except PlacementError as error:
            if time.monotonic() >= deadline:
                raise
            tell(f"recovery: {str(error).partition(chr(10))[0]}; planning again")
            time.sleep(_PAUSE_S)


@contextlib.contextmanager
def guarded(trainer: Trains, groups: Mapping[str, Any], lost: Lost) -> Iterator[None]:
    """Raise WorkersLost for what the block raises because workers are gone."""
    try:
        yield
    except Exception as error:
        if (cause := lost(error, groups)) is None:
            raise
        settle = trainer.checkpoints.abandon if trainer.checkpoints is not None else lambda: None
        raise WorkersLost(cause, trainer.done, settle) from error
