"""The report of a real run: every rank's memory is there, operations are those of the plan."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_checkpoint

from rolemesh.launch.report import read_report
from rolemesh.placement.plan import PlacementPlan

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

RECIPE = """
run: {dir: run, steps: 3}
cluster: {nodes: 1, device: cpu, per_node: 2}
data: {train_files: [train.jsonl], max_prompt_tokens: 8}
algorithm: {name: grpo, kl: {in: loss, coef: 0.01}}
batch: {prompts: 4, samples_per_prompt: 2, micro_batch_tokens: 64}
lengths: {max_response_tokens: 6}
actor: {path: policy, dtype: float32}
ref: {dtype: float32}
reward: ./reward.py:compute_score
placement: colocate
"""
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str)\n"
)
MIB = 2**20


def rolemesh(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rolemesh.launch", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    tiny_checkpoint(folder / "policy")
    rows = [{"prompt": f"{i}>", "reward_model": {"ground_truth": str(i)}} for i in range(8)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "reward.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(RECIPE)
    rolemesh(folder, "train", "recipe.yaml")
    return folder / "run"


def test_a_run_is_reported_with_its_memory_and_a_page(run):
    said = rolemesh(run, "report", ".")
    assert re.search(r"^update_actor +train +\S+ +\S+( s)? +[\d.e-]+ s", said, re.MULTILINE), said
    assert "resident memory" in said
    assert "<svg" in (run / "report.html").read_text()
    memory = json.loads((run / "memory.json").read_text())
    plan = PlacementPlan.from_yaml((run / "plan.yaml").read_text())
    for pool in plan.pools:
        peaks = memory[pool.name]["peak_bytes"]
        assert len(peaks) == pool.world
        assert all(50 * MIB < peak < 20_000 * MIB for peak in peaks)


def test_the_measured_step_has_the_spans_of_a_simulated_one(run):
    """A run keeps the seconds that its plan predicts: both name the same operations on the same ranks."""
    report = read_report(run)
    assert set(report.plan.prediction.operations_s) == {span.name for span in report.measured}
    pools = {pool.name for pool in report.plan.pools}
    assert report.predicted
    assert {(s.name, s.pool, s.rank) for s in report.predicted if s.pool in pools} == {
        (s.name, s.pool, s.rank) for s in report.measured if s.pool in pools
    }
