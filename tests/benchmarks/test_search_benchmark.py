"""The search benchmark, small: it runs, proves its plan, and its claims decide the exit status."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "search.py"


def test_the_plan_of_a_small_cluster_is_proven() -> None:
    command = [sys.executable, str(SCRIPT), "--devices", "32", "--slack", "60", "--compare"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    step, bound = re.search(r"step ([\d.]+) s, bound ([\d.]+) s, gap 0.00%", done.stdout).groups()
    assert step == bound
    assert re.search(r"colocate: .* is the best plan", done.stdout)
