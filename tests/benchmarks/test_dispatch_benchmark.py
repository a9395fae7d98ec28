"""The dispatch benchmark, small: its bounds hold, and it fails where they do not."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "dispatch.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("dispatch_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
@pytest.mark.slow
def test_consumers_fetch_what_they_need_and_the_driver_gets_none_of_it() -> None:
    command = [sys.executable, str(SCRIPT), "--rows", "24", "13", "--tokens", "512", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^(\d+) rows, (\d+) columns, dp \d (?:to \d|and back) +(.*)$", done.stdout, re.M)
    assert len(lines) == 10, done.stdout
    for rows, columns, figures in lines[:8]:  # the hops
        *_, by_handle_mib, gathered_mib, fetched = map(float, figures.split())
        assert fetched <= 1.1
        assert by_handle_mib <= 0.01 < gathered_mib, (rows, columns)


def test_sums_in_closed_form_are_those_of_the_columns(benchmark: ModuleType) -> None:
    batch = benchmark.make_batch(torch.arange(5), tokens=7)
    expected = benchmark.expected_sums(5, 7)
    assert len(batch.batch.keys()) == 8
    for name, column in batch.batch.items():
        assert expected[name].tolist() == [sum(row) for row in column.tolist()]


@pytest.mark.parametrize(
    ("right", "fetched", "good"), [(True, 1.0, True), (False, 1.0, False), (True, 1.2, False)]
)
def test_wrong_values_or_too_many_bytes_fail(
    benchmark: ModuleType, right: bool, fetched: float, good: bool
) -> None:
    trip = benchmark.Trip(benchmark.Cost(1.0, 0), 0, right, fetched)
    case = benchmark.Case("any", lambda: trip, lambda: trip)
    assert benchmark.report("gathered", [case], repeats=1) is good
