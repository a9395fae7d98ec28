"""The command line. Heavy libraries are imported inside the commands, so that `--help` is quick."""

from __future__ import annotations

import json
import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from rolemesh.engine.loggers.secrets import hide
from rolemesh.launch import cli_devices, cli_import, cli_launch, cli_runs, cli_services, cli_supervised
from rolemesh.launch.cli_options import Overrides, RecipePath, ResumeFrom
from rolemesh.launch.extras import extra_of
from rolemesh.launch.fields import InfeasibleError, RecipeError
from rolemesh.launch.process import quick_imports

EXIT_OK, EXIT_FAILED, EXIT_BAD_RECIPE, EXIT_INFEASIBLE, EXIT_INTERRUPTED = (
    0,
    1,
    2,
    3,
    130,
)  # and signals.EXIT_TERMINATED, 143

Address = Annotated[
    str, typer.Option("--address", help="Join this Ray cluster (auto or ip:port); short for run.address=.")
]


class _Commands(typer.core.TyperGroup):
    """Turns what a command returns or raises into an exit code and a message without a stack."""

    def invoke(self, ctx: Any) -> None:
        usage_error: type[BaseException] = typer.BadParameter.__mro__[1]
        try:
            code = super().invoke(ctx)
        except (typer.Exit, typer.Abort, usage_error):
            raise  # typer prints these itself
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = EXIT_INTERRUPTED
        except Exception as error:
            if ctx.params["debug"]:
                traceback.print_exc()
            print(hide(describe_error(error)), file=sys.stderr)
            if isinstance(error, ModuleNotFoundError) and (extra := extra_of(error.name or "")):
                print(f"{error.name} is not installed: pip install 'rolemesh[{extra}]'", file=sys.stderr)
            code = exit_code_of(error)
        raise typer.Exit(code)


main = typer.Typer(
    cls=_Commands,
    help="Reinforcement learning of language models, with every role placed where it fits.",
    no_args_is_help=True,
    add_completion=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"rolemesh {version('rolemesh')}")
        raise typer.Exit


@main.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print the whole stack of an error.")] = False,
) -> None:
    """Options before the command."""


@main.command()
def train(
    recipe_path: RecipePath,
    overrides: Overrides = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="Run this plan file, whatever placement the recipe has.")
    ] = None,
    resume: ResumeFrom = "",
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Two full steps with random weights: does the memory suffice?")
    ] = False,
    address: Address = "",
) -> int:
    """Check a recipe, then train."""
    from rolemesh.launch.check import check_recipe
    from rolemesh.launch.config import load_recipe
    from rolemesh.launch.run_folder import open_run_folder
    from rolemesh.launch.run_lock import only_run_in

    going_on = [f"run.resume={json.dumps(resume)}"] if resume else []
    recipe = load_recipe(recipe_path, [*(overrides or []), *_instead(plan), *going_on, *_joined(address)])
    if smoke:
        from rolemesh.launch.smoke import smoke_recipe

        recipe = smoke_recipe(recipe)
    report = check_recipe(recipe)
    print(report.text(), flush=True)
    if report.problems:
        return EXIT_BAD_RECIPE
    if report.plan is None:
        raise RecipeError("placement.pools: `where` chooses nodes of a running Ray cluster: give run.address")
    with only_run_in(recipe.run.dir):
        if moved := open_run_folder(recipe, report.resume.path):
            print(f"an earlier run in {recipe.run.dir} was moved to {moved}", flush=True)
        with quick_imports():
            from rolemesh.launch.train import run_training

        code = run_training(recipe, report.plan, report.resume.path)
    return _smoked(recipe.run.dir) if smoke and code == EXIT_OK else code


def _joined(address: str) -> list[str]:
    return [f"run.address={json.dumps(address)}"] if address else []


def _smoked(folder: str) -> int:
    """Print what the two steps of a smoke run took; the exit code."""
    from rolemesh.launch.smoke import smoke_lines, smoke_memory

    pools = smoke_memory(Path(folder))
    print("\n".join(smoke_lines(pools)))
    return EXIT_FAILED if any(pool.over for pool in pools) else EXIT_OK


