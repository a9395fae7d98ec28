"""The commands and the program of docs/reporting.md, run as they stand there."""

import pytest
import yaml
from run_folders import split_run
from test_docs import ROOT, blocks, commands, run

from rolemesh.placement.cluster import ClusterSpec

DOCUMENT = "docs/reporting.md"
pytestmark = [pytest.mark.full, pytest.mark.timeout(580)]


def test_the_commands_run_and_leave_what_they_say(tmp_path):
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    split_run(tmp_path / "runs" / "quickstart")
    said = {command: run(command, tmp_path) for command in commands(DOCUMENT)}
    assert len(said) == 5
    assert ClusterSpec.from_yaml((tmp_path / "cluster.yaml").read_text()).n_devices == 160
    assert "<svg" in (tmp_path / "runs" / "quickstart" / "report.html").read_text()
    profile = yaml.safe_load((tmp_path / "cpu.yaml").read_text())
    assert set(profile) == {
        "device",
        "measured",
        "machine",
        "figures",
        "constants",
        "factors",
        "runs",
        "curves",
    }
    program = tmp_path / "program.py"
    program.write_text("\n".join(blocks(DOCUMENT, "python")))
    assert float(run(f".venv/bin/python {program}", tmp_path)) > 1e8


def test_the_cluster_file_is_one():
    (text,) = blocks(DOCUMENT, "yaml cluster")
    cluster = ClusterSpec.from_yaml(text)
    assert cluster.device_types == {"h100-80": 128, "v100-32": 32}
