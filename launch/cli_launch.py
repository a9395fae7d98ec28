"""The command that starts a recipe on a cluster: `rolemesh launch`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rolemesh.launch.cli_options import Overrides, RecipePath


def launch(
    kind: Annotated[str, typer.Argument(metavar="HOW", help="slurm, torchrun or k8s.")],
    recipe: RecipePath,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option("--nodes", min=0, help="Nodes; 0: the recipe's cluster.nodes.")] = 0,
    container: Annotated[
        str, typer.Option("--container", help="Image to run in, in place of the site file's.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script, manifest or command; start nothing.")
    ] = False,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Skip the check: the recipe's files are elsewhere.")
    ] = False,
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", help="torchrun: the number of this node, from 0.")
    ] = None,
    endpoint: Annotated[
        str, typer.Option("--endpoint", help="torchrun: HOST:PORT of node 0, a port that is free there.")
    ] = "",
    run_id: Annotated[
        str, typer.Option("--id", help="torchrun: a name of the run, the same on every node.")
    ] = "",
) -> int:
    """Start a recipe on a cluster: a Slurm job, a KubeRay job, or torchrun on this node."""
    from rolemesh.launch.launch_command import Asked, launch

    asked = Asked(
        recipe,
        overrides or [],
        nodes,
        container=container or None,
        dry_run=dry_run,
        check=not no_check,
        node_rank=node_rank,
        endpoint=endpoint,
        run_id=run_id,
    )
    return launch(kind, asked, lambda line: print(line, file=sys.stderr, flush=True))


def add_commands(main: typer.Typer) -> None:
    """Add the command to the command line."""
    main.command()(launch)
