"""The commands and programs that the README and the docs show, run as they stand there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny import tiny_checkpoint
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from learning import Interval  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.timeout(580)]
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def commands(document: str) -> list[str]:
    """Every command of the document's shell blocks, continued lines joined."""
    lines = "\n".join(blocks(document, "sh")).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip()]


def run(command: str, folder: Path, timeout: float = 400) -> str:
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=timeout, env=os.environ
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The files a user's clone has, beside the environment that the tests run in, after `make quickstart`."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "CMakeLists.txt"):
        shutil.copy2(ROOT / name, folder)
    for name in ("examples", "kernels"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    assert "make quickstart" in commands("README.md")
    run("make quickstart", folder)
    return folder


def test_make_quickstart_raises_the_held_out_reward(clone):
    samples = clone / "runs" / "quickstart" / "samples"
    before, after = (
        Interval.of(np.array([json.loads(line)["score"] for line in (samples / f"step_{step}.jsonl").open()]))
        for step in (0, 25)
    )
    assert after.low > before.high + 0.2


def test_the_readmes_commands_run(clone):
    """`make` targets, the command for a user's own model, and those for services have tests of their own."""
    others = ("models/", "serve-", "remote_reward")
    ran = [line for line in commands("README.md") if line.startswith(".venv/bin/")]
    ran = [line for line in ran if not any(other in line for other in others)]
    assert len(ran) == 5
    for command in ran:
        run(command + (" run.steps=1" if " train " in command else ""), clone)


@pytest.mark.slow
def test_the_readmes_command_for_an_own_model_runs_on_checkpoints_and_data_in_that_form(clone):
    """bf16 weights in several files, tied, several end tokens, chat messages in parquet."""
    actor, scorer = clone / "models" / "Qwen2.5-0.5B-Instruct", clone / "models" / "Qwen2.5-0.5B-Reward"
    tiny_checkpoint(actor, "qwen2", tied=True, dtype=torch.bfloat16, max_shard_size="50KB", vocab=104)
    tiny_checkpoint(scorer, "qwen2", head="score", dtype=torch.bfloat16, max_shard_size="50KB", vocab=104)
    assert (actor / "model.safetensors.index.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(actor)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(actor)
    (actor / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "top_p": 0.8}))
    data = clone / "data" / "gsm8k"
    data.mkdir(parents=True)
    for name, n in (("train", 70), ("test", 6)):
        rows = {
            "data_source": ["openai/gsm8k"] * n,
            "prompt": [[{"role": "user", "content": f"{i} apples and {2 * i}"}] for i in range(n)],
            "reward_model": [{"style": "rule", "ground_truth": str(3 * i)} for i in range(n)],
            "extra_info": [{"split": name, "index": i} for i in range(n)],
        }
        pq.write_table(pa.table(rows), data / f"{name}.parquet")
    (command,) = [line for line in commands("README.md") if "models/" in line]
    run(command + " run.steps=1", clone)
    before, after = map(json.loads, (clone / "runs" / "gsm8k" / "metrics.jsonl").open())
    assert (before["step"], after["step"], after["training/rows"]) == (0, 1, 64)
    exported = clone / "runs" / "gsm8k" / "export" / "step_1" / "actor"
    assert json.loads((exported / "config.json").read_text())["tie_word_embeddings"]


def test_the_programming_guides_program_runs(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("\n".join(blocks("docs/programming.md", "python")))
    output = run(f"{sys.executable} {program}", tmp_path)
    assert "[ 0., 10., 20., 30., 40., 50., 60.]" in output