@main.command("convert")
def convert_to_hugging_face(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or a run folder (its newest good one); verl's too.")
    ],
    out: Annotated[Path, typer.Argument(help="The new folder.")],
    role: Annotated[str, typer.Option("--role", help="actor, critic, or reward (of train-rm).")] = "actor",
    drop_bias: Annotated[
        bool, typer.Option("--drop-bias", help="Leave out the bias of a critic's head, which verl's has.")
    ] = False,
) -> int:
    """Write a model of a checkpoint as a Hugging Face folder, or such a folder as a sharded checkpoint."""
    from rolemesh.launch.convert import convert_checkpoint

    for line in convert_checkpoint(checkpoint, out, role, drop_bias=drop_bias):
        print(line, flush=True)
    return EXIT_OK


@main.command()
def check(
    recipe_path: RecipePath,
    overrides: Overrides = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Leave this machine's devices out: the run is elsewhere.")
    ] = False,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="List the keys left to their default.")
    ] = False,
    address: Address = "",
) -> int:
    """Check a recipe against its files, models and this machine; start nothing."""
    from rolemesh.launch.check import check_recipe
    from rolemesh.launch.config import list_defaults, load_recipe, mention_defaults

    recipe = load_recipe(recipe_path, [*(overrides or []), *_joined(address)])
    report = check_recipe(recipe, offline=offline)
    left_out = list_defaults(recipe) if defaults else mention_defaults(recipe)
    print("\n".join([*left_out, report.text()]))
    return EXIT_BAD_RECIPE if report.problems else EXIT_OK


class _PlanCommands(typer.core.TyperGroup):
    """`plan RECIPE` is short for `plan recipe RECIPE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["recipe", *args]
        return super().parse_args(ctx, args)


planning = typer.Typer(
    cls=_PlanCommands,
    help="Where roles go: `plan RECIPE`, `plan diff A B`, `plan --from verl|openrlhf FILE`.",
    no_args_is_help=True,
)
main.add_typer(planning, name="plan")


@planning.command("recipe")
def plan_of_recipe(
    recipe_path: RecipePath,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the plan (or recipe, or script) to this file.")
    ] = None,
    cluster: Annotated[
        str, typer.Option("--cluster", help="Plan for this cluster: a file, or such as '16 x h100x8'.")
    ] = "",
    system: Annotated[
        str,
        typer.Option("--from", help="RECIPE is a configuration of verl or openrlhf: print it as a recipe."),
    ] = "",
    profile: Annotated[
        list[Path] | None, typer.Option("--profile", help="Measured devices: a file of `rolemesh calibrate`.")
    ] = None,
    limit_s: Annotated[
        float, typer.Option("--limit-s", min=0, help="Strategy auto: stop searching after so many seconds.")
    ] = 60.0,
    any_software: Annotated[
        bool, typer.Option("--any-software", help="Also plan what this version's workers cannot run.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build every distinct rank, without memory or devices.")
    ] = False,
    emit: Annotated[
        str, typer.Option("--emit", help="Print the plan as a command line of verl or openrlhf.")
    ] = "",
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", help="Fix a key (actor.layout.tp=8) or a placement ('actor+ref together')."),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", min=0, help="Strategy auto: compare so many ways to share devices.")
    ] = 0,
    lengths_from: Annotated[
        Path | None, typer.Option("--lengths-from", help="Plan for the response lengths of this run folder.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write pictures of the plan to this file.")
    ] = None,
    show_map: Annotated[bool, typer.Option("--map", help="Also print devices and step as text.")] = False,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="List the keys left to their default.")
    ] = False,
) -> int:
    """Print where a recipe's roles go; start nothing. The word `recipe` may be left out."""
    from rolemesh.launch import plan_command
    from rolemesh.launch.config import load_recipe

    for file in (out, html):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)  # a search of a minute is not to end without it
    if system:
        text = plan_command.imported(system, recipe_path, overrides or [])
        print(text)
    else:
        plan, lines = plan_command.plan_recipe(
            recipe_path,
            overrides or [],
            cluster=cluster,
            any_software=any_software,
            limit_s=limit_s,
            profiles=profile or (),
            dry_run=dry_run,
            pins=pin or (),
            lengths_from=lengths_from,
            top=top,
            show_map=show_map,
            html=html,
            defaults=defaults,
        )
        if emit:
            from rolemesh.launch.emit_command import emitted

            text = emitted(emit, load_recipe(recipe_path, overrides or []), plan).rstrip()
            print(text)
        else:
            text = plan.to_yaml().rstrip()
            print("\n".join(lines))
    if out is not None:
        out.write_text(text + "\n")
    return EXIT_OK


