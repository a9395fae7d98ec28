"""Runs with an agent and a worker of the user's, by the command line; the classes are those of the docs."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import small_recipe

from rolemesh.launch.check import check_recipe
from rolemesh.launch.config import parse_recipe
from rolemesh.launch.fields import RecipeError

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "programming.md").read_text()
DIGITS = """

class Digits(Calculator):
    \"\"\"For a model of random weights: multiplies the digits that it happens to write, and notes it.\"\"\"

    def step(self, token_ids, text):
        answer = super().step(token_ids, text)
        with open(__file__ + ".jsonl", "a") as file:
            file.write(json.dumps([token_ids, answer]) + "\\n")
        return answer

    def asked(self, text):
        found = re.findall("[0-9]", text)
        return "*".join(found) if found else None

    def told(self, answer):
        return f"[{answer}]"
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(extra_info["num_turns"] + solution_str.count("["))
"""
RUN = {"dir": "run", "steps": 2, "timeout_s": 60}
ENDS = [2, *range(50, 90)]  # so many end tokens that a model of random weights has short turns


def example(tag: str) -> str:
    (found,) = re.findall(rf"```python {tag}\n(.*?)```", DOCUMENT, re.DOTALL)
    return found


def written(folder: Path, **changes) -> Path:
    recipe = small_recipe(
        folder,
        **{
            "run": RUN,
            "lengths": {"max_response_tokens": 48},
            "data": {"train_files": ["train.jsonl"], "val_files": ["train.jsonl"], "max_prompt_tokens": 8},
        }
        | changes,
    )
    (folder / "agent.py").write_text("import json\n" + example("agent") + DIGITS)
    (folder / "worker.py").write_text(example("worker"))
    (folder / "policy" / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return recipe


@pytest.mark.full
@pytest.mark.timeout(240)
def test_two_steps_with_a_calculator_and_a_worker_of_ones_own(tmp_path: Path):
    rollout = {"agent": "agent.py:Digits", "agent_turns": 4}
    recipe = written(tmp_path, rollout=rollout)
    (tmp_path / "reward.py").write_text(REWARD)
    own = "actor.worker=" + str(tmp_path / "worker.py") + ":Noted"
    done = subprocess.run(
        [sys.executable, "-m", "rolemesh.launch", "train", str(recipe), own],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _, *steps = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert len(steps) == 2
    for step in steps:
        assert 1 < step["agent/turns/mean"] <= step["agent/turns/max"] <= 4
        assert step["agent/observation_tokens/mean"] > 0
        whole = step["agent/observation_tokens/mean"] + step["agent/model_tokens/mean"]
        assert step["response_length/mean"] == pytest.approx(whole)
        assert step["training/response_tokens"] == pytest.approx(8 * step["agent/model_tokens/mean"])
        assert 0 < step["agent/tool_s/mean"] < 5
        assert step["training/rollout_probs_diff/max"] < 1e-3  # the trainer reads what the model read
        assert step["critic/score/mean"] >= step["agent/turns/mean"]
        assert step["actor/advantage_abs"] > 0
    seen = list(map(json.loads, (tmp_path / "agent.py.jsonl").read_text().splitlines()))
    assert {ids[-1] in ENDS for ids, _ in seen} == {True}
    assert any(answer for _, answer in seen)


def test_the_documents_calculator_works_out_what_it_is_asked():
    there: dict = {}
    exec(example("agent"), there)
    calculator = there["Calculator"]({"reward_model": {}}, None)
    assert "user\n84<|im_end|>" in calculator.step([1, 2], "So <calc>12 * 7</calc>")
    assert "cannot work this out" in calculator.step([1, 2], "<calc>open('x')</calc>")
    assert "ZeroDivisionError" in calculator.step([1, 2], "<calc>1 / 0</calc>")
    assert calculator.step([1, 2], "It is 84") is None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_documents_commands_train_on_conversations(tmp_path: Path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (commands,) = re.findall(r"```sh agent\n(.*?)```", (ROOT / "docs" / "rollout.md").read_text(), re.DOTALL)
    assets, train = commands.splitlines()
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    for command in (assets, f"{train} run.steps=10"):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | {"PATH": path},
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    lines = (tmp_path / "runs" / "agent" / "metrics.jsonl").read_text().splitlines()
    before, *steps = map(json.loads, lines)
    assert steps[-1]["val/reward/mean"] > before["val/reward/mean"]
    assert steps[0]["agent/turns/mean"] > steps[-1]["agent/turns/mean"] > 1
    samples = (tmp_path / "runs" / "agent" / "samples" / "step_0.jsonl").read_text().splitlines()
    second = [row for row in map(json.loads, samples) if row["turns"] == 2]
    assert second
    for row in second:
        first_answer, then = row["response"].split("<eos>", 1)
        assert then.startswith(row["prompt"])
        assert first_answer != row["ground_truth"]


def problems(folder: Path, *overrides: str) -> list[str]:
    text = (folder / "recipe.yaml").read_text()
    report = check_recipe(parse_recipe(text, folder, [*overrides, "run.device=cpu"]), offline=True)
    return [row.text for row in report.rows if row.state == "problem"]


def test_check_looks_for_files_and_classes_and_runs_none(tmp_path: Path):
    written(tmp_path)
    (tmp_path / "agent.py").write_text("open('ran', 'w')\nclass Agent: ...\n")
    here = f"{tmp_path}/agent.py"
    assert problems(tmp_path, f"rollout.agent={here}:Agent", f"actor.worker={here}:Agent") == []
    assert problems(tmp_path, f"rollout.agent={here}:Other") == [
        f"rollout.agent: {here} has no class Other (it has Agent)"
    ]
    assert problems(tmp_path, f"actor.worker={tmp_path}/none.py:A") == [
        f"actor.worker: no file {tmp_path}/none.py"
    ]
    assert "must name a file and a class" in problems(tmp_path, f"rollout.worker={here}")[0]
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["rollout.engine=vllm", "rollout.partial=true", "rollout.agent=a.py:A"], "rollout.partial stops"),
        (["algorithm.name=remax", "rollout.agent=a.py:A"], "rollout.agent answers samples, but not"),
        (["rollout.agent_turns=2"], "there is no rollout.agent"),
        (["reward.worker=a.py:A"], "reward.worker would have no effect"),
        (["ref.worker=a.py:A"], "ref.worker would have no effect"),
    ],
)
def test_what_an_agent_or_a_worker_cannot_go_with_is_refused(tmp_path: Path, overrides: list[str], told: str):
    with pytest.raises(RecipeError, match=told):
        parse_recipe(written(tmp_path).read_text(), tmp_path, overrides)
