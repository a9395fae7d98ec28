"""`rolemesh bench`: strategies compared on models, clusters and workloads, simulated or really run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rolemesh.launch.bench_html import bench_page
from rolemesh.launch.bench_result import BenchResult, CellResult, number, slug
from rolemesh.launch.bench_spec import Spec, load_spec

REPORT, RESULTS = "report.html", "results.json"


def bench(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> BenchResult:
    """Run the spec in a file; with `out`, write results.json, report.html and a plan file for each cell.

    `tell` gets a line as each cell is done. Raises RecipeError for a spec that cannot be read; a cell that
    fails or does not fit says so in its result.
    """
    spec = load_spec(path, overrides)
    folder = Path(out) if out is not None else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    cells: list[CellResult] = []
    result = BenchResult(spec.title, spec.run, spec.strategies, ())
    for cell in _cells(spec, folder):
        cells.append(_with_plan_file(cell, folder) if folder else cell)
        tell(progress_line(cells[-1], len(cells), spec.n_cells))
        result = replace(result, cells=tuple(cells))
        if folder is not None and len(cells) % len(spec.strategies) == 0:
            _write(result, folder)  # after each case, so that an interrupted benchmark leaves what it found
    return result


def _write(result: BenchResult, folder: Path) -> None:
    (folder / RESULTS).write_text(json.dumps(result.json(), indent=1) + "\n", encoding="utf-8")
    (folder / REPORT).write_text(bench_page(result), encoding="utf-8")


def progress_line(cell: CellResult, done: int, of: int) -> str:
    """One line of a cell."""
    said = number(cell.step_s, "s") if cell.step_s is not None else cell.state
    where = f"{cell.model}, {cell.cluster}, {cell.workload}, {cell.strategy}"
    return f"[{done}/{of}] {where}: {said} ({cell.planning_s:.1f} s)"


def _cells(spec: Spec, folder: Path | None) -> Iterator[CellResult]:
    if spec.run:
        from rolemesh.launch.bench_run import run_case

        for case in spec.cases:
            yield from run_case(case, spec.limits, folder)
        return
    from rolemesh.launch.bench_simulate import simulate_case

    for case in spec.cases:
        yield from simulate_case(case, spec.limits)


def _with_plan_file(cell: CellResult, folder: Path) -> CellResult:
    if cell.plan is None:
        return cell
    file = Path("plans") / f"{slug(*cell.case, cell.strategy)}.yaml"
    (folder / "plans").mkdir(exist_ok=True)
    (folder / file).write_text(cell.plan.to_yaml(), encoding="utf-8")
    return replace(cell, plan_file=str(file))
