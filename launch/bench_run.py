"""The cells of a benchmark that are really run: the plan that was predicted, trained for a few steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rolemesh.launch.bench_result import CellResult, Measured, slug
from rolemesh.launch.bench_simulate import bars_of, simulate_case
from rolemesh.launch.bench_spec import Case, Limits
from rolemesh.launch.config import to_yaml
from rolemesh.launch.report import ReportError, RunReport, read_report

_LAST_LINES = 6  # of a run that fails


class RunError(RuntimeError):
    """A run that failed or took too long; the message ends with what it printed last."""


def run_case(case: Case, limits: Limits, out: Path | None) -> Iterator[CellResult]:
    """The cells of a case, one run after the other; run folders stay in `out`."""
    for predicted in simulate_case(case, limits):
        if predicted.plan is None:
            yield predicted
            continue
        start = time.monotonic()
        try:
            with _folder(out) as folder:
                found = run_cell(case, predicted, limits, folder / slug(*predicted.case, predicted.strategy))
        except (RunError, ReportError) as error:
            found = replace(
                predicted, state="failed", reason=str(error), step_s=None, bars=(), utilisation={}
            )
        yield replace(found, planning_s=predicted.planning_s + time.monotonic() - start)


def run_cell(
    case: Case,
    predicted: CellResult,
    limits: Limits,
    folder: Path,
    *,
    during: Callable[[subprocess.Popen[str]], None] = lambda process: None,
) -> CellResult:
    """Train the predicted plan in `folder`; `during` is called with the running process.

    Raises RunError, and ReportError for a run without steps.
    """
    report = read_report(_train(case, predicted, limits, folder, during))
    spread = report.step_s
    return replace(
        predicted,
        step_s=spread.median,
        tokens=_tokens(folder) or predicted.tokens,
        bars=bars_of(report.measured),
        utilisation={pool.name: pool.busy.median for pool in report.pools},
        measured=Measured(spread.median, spread.low, spread.high, spread.n, _peaks(report)),
    )


def _train(
    case: Case,
    predicted: CellResult,
    limits: Limits,
    folder: Path,
    during: Callable[[subprocess.Popen[str]], None],
) -> Path:
    """Run `rolemesh train` with the plan; its run folder."""
    assert predicted.plan is not None, "only a plan is run"
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    recipe = case.recipes[predicted.strategy]
    run = replace(recipe.run, dir=str(folder / "run"), steps=limits.steps, loggers=("console", "jsonl"))
    recipe = replace(recipe, run=run, given=recipe.given | {"run.dir", "run.steps", "run.loggers"})
    (folder / "cell.yaml").write_text(to_yaml(recipe))
    (folder / "cell_plan.yaml").write_text(predicted.plan.to_yaml())
    command = [sys.executable, "-m", "rolemesh.launch", "train", str(folder / "cell.yaml")]
    command += ["--plan", str(folder / "cell_plan.yaml")]
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )
        try:
            during(process)
            code = process.wait(timeout=limits.run_s)
        except subprocess.TimeoutExpired:
            raise RunError(f"the run was not done within {limits.run_s:g} s; {_last(folder)}") from None
        finally:
            _end(process)
    if code != 0:
        raise RunError(f"the run ended with exit code {code}; {_last(folder)}")
    return folder / "run"


def _end(process: subprocess.Popen[str]) -> None:
    """End a run that still goes on: first as Ctrl-C does, so that it ends its workers."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last(folder: Path) -> str:
    lines = (folder / "output.txt").read_text(errors="replace").split("\n")
    return "it printed last:\n" + "\n".join(line for line in lines[-_LAST_LINES:] if line.strip())


def _peaks(report: RunReport) -> dict[str, float]:
    return {entry.pool: entry.measured for entry in report.memory if entry.measured is not None}


def _tokens(folder: Path) -> float | None:
    """Tokens of a step, the mean of the warm ones."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    found = [row["perf/total_num_tokens"] for row in rows if "perf/total_num_tokens" in row][1:]
    return sum(found) / len(found) if found else None


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield out / "runs"
        return
    with tempfile.TemporaryDirectory(prefix="rolemesh-bench-") as name:
        yield Path(name)
