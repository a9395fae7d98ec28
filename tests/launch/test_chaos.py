"""A run to which everything happens, by the command line: workers, rollout and reward server are killed."""

import contextlib
import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml
from broken_runs import actor_of, output_of, start_run, worker_pids
from faulty_server import Running, faulty_server
from tiny import tiny_checkpoint

from rolemesh.engine.recovery import read_recoveries

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, SEED = 20, 7
AHEAD_STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("chaos")
    tiny_checkpoint(root / "policy")
    rows = [{"prompt": f"{i * 37 % 1000}>"} for i in range(30)]
    (root / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return root


def recipe(folder: Path, url: str) -> None:
    content = {
        "run": {"steps": STEPS, "save_every": 3, "keep_last": 2, "recoveries": 20},
        "cluster": {"nodes": 1, "device": "cpu", "per_node": 3},
        "data": {"train_files": ["train.jsonl"], "max_prompt_tokens": 8},
        "algorithm": {"name": "grpo", "kl": {"in": "loss", "coef": 0.01}},
        "batch": {"prompts": 4, "samples_per_prompt": 2, "micro_batch_tokens": 64},
        "lengths": {"max_response_tokens": 8},
        "actor": {"path": "policy", "dtype": "float32", "optim": {"lr": 1e-3}},
        "ref": {"dtype": "float32"},
        "reward": {
            "kind": "remote",
            "protocol": "openrlhf",
            "endpoints": [url],
            "limits": {"retries": 12, "total_s": 20},
            "on_failure": "raise",
        },
        "placement": {
            "pools": {
                "train": {"roles": ["actor", "ref"], "devices": 2},
                "rollout": {"roles": ["rollout"], "devices": 1},
            }
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))


def rows_of(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


class Chaos:
    """Kills at random, as the seed says; the reward server comes back at its port after a second."""

    def __init__(self, run: Path, server: Running, ended: contextlib.ExitStack) -> None:
        self.run, self.server, self._ended = run, server, ended
        self._random = random.Random(SEED)
        self.killed: list[str] = []

    def strike(self, victim: str) -> None:
        """Kill a process whose name begins so, up to a second into the step."""
        time.sleep(self._random.random())
        if victim == "server":
            self.server.process.kill()
            self.server.process.wait()
            time.sleep(1.0)
            self.server = self._ended.enter_context(faulty_server("--port", str(self.server.port)))
        else:
            pids = {name: pid for name, pid in worker_pids(self.run).items() if name.startswith(victim)}
            victim = self._random.choice(sorted(pids))
            os.kill(pids[victim], signal.SIGKILL)
        self.killed.append(victim)


def test_a_run_whose_processes_are_killed_every_few_steps_is_the_unbroken_one_bit_for_bit(folder):
    with contextlib.ExitStack() as ended:
        server = ended.enter_context(faulty_server())
        recipe(folder, server.url)
        unbroken = start_run(folder, "run.dir=unbroken")
        output = output_of(unbroken, {}, 600)
        assert unbroken.returncode == 0, output

        chaos = Chaos(folder / "broken", server, ended)
        victims = ["train", "rollout", "server", "reward", "", "train"]
        order = random.Random(SEED).sample(victims, len(victims))
        at = range(1, STEPS, 3)  # six times, of which one is before the first checkpoint
        strikes = {step: lambda victim=victim: chaos.strike(victim) for step, victim in zip(at, order)}  # noqa: B905
        broken = start_run(folder, "run.dir=broken")
        output = output_of(broken, strikes, 1200)
    assert broken.returncode == 0, output
    assert len(chaos.killed) == len(victims)
    n_workers = sum(victim != "server" for victim in chaos.killed)
    assert len(list(read_recoveries(folder / "broken"))) == n_workers == 5, output
    one, other = (rows_of(folder / run, "trained.jsonl") for run in ("unbroken", "broken"))
    assert [row["step"] for row in one] == list(range(1, STEPS + 1))
    assert other == one
    first, second = actor_of(folder / "unbroken", STEPS), actor_of(folder / "broken", STEPS)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_that_generates_ahead_loses_workers_and_no_step_mixes_weights(folder):
    """A checkpoint holds the samples of the next step too: they are trained on as they are."""
    overrides = (f"run.steps={AHEAD_STEPS}", "run.save_every=2", "schedule.staleness=1")
    with contextlib.ExitStack() as ended:
        server = ended.enter_context(faulty_server())
        recipe(folder, server.url)
        unbroken = start_run(folder, "run.dir=ahead", *overrides)
        output = output_of(unbroken, {}, 300)
        assert unbroken.returncode == 0, output
        chaos = Chaos(folder / "ahead-broken", server, ended)
        strikes = {2: lambda: chaos.strike("rollout"), 4: lambda: chaos.strike("train")}
        broken = start_run(folder, "run.dir=ahead-broken", *overrides)
        output = output_of(broken, strikes, 600)
    assert broken.returncode == 0, output
    assert len(list(read_recoveries(chaos.run))) == 2, output
    logs = {log.stem: log.read_text() for log in (chaos.run / "logs").iterdir()}
    begun = {name: len(re.findall(r"\| process \d+ on node", log)) for name, log in logs.items()}
    learning = dict.fromkeys(("train_rank_0", "train_rank_1"), 3)
    assert begun == learning | {"rollout_rank_0": 2, "reward_process_rank_0": 1}, "others are spared"
    ages = [
        [row[f"training/staleness/{what}"] for what in ("min", "mean", "max")]
        for row in rows_of(chaos.run, "metrics.jsonl")
        if row["step"]
    ]
    assert ages == [[min(1, step - 1)] * 3 for step in range(1, AHEAD_STEPS + 1)]
    assert rows_of(chaos.run, "trained.jsonl") == rows_of(folder / "ahead", "trained.jsonl")
    first, second = (actor_of(run, AHEAD_STEPS) for run in (folder / "ahead", chaos.run))
    assert all(torch.equal(first[name], second[name]) for name in first)
