"""Whole runs of `sft` and `train-rm` by the command line: they learn, resume, and leave models that load."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from broken_runs import output_of, worker_pids
from tiny import tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rolemesh.placement.timeline import Timeline

pytestmark = [pytest.mark.full, pytest.mark.timeout(500)]
RECIPE = """
run: {dir: runs/my, steps: 8, validate_every: 4, save_every: 4, device: cpu}
cluster: {per_node: 2}
data: {train_files: train.jsonl, val_files: val.jsonl, max_tokens: 16}
model: {path: policy, dtype: float32}
batch: {size: 64, micro_batch_tokens: 256}
optim: {lr: 3.0e-3}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prompts of digits; right is to say them again, wrong to say letters."""
    root = tmp_path_factory.mktemp("supervised")
    tiny_checkpoint(root / "policy")
    rng = random.Random(0)
    for name, n in (("train", 256), ("val", 32)):
        digits = ["".join(rng.choices("0123456789", k=4)) for _ in range(n)]
        wrong = ["".join(rng.choices("abcdef", k=4)) for _ in range(n)]
        rows = [
            {"prompt": f"{a}>", "response": a, "chosen": a, "rejected": b}
            for a, b in zip(digits, wrong, strict=True)
        ]
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "my.yaml").write_text(RECIPE)
    return root


def rolemesh(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rolemesh.launch", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_fine_tuning_lowers_the_held_out_loss_and_goes_on_from_a_checkpoint(folder):
    rolemesh(folder, "sft", "my.yaml", "run.dir=runs/sft")
    run = folder / "runs" / "sft"
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(9))
    held_out = [row["val/loss"] for row in rows if "val/loss" in row]
    assert len(held_out) == 3
    assert held_out[-1] < 0.6 * held_out[0]
    spans = Timeline.load(run / "timeline.json").spans
    assert {(span.name, span.role, span.rank) for span in spans} == {
        (name, "actor", rank) for name in ("update", "evaluate") for rank in (0, 1)
    }
    exported = run / "export" / "step_8" / "actor"
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = tokenizer("1234>1234<eos>", return_tensors="pt").input_ids
    labels = ids.clone()
    labels[:, :6] = -100
    assert float(model(input_ids=ids, labels=labels).loss.detach()) < 0.7 * held_out[0]

    resumed = rolemesh(
        folder, "sft", "my.yaml", "run.dir=runs/again", f"--resume={run / 'checkpoints/step_4'}"
    )
    assert "from step 4" in resumed
    again = metrics(folder / "runs" / "again")
    assert [row["step"] for row in again] == [5, 6, 7, 8]
    assert [row["train/loss"] for row in again] == [row["train/loss"] for row in rows[5:]]
    assert again[-1]["val/loss"] == held_out[-1]


@pytest.mark.slow
def test_fine_tuning_whose_worker_is_killed_learns_the_same(folder):
    rolemesh(folder, "sft", "my.yaml", "run.dir=runs/whole", "run.steps=60")
    run = folder / "runs" / "broken"
    process = subprocess.Popen(
        [sys.executable, "-m", "rolemesh.launch", "sft", "my.yaml", f"run.dir={run}", "run.steps=60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    output = output_of(process, {5: lambda: os.kill(worker_pids(run)["all_rank_0"], signal.SIGKILL)}, 300)
    assert process.returncode == 0, output
    assert "recovery 1: back at the " in output
    losses = [
        [row["train/loss"] for row in metrics(folder / "runs" / name)[1:]] for name in ("whole", "broken")
    ]
    assert len(losses[0]) == 60
    assert losses[0] == losses[1]


def test_a_reward_model_learns_to_tell_pairs_apart_and_loads_as_classifier(folder):
    rolemesh(folder, "train-rm", "my.yaml", "run.dir=runs/rm", "layout.tp=2")
    run = folder / "runs" / "rm"
    rows = metrics(run)
    assert rows[0]["val/loss"] == pytest.approx(0.693147, abs=1e-4)
    assert rows[0]["val/accuracy"] == 0.5
    assert rows[-1]["val/accuracy"] > 0.9
    assert rows[-1]["val/loss"] < 0.4
    exported = run / "export" / "step_8" / "reward"
    model, info = AutoModelForSequenceClassification.from_pretrained(
        exported, dtype=torch.float32, output_loading_info=True
    )
    assert model.config.num_labels == 1
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(exported)
    right, wrong = (
        float(model(**tokenizer(f"1234>{answer}<eos>", return_tensors="pt")).logits.detach())
        for answer in ("1234", "abcd")
    )
    assert right > wrong
    rolemesh(folder, "convert", "runs/rm", "converted", "--role", "reward")
    same = AutoModelForSequenceClassification.from_pretrained(folder / "converted", dtype=torch.float32)
    assert torch.equal(same.score.weight, model.score.weight)
