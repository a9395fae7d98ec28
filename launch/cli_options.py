"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file (YAML).")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as actor.layout.tp=2.")
]
ResumeFrom = Annotated[
    str, typer.Option("--resume", help="Go on from this checkpoint, or auto: the newest good one.")
]
