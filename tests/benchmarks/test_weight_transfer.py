"""The benchmark of weight transfers, small: what it claims holds, and it fails where that does not."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "weight_transfer.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=280
    )


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("weight_transfer_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.alone
def test_three_ways_bring_the_same_weights() -> None:
    done = run("--hidden", "128", "--layers", "2", "--repeats", "1", "--pp", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "right values: yes; at most 1.02 of the bytes: yes; no process beyond its buckets: yes" in done.stdout
    )
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line[:1].isalpha()}
    assert {"planned", "network", "gathered"} <= rows.keys()


@pytest.mark.full
def test_the_plan_is_printed_without_moving_anything() -> None:
    done = run("--plan")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 3 sends" in done.stdout
    assert "rank 1 receives" in done.stdout


@pytest.mark.parametrize(
    ("right", "received", "good"), [(True, 1.0, True), (False, 1.0, False), (True, 1.1, False)]
)
def test_wrong_values_or_too_many_bytes_fail(
    benchmark: ModuleType, right: bool, received: float, good: bool
) -> None:
    figures = {way: benchmark.Measured([1.0], received, 0, 0, right) for way in benchmark.WAYS}
    assert benchmark.report(figures, 10**9, 2**20) is good
    figures["planned"].source_bytes = 2**30
    assert not benchmark.report(figures, 10**9, 2**20)
