"""The checkpoints of one run on disk: how they come to be whole, which are kept, which one to go on from."""

from __future__ import annotations

import itertools
import math
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rolemesh.engine.checkpoint.manifest import MANIFEST, Manifest
from rolemesh.parallel.checkpoint_error import CheckpointError
from rolemesh.parallel.durable_files import sync_folder, write_file

FOLDER = "checkpoints"
RUN_ID = "run_id"
_NAME = re.compile(r"step_(\d+)")
_ASIDE = re.compile(r"\.step_\d+\.(partial|replaced)")


@dataclass(frozen=True)
class Found:
    """The newest good checkpoint (None where there is none), and what was passed over with the reason."""

    path: Path | None
    skipped: tuple[str, ...] = ()


def newest_good(folder: str | Path) -> Found:
    """The newest checkpoint in a run's `checkpoints` folder whose files are all as they were written."""
    skipped: list[str] = []
    for path in sorted(Path(folder).glob(".step_*.partial")):
        skipped.append(f"{path.name}: a save that was not finished")
    for _, path in sorted(_steps(Path(folder)), reverse=True):
        try:
            Manifest.read(path).check(path)
            return Found(path, tuple(skipped))
        except CheckpointError as error:
            skipped.append(f"{path.name}: {error}")
    return Found(None, tuple(skipped))


class CheckpointStore:
    """The folder `path` of one run. It removes what this run wrote (by `run_id` in the manifests), nothing
    else.

    Kept are the `keep_last` newest (None: all) and, of those with a score, the `keep_best` highest.
    """

    def __init__(self, path: str | Path, *, keep_last: int | None = None, keep_best: int = 0) -> None:
        self.path, self.keep_last, self.keep_best = Path(path), keep_last, keep_best
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / RUN_ID
        if not file.is_file():
            write_file(file, uuid.uuid4().hex.encode())
            sync_folder(self.path)
        self.run_id = file.read_text()
        self._clean()

    def begin(self, step: int) -> Path:
        """A new folder to write the checkpoint of `step` into; it counts only once `commit` has run.

        Its first file, which belongs to the checkpoint, is `RUN_ID`.
        """
        partial = self.path / f".step_{step}.partial"
        if partial.exists() and _run_of(partial) != self.run_id:
            _aside(partial)
        self.discard(partial)
        partial.mkdir()
        write_file(partial / RUN_ID, self.run_id.encode())
        return partial

    def commit(self, partial: Path, manifest: Manifest) -> Path:
        """Make a folder whose other files are on disk the checkpoint of its step, then remove old ones."""
        for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
            sync_folder(folder)
        manifest.write(partial)
        sync_folder(partial)
        target = self.path / f"step_{manifest.step}"
        replaced = self._make_way(target)
        partial.rename(target)
        sync_folder(self.path)
        if replaced is not None:
            self._remove(replaced)
        self.prune()
        return target

    def discard(self, partial: Path) -> None:
        """Remove a save that failed."""
        shutil.rmtree(partial, ignore_errors=True)

    def prune(self) -> None:
        """Remove this run's checkpoints that are not to be kept; damaged ones count for nothing."""
        if self.keep_last is None:
            return
        mine = dict(self._mine())
        whole = [path for path, manifest in mine.items() if _is_whole(path, manifest)]
        kept = set(whole[: self.keep_last]) | set(self._best(whole, mine))
        oldest = min((mine[path].step for path in whole[: self.keep_last]), default=0)
        for path, manifest in mine.items():
            if path not in kept and (path in whole or manifest.step < oldest):
                self._remove(path)

    def best(self) -> tuple[int, float] | None:
        """Step and score of this run's best checkpoint."""
        mine = dict(self._mine())
        top = self._best([path for path in mine if _is_whole(path, mine[path])], mine, 1)
        return None if not top else (mine[top[0]].step, float(mine[top[0]].score or 0.0))

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename checkpoints of later steps, which a run that goes on from `step` has not yet come to."""
        return [_aside(path) for at, path in sorted(_steps(self.path)) if at > step]

    def _best(self, paths: list[Path], mine: dict[Path, Manifest], n: int | None = None) -> list[Path]:
        scored = [
            path for path in paths if mine[path].score is not None and math.isfinite(mine[path].score or 0)
        ]
        scored.sort(key=lambda path: (mine[path].score, mine[path].step), reverse=True)
        return scored[: self.keep_best if n is None else n]

    def _mine(self) -> Iterator[tuple[Path, Manifest]]:
        """This run's checkpoints, newest first, whole or not."""
        for _, path in sorted(_steps(self.path), reverse=True):
            try:
                manifest = Manifest.read(path)
            except CheckpointError:
                continue
            if manifest.run_id == self.run_id:
                yield path, manifest

    def _make_way(self, target: Path) -> Path | None:
        """Rename what has the checkpoint's name; returns it when it is this run's, to be removed later."""
        if not target.exists():
            return None
        if target not in dict(self._mine()):
            _aside(target)
            return None
        replaced = target.with_name(f".{target.name}.replaced")
        if replaced.exists():
            _aside(replaced)
        return target.rename(replaced)

    def _remove(self, path: Path) -> None:
        """Remove the files that the manifest lists, the manifest last: until then the folder is known as
        ours.
        """
        manifest = Manifest.read(path)
        for name in manifest.files:
            (path / name).unlink(missing_ok=True)
        (path / MANIFEST).unlink()
        for folder in sorted((p for p in path.rglob("*") if p.is_dir()), reverse=True):
            _remove_empty(folder)
        _remove_empty(path)

    def _clean(self) -> None:
        """Remove what a killed process of this run left half done."""
        for path in self.path.iterdir():
            if _ASIDE.fullmatch(path.name) and _run_of(path) == self.run_id:
                shutil.rmtree(path) if path.name.endswith(".partial") else self._remove(path)
        for _, path in _steps(self.path):
            _remove_empty(path)


def _steps(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if (match := _NAME.fullmatch(path.name)) and path.is_dir():
            yield int(match[1]), path


def _is_whole(path: Path, manifest: Manifest) -> bool:
    try:
        manifest.check_sizes(path)
    except CheckpointError:
        return False
    return True


def _run_of(path: Path) -> str | None:
    """The run that wrote a folder, finished or not."""
    read: tuple[Callable[[], str], ...] = (
        lambda: (path / RUN_ID).read_text(),
        lambda: Manifest.read(path).run_id,
    )
    for attempt in read:
        try:
            return attempt()
        except (OSError, CheckpointError):
            continue
    return None


def _aside(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.aside{n or ''}") for n in itertools.count())
    return path.rename(next(name for name in names if not name.exists()))


def _remove_empty(folder: Path) -> None:
    """Remove a folder unless it holds something that is not ours."""
    if next(folder.iterdir(), None) is None:
        folder.rmdir()
