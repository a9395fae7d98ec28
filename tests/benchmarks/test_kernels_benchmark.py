import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "kernels.md").read_text()
CASES = (
    "log_prob_and_entropy",
    "log_prob alone",
    "linear_log_prob",
    "gae",
    "policy_loss",
    "masked_whiten",
    "kl",
)

pytestmark = pytest.mark.full


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_small_benchmark_prints_a_table_for_every_case():
    (command,) = re.findall(
        r"^\.venv/bin/python (benchmarks/kernels.py --small .*?)\s+#", DOCUMENT, re.MULTILINE
    )
    output = run(*command.split())
    for case in CASES:
        tables = re.findall(
            rf"### {re.escape(case)}.*?\n\n\| form .*?\n\|[-:|]+\n(.*?)\n\n", output + "\n\n", re.S
        )
        assert tables, case
        assert all(table.startswith("| kernel | ") for table in tables)
        assert all(len(table.splitlines()) >= 3 for table in tables)
    assert "compile" not in output


def test_the_guides_program_names_the_kernels_that_ran(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text("\n".join(re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)))
    output = run(str(program))
    assert re.match(
        r"\['linear_log_prob_and_entropy/\w+', 'log_prob_backward/\w+', 'log_prob_stats/\w+'\]", output
    )
