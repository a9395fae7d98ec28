"""Training with vLLM by the command line, as docs/rollout.md shows it."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rolemesh.placement.timeline import Timeline

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
ROOT = Path(__file__).parents[2]


def run(command: str, folder: Path) -> str:
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=800,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, after the documented command that makes their assets."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "examples", folder / "examples")
    (commands,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "rollout.md").read_text(), re.DOTALL)
    assets, train = commands.splitlines()
    run(assets, folder)
    run(f"{train} run.steps=3", folder)
    return folder


def test_the_quickstart_trains_and_its_engines_agree_with_the_trainer(clone: Path):
    before, *steps = metrics(clone / "runs" / "vllm-quickstart")
    assert steps[-1]["val/reward/mean"] > before["val/reward/mean"]
    for step in steps:
        assert step["training/rollout_probs_diff/max"] < 1e-3
        assert step["training/staleness/max"] == 0
        assert step["rollout/engine_restarts"] == 0
    timeline = Timeline.load(clone / "runs" / "vllm-quickstart" / "timeline.json")
    assert {span.rank for span in timeline.spans if span.name == "generate"} == {0, 1}


def test_a_partial_run_trains_on_what_is_finished_and_continues_the_rest(clone: Path):
    run(
        "rolemesh train examples/vllm_quickstart.yaml run.dir=runs/partial run.steps=3 rollout.partial=true "
        "rollout.partial_share=0.5 rollout.max_seqs=32",
        clone,
    )
    _, first, second, last = metrics(clone / "runs" / "partial")
    assert first["partial/begun_rows"] > 0
    assert first["training/rows"] + first["partial/begun_rows"] == 256
    assert second["partial/continued_rows"] == first["partial/begun_rows"]
    assert second["training/staleness/max"] == 1
    assert last["partial/begun_rows"] == 0
    assert sum(step["training/rows"] for step in (first, second, last)) == 3 * 256
    assert "rollout_corr/rollout_is_mean" in last
