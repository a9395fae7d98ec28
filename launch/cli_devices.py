"""Commands about devices and runs: `cluster`, `calibrate`, `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Device = Literal["cpu", "cuda"]


def add_commands(main: typer.Typer) -> None:
    """Make them commands of `rolemesh`."""
    for command in (cluster, calibrate, report):
        main.command()(command)


def cluster(
    address: Annotated[str, typer.Option(help="Look at this running Ray cluster (`auto` or ip:port).")] = "",
    preset: Annotated[
        str, typer.Option(help="Show this one: such as '16 x h100x8', or a cluster file.")
    ] = "",
    slots: Annotated[int, typer.Option(help="Worker slots of this machine; default: one per core.")] = 0,
    device: Annotated[Device | None, typer.Option(help="Take GPUs or CPU slots as devices.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write it to this file, for `plan --cluster`.")] = None,
) -> int:
    """Print a cluster's nodes: this machine, a running Ray cluster, or a preset."""
    from rolemesh.launch.cluster import cluster_lines, find_cluster

    found, notes = find_cluster(address, preset, slots, device)
    print("\n".join([*cluster_lines(found), *(f"note: {note}" for note in notes)]))
    if out is not None:
        out.write_text(found.to_yaml())
        print(f"written to {out}")
    return 0


def calibrate(
    out: Annotated[Path, typer.Option(help="Write the profile to this file.")],
    device: Annotated[Device | None, typer.Option(help="Measure GPUs or CPU slots.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes: half a minute.")] = False,
    device_type: Annotated[
        str, typer.Option(help="Device type whose data sheet fills in what isn't measured.")
    ] = "",
) -> int:
    """Measure this machine's devices into a profile, for predictions that fit them."""
    from rolemesh.parallel.calibrate import calibrate

    measured = calibrate(device or "", quick=quick, device_type=device_type)
    out.write_text(measured.to_yaml())
    print("\n".join([*measured.summary(), f"written to {out}"]))
    return 0


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.")],
    feed: Annotated[
        Path | None, typer.Option(help="Correct this profile by what the run's operations took.")
    ] = None,
) -> int:
    """Compare a run's timeline and memory with its plan; also writes RUN_DIR/report.html."""
    from rolemesh.launch.report import feed_profile, read_report
    from rolemesh.launch.report_html import report_page

    found = read_report(run)
    page = run / "report.html"
    page.write_text(report_page(found), encoding="utf-8")
    print(f"{found.text()}\nwritten to {page}")
    if feed is not None:
        print("\n".join(feed_profile(found, feed)))
    return 0
