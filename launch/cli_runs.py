"""Commands about a run that goes on, or has ended, by its folder alone: `status`, `stacks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a run, on a disk that is shared.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_commands(main: typer.Typer) -> None:
    """Make them commands of `rolemesh`."""
    for command in (status, stacks):
        main.command()(command)


def status(run: RunFolder, as_json: AsJson = False) -> int:
    """Print how a run stands.

    The exit code is 0 for one that goes on or ended in good order, 1 failed, silent or dead, 2 no run there.
    """
    from rolemesh.launch.status import EXIT_NO_RUN, NoRunError, read_status

    try:
        found = read_status(run)
    except NoRunError as error:
        print(error)
        return EXIT_NO_RUN
    print(found.json() if as_json else found.text())
    return found.exit_code


def stacks(
    run: RunFolder,
    role: Annotated[str, typer.Option("--role", help="Only of this role, or of the driver.")] = "",
    rank: Annotated[int | None, typer.Option("--rank", help="Only of this rank.")] = None,
    threads: Annotated[
        bool, typer.Option("--threads", help="Every thread, not the computing one alone.")
    ] = False,
    limit_s: Annotated[float, typer.Option("--limit-s", help="Wait so long for the answer.")] = 30.0,
    as_json: AsJson = False,
) -> int:
    """Print the Python stacks of a run's processes.

    The exit code is 1 where there are no new ones, 2 where there is no run.
    """
    from rolemesh.launch.stacks import get_stacks
    from rolemesh.launch.status import EXIT_NO_RUN, NoRunError

    try:
        found = get_stacks(run, limit_s)
    except NoRunError as error:
        print(error)
        return EXIT_NO_RUN
    print(found.json() if as_json else found.text(role, rank, threads=threads))
    return 1 if found.problem else 0
