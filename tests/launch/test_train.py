"""Whole training runs by the command line: real Ray, real megatron-core ranks, in processes of their own."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from tiny import tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolemesh.kernels.forms import form_of
from rolemesh.placement.timeline import Timeline

pytestmark = [pytest.mark.full, pytest.mark.alone, pytest.mark.timeout(400)]

LINEAR = "linear_log_prob_and_entropy"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(sum(c.isdigit() for c in solution_str)), "length": len(solution_str)}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, prompts and a reward function."""
    root = tmp_path_factory.mktemp("train")
    tiny_checkpoint(root / "policy", layers=4, hidden=128)
    tiny_checkpoint(root / "other", layers=4, hidden=128, seed=2)
    tiny_checkpoint(root / "scorer", layers=4, hidden=128, head="score", seed=1)
    for name, n in (("train", 64), ("val", 5)):
        rows = [{"prompt": f"{i * 37 % 1000}>", "reward_model": {"ground_truth": str(i)}} for i in range(n)]
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (root / "reward.py").write_text(REWARD)
    return root


def recipe(folder: Path, name: str, **changes) -> Path:
    """A small PPO recipe in `folder`; `changes` replaces whole sections."""
    content = {
        "run": {"dir": f"runs/{name}", "steps": 2},
        "cluster": {"nodes": 1, "device": "cpu", "per_node": 4},
        "data": {"train_files": ["train.jsonl"], "val_files": ["val.jsonl"], "max_prompt_tokens": 8},
        "algorithm": {"name": "ppo", "kl": {"in": "reward", "kind": "k1", "coef": 0.01}},
        "batch": {"prompts": 24, "micro_batch_tokens": 64},
        "lengths": {"max_response_tokens": 24},
        "actor": {"path": "policy", "dtype": "float32", "optim": {"lr": 1e-4}},
        "ref": {"dtype": "float32"},
        "critic": {"path": "scorer", "dtype": "float32", "optim": {"lr": 1e-4}, "layout": {"tp": 2}},
        "reward": {"path": "scorer", "dtype": "float32", "layout": {"tp": 2}},
        "placement": "split",
    } | changes
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return path


