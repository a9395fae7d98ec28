"""examples/moe.yaml as it stands, on assets made in a few steps: a mixture of experts trains over ep."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


def test_the_command_that_makes_its_models_starts():
    script = [sys.executable, "examples/moe/make_assets.py", "--help"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "--out" in done.stdout


@pytest.mark.slow
def test_the_moe_example_trains_and_its_checkpoint_becomes_a_hugging_face_folder(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("moe_assets", ROOT / "examples/moe/make_assets.py")
    assets = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = assets
    spec.loader.exec_module(assets)
    assets.make_assets(tmp_path, replace(assets.Settings(), policy_steps=3, n_train=64, n_val=8))
    run = tmp_path / "run"
    overrides = [
        f"run.dir={run}",
        "run.steps=2",
        "run.save_every=2",
        "run.validate_every=2",
        f"data.train_files=[{tmp_path / 'train.jsonl'}]",
        f"data.val_files=[{tmp_path / 'val.jsonl'}]",
        f"actor.path={tmp_path / 'actor'}",
        "batch.prompts=8",
        "batch.mini_batch_samples=16",
    ]
    rolemesh = [sys.executable, "-m", "rolemesh.launch"]
    train = [*rolemesh, "train", "examples/moe.yaml", *overrides]
    done = subprocess.run(train, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = steps[-1]
    assert last["actor/grad_norm"] > 0
    assert last["actor/router_loss"] >= 1 - 1e-3  # 1 where the load is even
    assert last["actor/log_prob_diff_max"] < 1e-4 or last["actor/optimizer_steps"] > 1
    out = tmp_path / "hf"
    convert = [*rolemesh, "convert", str(run), str(out)]
    done = subprocess.run(convert, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
