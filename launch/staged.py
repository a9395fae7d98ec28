"""run.stage: a recipe whose models are read from the nodes' own disks, once they are copied there."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rolemesh.engine.ray.each_node import on_each_node
from rolemesh.engine.staging import stage
from rolemesh.launch.progress import Progress
from rolemesh.launch.schema import MODEL_ROLES, Recipe, Run
from rolemesh.placement.cluster import DeviceKind
from rolemesh.placement.memory.items import GIB


def staged(recipe: Recipe, kind: DeviceKind, progress: Progress) -> Recipe:
    """The recipe with the paths of the models' copies, made on every node with devices of the kind.

    Without run.stage it is the recipe itself. Raises StageError, TimeoutError.
    """
    if recipe.run.stage is None:
        return recipe
    roles = {role: getattr(recipe, role) for role in MODEL_ROLES if role != "rollout"}
    folders = {role: str(keys.path) for role, keys in roles.items() if keys.path and Path(keys.path).is_dir()}
    copies = stage_on_nodes(folders.values(), recipe.run, kind, progress)
    return replace(
        recipe, **{role: replace(roles[role], path=copies[path]) for role, path in folders.items()}
    )


def stage_on_nodes(paths: Iterable[str], run: Run, kind: DeviceKind, progress: Progress) -> dict[str, str]:
    """Copy models to each node's `run.stage`; the copy's path by the model's. Raises as `staged`."""
    copies = {}
    for path in dict.fromkeys(paths):
        progress.start("stage models")
        begun = time.monotonic()
        done = on_each_node(stage, path, run.stage, device_kind=kind, limit_s=run.timeout_s)
        progress.end("stage models")
        copied = [n_bytes for _, n_bytes in done.values() if n_bytes]
        copies[path] = str(next(iter(done.values()))[0])
        if copied:
            what = f"{max(copied) / GIB:.3g} GiB copied on {len(copied)} of {len(done)} nodes"
            progress.write(f"{path}: {what} in {time.monotonic() - begun:.0f} s, to {copies[path]}")
        else:
            progress.write(f"{path}: read from its copies, {copies[path]}")
    return copies