PlanPath = Annotated[Path, typer.Argument(help="A plan file.")]


@planning.command("diff")
def plan_diff(one: PlanPath, other: PlanPath) -> int:
    """Print what differs between two plan files; the exit code is 0 when nothing does, else 1."""
    from rolemesh.launch.plan_command import diff_files

    lines = diff_files(one, other)
    print("\n".join(lines) or "no difference")
    return EXIT_FAILED if lines else EXIT_OK


def _instead(plan: Path | None) -> list[str]:
    """Overrides that put a plan file in the place of the recipe's placement."""
    if plan is None:
        return []
    nothing = [f"placement.{name}=null" for name in ("strategy", "pools", "pin")]
    return [*nothing, f"placement.plan={json.dumps(str(plan))}"]


cli_devices.add_commands(main)
cli_import.add_commands(main)
cli_launch.add_commands(main)
cli_runs.add_commands(main)
cli_services.add_commands(main)
cli_supervised.add_commands(main)


@main.command()
def schema(key: Annotated[str, typer.Argument(help="A key or section, such as actor.optim.")] = "") -> int:
    """Print type, unit, default, meaning and verl's name of the recipe's keys."""
    from rolemesh.launch.describe import describe

    print(describe(key))
    return EXIT_OK


@main.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    address: Annotated[
        str, typer.Option(help="Look at this Ray cluster instead of starting a local one.")
    ] = "",
) -> int:
    """Run what a run needs here (kernels, links, memory, limits, Ray) and say what is broken, with a fix."""
    from rolemesh.launch.doctor import examine

    report = examine(address or None)
    print(report.json() if as_json else report.text())
    return EXIT_FAILED if report.broken else EXIT_OK


@main.command("bench")
def bench_strategies(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="A benchmark's spec (YAML).")],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write results.json, report.html and plans into this folder.")
    ] = None,
) -> int:
    """Compare placement strategies on models, clusters and workloads: simulated, or really run."""
    from rolemesh.launch.bench import REPORT, bench

    result = bench(spec, overrides or [], out=out, tell=lambda line: print(line, file=sys.stderr, flush=True))
    print(result.text())
    if out is not None:
        print(f"report: {out / REPORT}")
    return EXIT_FAILED if any(cell.state == "failed" for cell in result.cells) else EXIT_OK


def exit_code_of(error: Exception) -> int:
    """What the process returns: whether the recipe is bad, cannot be placed, or something failed."""
    if isinstance(error, InfeasibleError):
        return EXIT_INFEASIBLE
    return EXIT_BAD_RECIPE if isinstance(error, RecipeError) else EXIT_FAILED


def describe_error(error: BaseException) -> str:
    """The error and its causes, innermost last, without stacks."""
    lines: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        notes = getattr(cause, "__notes__", ())
        text = "\n".join([f"{type(cause).__name__}: {cause}", *notes])
        told = str(cause) if " " in str(cause) and not notes else text
        if not any(told in line for line in lines):  # an error often quotes its cause already
            lines.append(f"{'caused by' if lines else 'error'}: {text}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\n".join(lines)