def start(path: Path, *overrides: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "rolemesh.launch", "train", str(path), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def finish(process: subprocess.Popen, limit_s: float = 240) -> str:
    try:
        return process.communicate(timeout=limit_s)[0]
    finally:
        process.kill()


def train(path: Path, *overrides: str) -> str:
    process = start(path, *overrides)
    output = finish(process)
    assert process.returncode == 0, output
    return output


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def overlap_share(timeline: Timeline, one: str, other: str) -> float:
    """Overlapping compute of two operations, as a share of the shorter one."""
    return timeline.overlap_s(one, other) / min(timeline.busy_s(one), timeline.busy_s(other))


@pytest.fixture(scope="module")
def split_run(folder):
    """The run folder and output of a split PPO run."""
    output = train(recipe(folder, "split"))
    return folder / "runs" / "split", output


def test_a_split_run_overlaps_the_updates_and_the_scoring(split_run):
    timeline = Timeline.load(split_run[0] / "timeline.json")
    assert overlap_share(timeline, "update_actor", "update_critic") >= 0.5
    scored = [
        overlap_share(timeline, a, b) for a in ("old_log_prob", "ref_log_prob") for b in ("values", "reward")
    ]
    assert max(scored) >= 0.5, scored


def kernels(timeline: Timeline) -> dict[str, set[str]]:
    """The kernels that every rank's run of an operation names; each in the form that suits the CPU."""
    form = form_of(torch.device("cpu"))
    assert form != "reference"
    common: dict[str, set[str]] = {}
    for span in timeline.spans:
        assert all(name.endswith(f"/{form}") for name in span.args["kernels"]), span
        names = {name.partition("/")[0] for name in span.args["kernels"]}
        common[span.name] = common.get(span.name, names) & names
    return common


def test_every_operation_on_log_probs_advantages_or_losses_names_its_kernels(split_run):
    ran = kernels(Timeline.load(split_run[0] / "timeline.json"))
    for operation, wanted in {
        "old_log_prob": {LINEAR},
        "ref_log_prob": {LINEAR},
        "advantage": {"gae", "kl", "masked_moments", "masked_normalize"},
        "update_actor": {LINEAR, "policy_loss"},
        "update_critic": {"value_loss"},
    }.items():
        assert wanted <= ran[operation], operation


@pytest.mark.slow
def test_reference_critic_and_reward_model_score_at_the_same_time_on_pools_of_their_own(folder):
    pools = {"policy": ["actor", "rollout"], "reference": ["ref"], "values": ["critic"], "scores": ["reward"]}
    placement = {"pools": {name: {"roles": roles, "devices": 1} for name, roles in pools.items()}}
    one_rank = {"path": "scorer", "dtype": "float32"}
    train(recipe(folder, "apart", placement=placement, critic=one_rank, reward=one_rank), "run.steps=1")
    timeline = Timeline.load(folder / "runs" / "apart" / "timeline.json")
    for one, other in itertools.combinations(("ref_log_prob", "values", "reward"), 2):
        assert overlap_share(timeline, one, other) >= 0.5, (one, other)


def test_a_run_logs_metrics_in_verls_names(split_run):
    before, *steps = metrics(split_run[0])
    assert before["step"] == 0
    assert "val/reward/mean" in before
    wanted = {
        "actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac", "actor/lr",
        "actor/reward_kl_penalty", "critic/vf_loss", "critic/grad_norm", "critic/score/mean",
        "critic/rewards/mean", "critic/advantages/mean", "critic/returns/mean", "critic/values/mean",
        "critic/vf_explained_var", "response_length/mean", "response_length/clip_ratio", "prompt_length/mean",
        "timing_s/generate", "timing_s/update_actor", "timing_s/step", "perf/throughput",
        "training/global_step", "training/rollout_probs_diff/max",
    }  # fmt: skip
    for step in steps:
        assert wanted <= step.keys(), wanted - step.keys()
    assert [step["step"] for step in steps] == [1, 2]
    assert "val/reward/mean" in steps[-1]


def test_on_policy_log_probs_agree_before_the_first_update(split_run):
    """Trainer, engine and recomputation see the same policy: the ratio of the first update is 1."""
    for step in metrics(split_run[0])[1:]:
        assert step["actor/log_prob_diff_max"] <= 1e-5
        assert step["training/rollout_probs_diff/max"] <= 1e-5


def test_the_exported_actor_loads_in_hugging_face_and_has_moved(split_run, folder):
    run, output = split_run
    exported = run / "export" / "step_2" / "actor"
    assert str(exported) in output
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(exported).eos_token_id == 2
    moved = [(p - q).abs().max().item() for p, q in zip(model.parameters(), start.parameters(), strict=True)]
    assert max(moved) > 1e-5


@pytest.mark.slow
def test_the_run_folder_repeats_the_run(split_run, folder):
    """The same recipe gives the same numbers, whatever ran when; the recipe is the one the folder holds."""
    run, _ = split_run
    train(run / "recipe.yaml", f"run.dir={folder / 'runs' / 'again'}", "run.steps=1")
    first, again = metrics(run)[1], metrics(folder / "runs" / "again")[1]
    for name in ("actor/pg_loss", "critic/vf_loss", "critic/score/mean", "actor/grad_norm"):
        assert again[name] == pytest.approx(first[name], rel=1e-4), name


@pytest.mark.slow
def test_a_colocated_run_overlaps_nothing_and_learns_the_same(split_run, folder):
    train(recipe(folder, "colocated"), "placement.strategy=colocate", "cluster.per_node=2", "run.steps=1")
    run = folder / "runs" / "colocated"
    timeline = Timeline.load(run / "timeline.json")
    for one, other in (
        ("update_actor", "update_critic"),
        ("ref_log_prob", "values"),
        ("ref_log_prob", "reward"),
    ):
        assert timeline.overlap_s(one, other) == 0
    split, colocated = metrics(split_run[0])[1], metrics(run)[1]
    for name in ("actor/pg_loss", "critic/vf_loss", "critic/score/mean", "actor/grad_norm"):
        assert colocated[name] == pytest.approx(split[name], rel=1e-3), name


def test_grpo_with_a_function_reward_and_a_pool_for_generation(folder):
    path = recipe(
        folder,
        "grpo",
        algorithm={"name": "grpo", "kl": {"in": "loss", "kind": "k3", "coef": 0.01}},
        batch={"prompts": 5, "samples_per_prompt": 3, "mini_batch_samples": 8},
        critic=None,
        reward="reward.py:compute_score",
        rollout={"max_batch_tokens": 3 * (8 + 24)},  # three samples at a time
        placement={
            "pools": {
                "learn": {"roles": ["actor", "ref"], "devices": 2},
                "generate": {"roles": ["rollout"], "devices": 1},
            }
        },
        cluster={"nodes": 1, "device": "cpu", "per_node": 3},
    )
    train(path, "run.steps=1")
    step = metrics(folder / "runs" / "grpo")[1]
    assert step["grpo/groups"] == 5
    assert step["actor/kl_loss"] >= 0
    assert "reward/length/mean" in step
    assert step["training/rows"] == 15
    timeline = Timeline.load(folder / "runs" / "grpo" / "timeline.json")
    assert timeline.overlap_s("generate", "reward") > 0, "samples are scored while others are generated"
    ran = kernels(timeline)
    assert {LINEAR, "policy_loss", "kl"} <= ran["update_actor"]
    assert "group_moments" in ran["advantage"]


@pytest.mark.slow
def test_a_reference_that_streams_scores_while_others_are_written_and_changes_no_number(folder):
    shape = {
        "algorithm": {"name": "grpo", "kl": {"in": "loss", "kind": "k3", "coef": 0.01}},
        "batch": {"prompts": 5, "samples_per_prompt": 3, "mini_batch_samples": 8},
        "critic": None,
        "reward": "reward.py:compute_score",
        "rollout": {"max_batch_tokens": 3 * (8 + 24)},  # three samples at a time
        "placement": {
            "pools": {
                "learn": {"roles": ["actor", "rollout"], "devices": 1},
                "frozen": {"roles": ["ref"], "devices": 2},
            }
        },
        "cluster": {"nodes": 1, "device": "cpu", "per_node": 3},
        "data": {"train_files": ["train.jsonl"], "max_prompt_tokens": 8},
    }
    seen = []
    for name, stream in (("whole", False), ("streamed", True)):
        path = recipe(folder, name, **shape, ref={"dtype": "float32", "path": "other", "stream": stream})
        train(path, "run.steps=1", "actor.optim.lr=1e-2")
        timeline = Timeline.load(folder / "runs" / name / "timeline.json")
        seen.append((metrics(folder / "runs" / name)[-1], timeline.overlap_s("generate", "ref_log_prob")))
    (whole, none), (streamed, some) = seen
    assert (none, some > 0) == (0, True)
    assert whole["actor/kl_loss"] > 0.01  # the reference is another model
    for name in ("actor/kl_loss", "actor/grad_norm", "actor/pg_loss", "critic/score/mean"):
        assert streamed[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-7), name


def wait_until(condition, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.2)
    return bool(condition())


def in_a_step(folder: Path, name: str, *overrides: str) -> subprocess.Popen:
    """A long run that has done its first step."""
    process = start(recipe(folder, name), "run.steps=500", *overrides)
    log = folder / "runs" / name / "metrics.jsonl"
    assert wait_until(lambda: log.exists() and len(log.read_text().splitlines()) > 1, 200), finish(process, 1)
    return process


def reports(process: subprocess.Popen, text: str, limit_s: float) -> str:
    """The output up to the line with `text`; fails when it has not come after `limit_s` seconds."""
    lines: list[str] = []
    found = threading.Event()

    def read() -> None:
        for line in process.stdout or ():
            lines.append(line)
            if text in line:
                found.set()

    threading.Thread(target=read, daemon=True).start()
    assert found.wait(limit_s), "".join(lines)
    return "".join(lines)


@pytest.mark.slow
def test_a_killed_worker_is_reported_within_ten_seconds_and_nothing_is_left(folder):
    process = in_a_step(folder, "killed", "run.recoveries=0")
    family = [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
    workers = [pid for pid in family if "Host" in " ".join(psutil.Process(pid).cmdline())]
    assert len(workers) == 4
    os.kill(workers[1], signal.SIGKILL)
    output = reports(process, "WorkerDied", limit_s=10)
    assert "rank" in output
    assert process.wait(timeout=15) == 1
    assert wait_until(lambda: not any(psutil.pid_exists(pid) for pid in family), 15)


def test_ctrl_c_ends_every_process(folder):
    process = in_a_step(folder, "interrupted")
    family = [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGINT)
    interrupted = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - interrupted < 15
    assert wait_until(lambda: not any(psutil.pid_exists(pid) for pid in family), 15)
