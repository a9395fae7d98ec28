"""Where a run's checkpoints stand with its recipe: the keys' rules, and the one to go on from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rolemesh.engine.checkpoint.manifest import MANIFEST, Manifest
from rolemesh.engine.checkpoint.store import FOLDER, newest_good
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.schema import Run
from rolemesh.parallel.checkpoint_error import CheckpointError


@dataclass(frozen=True)
class Resume:
    """The checkpoint to go on from (None: start at the first step), and what to tell about the choice."""

    path: Path | None = None
    lines: tuple[str, ...] = ()


def useless_checkpoint_keys(run: Run) -> Iterator[tuple[str, str]]:
    """Keys of checkpoints that count for nothing in this run, with the reason."""
    if run.save_every == 0:
        for name in ("keep_last", "keep_best", "best_metric"):
            yield f"run.{name}", "run.save_every is 0, so there are no checkpoints to choose from"
    elif run.keep_last is None:
        for name in ("keep_best", "best_metric"):
            yield f"run.{name}", "run.keep_last is not given, so every checkpoint is kept"
    elif run.keep_best == 0:
        yield "run.best_metric", "run.keep_best is 0"


def useless_recovery_keys(run: Run) -> Iterator[tuple[str, str]]:
    """Keys of recoveries that count for nothing in a run that makes none, with the reason."""
    if run.recoveries == 0:
        for name in ("elastic", "node_wait_s"):
            yield f"run.{name}", "run.recoveries is 0, so a lost worker ends the run"


def useless_walltime_keys(run: Run) -> Iterator[tuple[str, str]]:
    """Keys of a job's time that count for nothing in a run that does not look at it, with the reason."""
    if run.stop_before_walltime is None:
        for name in ("walltime", "requeue"):
            yield f"run.{name}", "run.stop_before_walltime is not given, so the run ends when it is done"


def check_walltime(run: Run) -> None:
    """Raise RecipeError where a job that starts again would begin anew, or has no time before its end."""
    if run.requeue and run.resume != "auto":
        raise RecipeError(
            "run.requeue starts the same job again: set run.resume: auto, or it begins anew each time"
        )
    if run.walltime and run.stop_before_walltime and run.walltime <= run.stop_before_walltime:
        raise RecipeError(
            f"run.walltime is {run.walltime:g} s, run.stop_before_walltime {run.stop_before_walltime:g} s: "
            "no time is left to train"
        )


def check_checkpoints(run: Run, val_files: Sequence[str]) -> None:
    """Raise RecipeError where no checkpoint would have a score to be the best by."""
    if run.keep_best == 0:
        return
    if not val_files:
        raise RecipeError("run.keep_best needs a validation score: give data.val_files")
    if run.validate_every == 0 or run.save_every % run.validate_every:
        raise RecipeError(
            f"run.keep_best compares validation scores, but not every step that is saved (run.save_every "
            f"{run.save_every}) is validated (run.validate_every {run.validate_every}): "
            f"set run.validate_every to a divisor of run.save_every"
        )


def find_checkpoint(run: Run) -> Resume:
    """What `run.resume` comes to; every file of the checkpoint is verified.

    Raises CheckpointError for a checkpoint that is damaged, and where `auto` finds damaged ones only.
    """
    if run.resume is None:
        return Resume()
    if run.resume != "auto":
        path = Path(run.resume)
        if (path / FOLDER).is_dir() and not (path / MANIFEST).exists():
            raise CheckpointError(
                f"{path} is a run folder: give one of its {FOLDER}, or auto with run.dir={path}"
            )
        manifest = Manifest.read(path)
        manifest.check(path)
        return Resume(path, (f"resume: from step {manifest.step}, {path}",))
    folder = Path(run.dir) / FOLDER
    found = newest_good(folder)
    skipped = tuple(f"resume: skipped {reason}" for reason in found.skipped)
    if found.path is None:
        damaged = [reason for reason in found.skipped if not reason.startswith(".")]
        if damaged:
            raise CheckpointError(
                f"run.resume auto: no checkpoint in {folder} is good: {'; '.join(damaged)}. "
                "To start at the first step instead, leave run.resume out"
            )
        return Resume(None, (*skipped, f"resume: no checkpoint in {folder}, start at the first step"))
    return Resume(found.path, (*skipped, f"resume: from step {Manifest.read(found.path).step}, {found.path}"))
