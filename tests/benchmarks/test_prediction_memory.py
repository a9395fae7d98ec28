"""The memory benchmark: every row is compared or listed, and its figures hold."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "prediction_memory.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("prediction_memory", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_no_row_is_dropped(benchmark: ModuleType) -> None:
    rows = benchmark.read(benchmark.TRUTH)
    compared, skipped = benchmark.compare(rows)
    listed = [row.line for row in compared] + [line for lines in skipped.values() for line in lines]
    assert sorted(listed) == list(range(len(rows)))


def test_figures(benchmark: ModuleType) -> None:
    compared, _ = benchmark.compare(benchmark.read(benchmark.TRUTH))
    errors = [abs(row.predicted / row.measured - 1) for row in compared if row.measured]
    oom = [row for row in compared if row.fits is False]
    fit = [row for row in compared if row.fits and row.fits_predicted is not None]
    assert sum(errors) / len(errors) < 0.06
    assert (sum(not row.fits_predicted for row in oom), len(oom)) == (6, 9)
    assert sum(not row.fits_predicted for row in fit) / len(fit) < 0.02


def test_the_table_has_a_line_per_source(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main([]) == 0
    printed = capsys.readouterr().out
    for source in {row["source"] for row in benchmark.read(benchmark.TRUTH)} - {
        "BigScience CUDA context",
        "Metis A100 profile sample",
    }:
        assert source[:40] in printed


def test_a_row_without_a_needed_size_says_so(benchmark: ModuleType) -> None:
    row = {**benchmark.read(benchmark.TRUTH)[25], "seq_len": ""}
    assert benchmark.compare([row])[1] == {"no seq_len given": [0]}
