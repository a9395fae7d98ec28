"""What each attempt of a run does with checkpoints, whatever it trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rolemesh.engine.checkpoint.saver import Checkpoints, TrainedRole
from rolemesh.engine.checkpoint.store import FOLDER, CheckpointStore
from rolemesh.launch.progress import Progress
from rolemesh.launch.schema import Run
from rolemesh.placement.plan import PlacementPlan


class Resumable(Protocol):
    """A trainer that goes on from a checkpoint; `done` are the steps behind it."""

    checkpoints: Checkpoints | None
    done: int

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take up what a checkpoint holds of the trainer."""


def checkpoints_of(
    run: Run,
    groups: Mapping[str, Any],
    trained: Mapping[str, TrainedRole],
    plan: PlacementPlan,
    progress: Progress,
) -> Checkpoints:
    """Where and how often a run saves its roles, with the plan that it runs by."""
    return Checkpoints(
        CheckpointStore(Path(run.dir) / FOLDER, keep_last=run.keep_last, keep_best=run.keep_best),
        groups,
        trained,
        plan.to_yaml(),
        timeout_s=run.timeout_s,
        tell=progress.write,
    )


def take_up(trainer: Resumable, path: Path, progress: Progress) -> None:
    """Bring trainer and workers to a checkpoint; later ones of its folder are of a run that is given up."""
    assert trainer.checkpoints is not None
    progress.start("load checkpoint")
    trainer.resume(trainer.checkpoints.load(path))
    progress.end("load checkpoint")
    progress.begin_steps(trainer.done)
    if path.parent == trainer.checkpoints.store.path:
        for aside in trainer.checkpoints.store.set_aside_after(trainer.done):
            progress.write(f"a checkpoint after step {trainer.done} was set aside as {aside}")
