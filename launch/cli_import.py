"""The commands that speak other systems' words: `rolemesh import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_run(
    system: Annotated[str, typer.Argument(metavar="SYSTEM", help="verl or openrlhf.")],
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Its shell script or configuration.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides in that system's words.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the recipe to this file, else print it.")
    ] = None,
    variables: Annotated[
        list[str] | None, typer.Option("--var", help="A shell variable of the script: NAME=VALUE.")
    ] = None,
) -> int:
    """Turn a verl or OpenRLHF command line into a recipe; print what became of each setting."""
    from rolemesh.launch.import_command import import_table, read_foreign, written

    found = read_foreign(system, path, overrides or [], variables or [])
    text = written(system, path, found)
    if out is None:
        print(text)
    else:
        out.write_text(text)
    print("\n".join(import_table(found)))
    return 0


def add_commands(main: typer.Typer) -> None:
    """Add these commands to the command line."""
    main.command("import")(import_run)
