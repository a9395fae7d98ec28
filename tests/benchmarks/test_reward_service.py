"""The reward service's benchmark, small: it measures both servers and the client, and sees wrong scores."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "reward_service.py"


@pytest.fixture
def benchmark(monkeypatch):
    spec = importlib.util.spec_from_file_location("reward_service_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(900)
def test_both_servers_and_the_client_are_measured():
    sizes = ["--samples", "24", "--callers", "8", "--repeats", "1", "--layers", "1"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *sizes], capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^(?:batched|one at a time) .* requests/s .*p50.*p99", done.stdout, re.M)) == 2
    assert re.search(r"^client: \d+\.\d+ ms", done.stdout, re.M)


@pytest.mark.parametrize(("off", "good"), [(0.0, True), (0.01, False)])
def test_scores_that_differ_fail(benchmark, off, good):
    one = benchmark.Round(np.array([1.0, 2.0]), np.array([0.1, 0.2]), 0.3)
    other = benchmark.Round(np.array([1.0, 2.0 + off]), np.array([0.1, 0.2]), 0.6)
    assert benchmark.report([one], [other]) is good


def test_the_client_is_measured_against_a_server_of_its_own(benchmark):
    assert benchmark.client_ms(benchmark.make_samples(32, 20, 0.5), 1) > 0
