"""The folder of one run: what is written into it before training starts."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from rolemesh.engine.checkpoint.manifest import Manifest
from rolemesh.engine.checkpoint.store import FOLDER
from rolemesh.engine.run_log import TRAINED_FILE
from rolemesh.launch.config import to_yaml
from rolemesh.launch.loggers import without_recipe_secrets
from rolemesh.launch.schema import Recipe


def open_run_folder(recipe: Recipe, resume: Path | None = None) -> Path | None:
    """`make_run_folder` of a recipe."""
    return make_run_folder(Path(recipe.run.dir), to_yaml(recipe), resume)


def make_run_folder(folder: Path, recipe: str, resume: Path | None = None) -> Path | None:
    """Make `folder` with `recipe.yaml` (training from it repeats the run) and `env.txt`.

    An earlier run there is moved to `<dir>.1`, `.2`, ...; returns where, or None. A run that goes on from its
    own checkpoint `resume` stays: what it noted of later steps is dropped, and its timeline begins anew
    beside the old.
    """
    moved = None
    if resume is not None and resume.parent == folder / FOLDER:
        drop_rows_after(folder, Manifest.read(resume).step)
        _new_timeline(folder)
    elif (folder / "recipe.yaml").exists():
        moved = next(p for i in itertools.count(1) if not (p := Path(f"{folder}.{i}")).exists())
        folder.rename(moved)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(without_recipe_secrets(recipe))
    installed = sorted(
        {f"{d.metadata['Name']}=={d.version}" for d in metadata.distributions()}, key=str.lower
    )
    (folder / "env.txt").write_text("\n".join(installed) + "\n")
    return moved


def drop_rows_after(folder: Path, step: int) -> None:
    """Take out of a run's files by step what it noted after `step`: it goes on from there."""
    for name in ("metrics.jsonl", TRAINED_FILE):
        if (file := folder / name).exists():
            rows = file.read_text().splitlines()
            with file.open("r+") as kept:  # in place: the disk may be full
                kept.write("".join(f"{row}\n" for row in rows if _step_of(row) <= step))
                kept.truncate()


def _new_timeline(folder: Path) -> None:
    timeline = folder / "timeline.json"
    if timeline.exists():
        numbered = (folder / f"timeline.{i}.json" for i in itertools.count(1))
        timeline.rename(next(path for path in numbered if not path.exists()))


def _step_of(row: str) -> float:
    """The step of a line; infinite for one that a crash cut off."""
    try:
        return float(json.loads(row)["step"])
    except ValueError:
        return math.inf


def write_memory(file: Path, groups: Iterable[Any]) -> None:
    """Note the most memory that each rank of the worker groups' pools has held, for `rolemesh report`."""
    measured = {}
    for pool, group in {group.resource_pool.name: group for group in groups}.items():
        answers = [answer for answer in group.memory().values() if not isinstance(answer, str)]
        if answers:
            measured[pool] = {"what": answers[0].what, "peak_bytes": [a.peak_bytes for a in answers]}
            if device_bytes := getattr(answers[0], "device_bytes", 0):
                measured[pool]["device_bytes"] = device_bytes
            if base := [getattr(answer, "base_bytes", 0) for answer in answers]:
                measured[pool]["base_bytes"] = base
    file.write_text(json.dumps(measured, indent=1) + "\n")
