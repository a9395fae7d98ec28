"""docs/prediction.md: its command, and that its table holds what the command prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "prediction.md").read_text()

pytestmark = pytest.mark.full


def test_the_documents_figures_are_those_printed():
    (command,) = re.findall(r"```sh\n\.venv/bin/python (.*?)\n```", DOCUMENT)
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    figures = re.findall(r"^\| .*? \| (\d+) \| ([\d.]+)% \| ([\d.]+)% \|$", DOCUMENT, re.MULTILINE)
    assert len(figures) == 7
    totals = [line for line in done.stdout.splitlines() if line.startswith("all")]
    for rows, mean, median in figures:
        assert any({rows, mean, median} <= set(re.findall(r"[\d.]+", line)) for line in totals), (rows, mean)
    for counts in re.findall(r"(\d+) of (\d+) runs|in (\d+) of (\d+) pairs", DOCUMENT):
        assert " of ".join(filter(None, counts)) in done.stdout
