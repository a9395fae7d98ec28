"""The commands and the spec of docs/bench.md, as they stand there."""

import json
import shutil

import pytest
import yaml
from test_docs import ROOT, blocks, commands, run

from rolemesh.launch.bench_spec import parse_spec

DOCUMENT = "docs/bench.md"
pytestmark = [pytest.mark.full, pytest.mark.timeout(580)]


def test_the_commands_run_and_leave_what_they_say(tmp_path):
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    first, second = [run(command, tmp_path) for command in commands(DOCUMENT)]
    assert "runs/bench/report.html" in first
    cells = json.loads((tmp_path / "runs" / "bench" / "results.json").read_text())["cells"]
    assert len(cells) == 8
    assert {cell["state"] for cell in cells} == {"ok"}
    assert len(list((tmp_path / "runs" / "bench" / "plans").iterdir())) == 8
    assert second.count("1 x a100-80x8") == 4


def test_the_spec_is_one():
    (text,) = blocks(DOCUMENT, "yaml bench")
    spec = parse_spec(yaml.safe_load(text), ROOT / "examples" / "bench")
    assert spec.n_cells == 2 * 2 * 2 * 4
    assert set(yaml.safe_load(text)["limits"]) < set(vars(spec.limits))
