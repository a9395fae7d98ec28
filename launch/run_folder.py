"""The folder of one run: what is written into it before training starts."""

from __future__ import annotations

import itertools
from importlib import metadata
from pathlib import Path

from rolemesh.launch.config import to_yaml
from rolemesh.launch.schema import Recipe


def open_run_folder(recipe: Recipe) -> Path | None:
    """Make `run.dir` with `recipe.yaml` (training from it repeats the run) and `env.txt`.

    An earlier run there is moved to `<dir>.1`, `.2`, ...; returns where, or None.
    """
    folder = Path(recipe.run.dir)
    moved = None
    if (folder / "recipe.yaml").exists():
        moved = next(p for i in itertools.count(1) if not (p := Path(f"{folder}.{i}")).exists())
        folder.rename(moved)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    installed = sorted(
        {f"{d.metadata['Name']}=={d.version}" for d in metadata.distributions()}, key=str.lower
    )
    (folder / "env.txt").write_text("\n".join(installed) + "\n")
    return moved
