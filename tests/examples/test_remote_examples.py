"""The examples with services: the numbers of models placed here, and what becomes of failures."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gloo import run_ranks
from ollama_server import ollama
from service_process import served
from transformers import AutoModelForCausalLM, AutoTokenizer
from worker_runs import batch, worker

from rolemesh.engine.remote.http import Limits
from rolemesh.engine.workers.megatron import RoleSpec
from rolemesh.engine.workers.reference import RefWorker
from rolemesh.engine.workers.remote_reference import RemoteRefSpec, RemoteRefWorker
from rolemesh.placement.layout import Layout

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
SMALL = (
    "run.steps=1",
    "batch.prompts=16",
    "batch.samples_per_prompt=1",
    "batch.mini_batch_samples=8",
    "data.val_prompts=16",
)
JUDGE = """
    def answer(request, text):
        if "The number: " not in text:  # the question at the start, whether it is there
            return "0"
        number = text.split("The number: ")[1].split(">")[0]
        answer = text.split("The pupil's answer: ")[1].split("\\n")[0].strip()
        right = "".join(str((int(digit) + 1) % 10) for digit in number)
        if number.startswith("7"):
            return "I would rather not say."
        return str(10 * sum(a == b for a, b in zip(answer, right)) / max(len(answer), len(right)))
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, with assets that were hardly trained, and a reference that is not the actor."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / ".venv").symlink_to(ROOT / ".venv")
    sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
    try:
        quickstart = importlib.import_module("make_assets")
    finally:
        sys.path.pop(0)
    sizes = {"policy_steps": 40, "reward_steps": 40, "n_train": 200, "n_val": 50}
    assets = folder / "runs" / "quickstart-assets"
    quickstart.make_assets(assets, replace(quickstart.Settings(), **sizes))
    model = AutoModelForCausalLM.from_pretrained(assets / "actor", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(assets / "reference")
    AutoTokenizer.from_pretrained(assets / "actor").save_pretrained(assets / "reference")
    return folder


@pytest.fixture(scope="module")
def services(clone: Path) -> Iterator[tuple[str, str]]:
    """URLs of the reward model and of the reference."""
    assets = clone / "runs" / "quickstart-assets"
    with (
        served("serve-rm", str(assets / "reward")) as reward,
        served("serve-ref", str(assets / "reference")) as reference,
    ):
        yield reward.url, reference.url


def train(clone: Path, recipe: str, *overrides: str, fails: bool = False) -> str:
    command = [sys.executable, "-m", "rolemesh.launch", "train", f"examples/{recipe}", *SMALL, *overrides]
    done = subprocess.run(
        command,
        cwd=clone,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def metrics(clone: Path, run: str) -> dict[str, float]:
    """Those of step 1."""
    return json.loads((clone / run / "metrics.jsonl").read_text().splitlines()[1])


def samples(clone: Path, run: str) -> list[dict]:
    return [json.loads(line) for line in (clone / run / "samples" / "step_0.jsonl").open()]


@pytest.mark.slow
def test_remote_reward_and_reference_give_the_numbers_of_placed_ones(clone, services):
    reward, reference = services
    train(clone, "quickstart.yaml", "run.dir=runs/local", "ref.path=runs/quickstart-assets/reference")
    train(
        clone,
        "remote_reward.yaml",
        "run.dir=runs/remote",
        f"reward.endpoints=[{reward}/get_reward]",
        f"ref.endpoints=[{reference}]",
        "ref.expect_initial_kl=20",
    )
    here, there = samples(clone, "runs/local"), samples(clone, "runs/remote")
    assert [s["response"] for s in here] == [s["response"] for s in there]
    assert [s["score"] for s in there] == pytest.approx([s["score"] for s in here], abs=1e-5)
    assert len({s["score"] for s in here}) > 3
    mine, theirs = metrics(clone, "runs/local"), metrics(clone, "runs/remote")
    names = [f"critic/{name}/{what}" for name in ("score", "rewards") for what in ("mean", "max", "min")]
    for name in [*names, "actor/reward_kl_penalty"]:
        assert theirs[name] == pytest.approx(mine[name], abs=1e-5), name
    assert mine["actor/reward_kl_penalty"] > 1e-3
    assert (theirs["reward/failed"], theirs["training/dropped_rows"]) == (0, 0)


def test_a_remote_reference_scores_as_the_placed_one_token_by_token(clone, services):
    path, layout, data = clone / "runs/quickstart-assets/reference", Layout(tp=2), batch(9)
    data.batch["input_ids"] %= 14
    data.batch["responses"] = data.batch["input_ids"][:, 6:]
    spec = RoleSpec(str(path), "lm", temperature=0.8)
    placed = run_ranks(
        lambda rank, world: worker(RefWorker, rank, layout, spec).compute_ref_log_prob(data), layout.world
    )[layout.collect_rank(0)]
    actor = str(clone / "runs/quickstart-assets/actor")
    limits = Limits(batch=4)
    remote = worker(RemoteRefWorker, 0, Layout(), RemoteRefSpec((services[1],), limits, actor, 0.8, 16))
    found = remote.compute_ref_log_prob(data)
    assert (found.batch["ref_log_prob"] - placed.batch["ref_log_prob"]).abs().max() < 1e-5


@pytest.mark.slow
def test_a_wrong_reference_stops_the_run_before_its_first_update(clone, services):
    reward, reference = services
    said = train(
        clone,
        "remote_reward.yaml",
        "run.dir=runs/wrong",
        f"reward.endpoints=[{reward}/get_reward]",
        f"ref.endpoints=[{reference}]",
        fails=True,
    )
    assert "ref.expect_initial_kl allows 0.01" in said
    for path in ("actor", "reference"):
        assert re.search(rf"runs/quickstart-assets/{path}, revision \w+", said), said
    assert len((clone / "runs/wrong/metrics.jsonl").read_text().splitlines()) == 1  # the look before step 1
    assert "update_actor" not in (clone / "runs/wrong/timeline.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("refused", "dropped"),
    [("'13579'", range(1, 16)), ("'0123456789'", [16])],
)
def test_prompts_without_a_score_are_left_out_and_a_step_without_any_is_skipped(
    clone, services, tmp_path, refused, dropped
):
    scorer = tmp_path / "score.py"
    scorer.write_text(
        "def compute_score(solution_str, prompt_str, **_):\n"
        f"    assert prompt_str[0] not in {refused}\n"
        "    return float(len(solution_str))\n"
    )
    with served("serve-rm", f"{scorer}:compute_score") as server:
        said = train(
            clone,
            "remote_reward.yaml",
            "run.dir=runs/dropped",
            f"reward.endpoints=[{server.url}]",
            "reward.protocol=rolemesh",
            "reward.text.special_tokens=strip",
            "reward.limits.retries=0",
            "reward.on_failure.stop_above=1",
            f"ref.endpoints=[{services[1]}]",
            "ref.expect_initial_kl=20",
        )
    found = metrics(clone, "runs/dropped")
    n = found["training/dropped_rows"]
    assert n in dropped
    assert found["reward/failed"] == found["reward/dropped_groups"] == n
    assert f"{n:.0f} samples left out" in said
    if n == 16:
        assert found["training/skipped_steps"] == 1
        assert "actor/pg_loss" not in found
        assert "critic/score/mean" not in found
        assert "nothing learnt" in said
    else:
        assert found["training/skipped_steps"] == 0
        assert found["actor/optimizer_steps"] == -(-(16 - n) // 8)
    assert all(
        (sample["score"] is None) == (sample["prompt"][0] in refused)
        for sample in samples(clone, "runs/dropped")
    )


@pytest.mark.slow
def test_the_judge_example_runs_with_a_judge_that_sometimes_has_no_answer(clone, tmp_path):
    with ollama(tmp_path, JUDGE) as judge:
        train(
            clone,
            "judge.yaml",
            f"reward.parts.judge.endpoints=[{judge.endpoint}]",
            "reward.parts.judge.on_failure.stop_above=1",
            "batch.prompts=8",
        )
        assert len(judge.requests()) > 8
    found = metrics(clone, "runs/judge")
    assert 0 <= found["reward/judge/mean"] <= 10
    assert 0 <= found["reward/digits/mean"] <= 1
    assert found["training/dropped_rows"] % 4 == 0
    assert any((clone / "runs" / "judge-cache").rglob("*.json"))


@pytest.mark.slow
def test_the_readmes_commands_for_services_run(clone):
    """As they stand there, but for free ports and a single step."""
    block = next(
        b
        for b in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        if "serve-" in b
    )
    *servers, last = [line.strip() for line in block.splitlines() if line.strip()]
    reward, reference = [re.fullmatch(r"\.venv/bin/rolemesh (serve-\w+) (\S+) &", line) for line in servers]
    assert last == ".venv/bin/rolemesh train examples/remote_reward.yaml"
    with (
        served(reward[1], str(clone / reward[2])) as rm,
        served(reference[1], str(clone / reference[2])) as ref,
    ):
        endpoints = f"reward.endpoints=[{rm.url}/get_reward]", f"ref.endpoints=[{ref.url}]"
        train(clone, "remote_reward.yaml", *endpoints)
    assert metrics(clone, "runs/remote-reward")["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-4)
