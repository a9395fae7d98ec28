"""A whole run on several sources, whose W&B fails at step 3 of 6, by the command line."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from tiny import tiny_checkpoint

from rolemesh.launch.config import load_recipe, parse_recipe
from rolemesh.launch.fields import RecipeError

WANDB = """
class Table:
    def __init__(self, columns, data): pass
class Run:
    def log(self, values, step):
        if step >= 3:
            raise ConnectionError("401 for a-secret-api-key at https://me:pw@host")
    def finish(self, exit_code): pass
def init(**settings):
    assert settings["mode"] is None and "a-secret-api-key" not in str(settings)
    return Run()
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str))
"""
SECRET = "a-secret-api-key"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("logs")
    tiny_checkpoint(root / "policy")
    for name, n in (("sums", 6), ("long", 4), ("val", 2)):
        texts = [f"{i}>" for i in range(n)] + ["1234567890>"] * (name == "long")
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    (root / "reward.py").write_text(REWARD)
    (root / "packages" / "wandb").mkdir(parents=True)
    (root / "packages" / "wandb" / "__init__.py").write_text(WANDB)
    content = {
        "run": {"dir": "run", "steps": 6, "loggers": ["console", "jsonl", "wandb"], "name": f"by {SECRET}"},
        "cluster": {"device": "cpu", "per_node": 1},
        "data": {
            "train_files": ["sums.jsonl", "long.jsonl"],
            "val_files": ["val.jsonl", "long.jsonl"],
            "max_prompt_tokens": 6,
            "overlong": "filter",
            "weights": {"sums": 0.5, "long": 2},
        },
        "algorithm": {"name": "grpo"},
        "batch": {"prompts": 4, "samples_per_prompt": 2},
        "lengths": {"max_response_tokens": 4},
        "actor": {"path": "policy", "dtype": "float32"},
        "reward": "reward.py:compute_score",
    }
    (root / "grpo.yaml").write_text(yaml.safe_dump(content))
    return root


def rolemesh(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    path = os.pathsep.join([str(folder / "packages"), os.environ.get("PYTHONPATH", "")])
    with (folder / "output.txt").open("w+") as output:  # a pipe would wait for whatever a killed run leaves
        done = subprocess.run(
            [sys.executable, "-m", "rolemesh.launch", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=250,
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "WANDB_API_KEY": SECRET},
        )
        output.seek(0)
        return done.returncode, output.read()


@pytest.fixture(scope="module")
def done(folder) -> tuple[int, str]:
    return rolemesh(folder, "train", "grpo.yaml")


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_run_is_done_and_complete_with_one_warning(folder, done):
    code, output = done
    assert code == 0, output
    assert output.count("warning: logger wandb failed") == 1
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    assert [row["step"] for row in steps] == [*range(7)]
    assert sorted(map(int, re.findall(r"^step (\d)/6 .*critic/score", output, re.MULTILINE))) == [
        *range(1, 7)
    ]


@pytest.mark.full
def test_every_step_counts_prompts_and_epochs_and_validation_is_per_source(folder, done):
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    for row in steps:
        assert (row["data/train/prompts"], row["data/train/overlong_filtered"]) == (10, 1)
        assert (row["data/val/prompts"], row["data/val/overlong_filtered"]) == (6, 1)
    # 0.5 * 6 + 2 * 4 = 11 prompts of an epoch, in batches of 4
    assert [row["training/epoch"] for row in steps[1:]] == [0, 0, 0, 1, 1, 1]
    for step in (0, 6):
        for source in ("long", "val"):
            mean = steps[step][f"val/reward/{source}/mean"]
            assert steps[step][f"val-core/{source}/reward/mean@1"] == mean
        table = [json.loads(line) for line in (folder / "run" / "samples" / f"step_{step}.jsonl").open()]
        assert Counter(row["source"] for row in table) == {"val": 2, "long": 4}
        mean = sum(row["score"] for row in table if row["source"] == "long") / 4
        assert steps[step]["val/reward/long/mean"] == pytest.approx(mean)


@pytest.mark.full
def test_no_file_and_no_line_of_the_run_holds_a_secret_and_its_recipe_still_runs(folder, done, monkeypatch):
    assert SECRET not in done[1]
    assert "me:pw" not in done[1]
    texts = [p for p in (folder / "run").rglob("*") if p.is_file() and p.suffix != ".safetensors"]
    assert len(texts) > 5
    assert not [path for path in texts if SECRET in path.read_text(errors="replace")]
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    stored = load_recipe(folder / "run" / "recipe.yaml")
    assert stored == load_recipe(folder / "grpo.yaml")
    assert stored.run.name == f"by {SECRET}"


@pytest.mark.full
def test_what_would_not_work_is_told_before_anything_starts(folder):
    code, said = rolemesh(folder, "check", "grpo.yaml", "run.loggers=[jsonl, mlflow, jsonl]")
    assert code == 2
    assert "run.loggers names jsonl more than once" in said
    assert "mlflow needs the package mlflow, which is not installed: pip install mlflow" in said
    code, said = rolemesh(folder, "check", "grpo.yaml", "data.weights.other=1")
    assert code == 2
    assert "data.weights names ['other'], but the prompts are of ['long', 'sums']" in said


GRPO = "data: [a.jsonl]\nactor: policy\nalgorithm: grpo\nreward: r.py:f\n"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.loggers=[jsonl, tensorbord]", r"run\.loggers\[1\] is 'tensorbord', .*tensorboard"),
        ("run.project=x", r"run\.project would have no effect: run\.loggers has none of wandb, mlflow"),
        ("run.log_offline=true", r"run\.log_offline would have no effect"),
        ("data.weights.a=-1", r"data\.weights\.a is -1.0, but must be at least 0"),
        ("data={train_files: a.jsonl, weights: {a: 2}, shuffle: false}", r"leave shuffle true"),
    ],
)
def test_keys_that_cannot_be_meant_are_refused(override, message):
    with pytest.raises(RecipeError, match=message):
        parse_recipe(GRPO, Path("/x"), [override])
