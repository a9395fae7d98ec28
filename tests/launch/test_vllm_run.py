"""Training with vLLM by the command line, as docs/rollout.md shows it."""

import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
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


PARTIAL = (
    "rolemesh train examples/vllm_quickstart.yaml run.steps=3 rollout.partial=true rollout.partial_share=0.5 "
    "rollout.max_seqs=32"
)


def environment() -> dict[str, str]:
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}


def run(command: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=800,
        env=environment(),
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
    run(f"{PARTIAL} run.dir=runs/partial", clone)
    _, first, second, last = metrics(clone / "runs" / "partial")
    assert first["partial/begun_rows"] > 0
    assert first["training/rows"] + first["partial/begun_rows"] == 256
    assert second["partial/continued_rows"] == first["partial/begun_rows"]
    assert second["training/staleness/max"] == 1
    assert last["partial/begun_rows"] == 0
    assert sum(step["training/rows"] for step in (first, second, last)) == 3 * 256
    assert "rollout_corr/rollout_is_mean" in last


def test_a_partial_run_that_is_stopped_and_resumed_writes_the_begun_responses_on(clone: Path):
    process = subprocess.Popen(
        [*PARTIAL.split(), "run.dir=runs/stopped"],
        cwd=clone,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    lines: list[str] = []
    try:
        for line in process.stdout or ():
            lines.append(line)
            if line.startswith("step 1/3 ") and " elapsed, " not in line:  # done, not under way
                process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 143, "".join(lines)
    finally:
        process.kill()
    folder = clone / "runs" / "stopped"
    done = metrics(folder)[-1]["step"]
    assert done < 3
    run(f"{PARTIAL} run.dir=runs/stopped --resume auto", clone)
    steps = metrics(folder)[1:]
    for before, after in itertools.pairwise(steps):
        assert after["partial/continued_rows"] == before["partial/begun_rows"]
    assert steps[done]["partial/continued_rows"] > 0
    assert sum(step["training/rows"] for step in steps) == 3 * 256


def test_engines_of_their_own_generate_for_the_next_step_while_the_actor_learns(clone: Path):
    """One step off: their weights come from another pool while it goes on, and no sample mixes versions."""
    assets = clone / "runs" / "vllm-assets"
    run(
        "rolemesh train examples/async.yaml run.dir=runs/ahead run.steps=4 run.validate_every=0 "
        f"data.train_files=[{assets}/train.jsonl] data.val_files=[{assets}/val.jsonl] "
        f"actor.path={assets}/actor rollout.engine=vllm rollout.max_batch_tokens=8192 batch.prompts=32",
        clone,
    )
    folder = clone / "runs" / "ahead"
    steps = {row["step"]: row for row in metrics(folder)}
    for step in range(1, 5):
        ages = [steps[step][f"training/staleness/{what}"] for what in ("min", "mean", "max")]
        assert ages == [min(1, step - 1)] * 3
        assert steps[step]["rollout/engine_restarts"] == 0
    assert steps[1]["training/rollout_probs_diff/max"] < 1e-3
    assert steps[3]["rollout_corr/rollout_is_max"] != 1.0
    spans = Timeline.load(folder / "timeline.json").spans
    assert Timeline(spans).overlap_s("generate", "update_actor") > 0
    for span in spans:
        if span.name == "sync_weights" and span.role == "rollout":
            assert span.args["kept_bytes"] <= span.args["received_bytes"] <= 1.02 * span.args["kept_bytes"]
