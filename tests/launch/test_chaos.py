"""A run to which everything happens, by the command line: workers, rollout and reward server are killed."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from broken_runs import output_of, worker_pids
from faulty_server import Running, faulty_server
from safetensors.torch import load_file
from tiny import tiny_checkpoint

from rolemesh.engine.recovery import read_recoveries

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, SEED = 20, 7


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


def start(folder: Path, run: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "rolemesh.launch", "train", "recipe.yaml", f"run.dir={run}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / f"step_{STEPS}" / "actor" / "model.safetensors")


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
        unbroken = start(folder, "unbroken")
        output = output_of(unbroken, {}, 600)
        assert unbroken.returncode == 0, output

        chaos = Chaos(folder / "broken", server, ended)
        victims = ["train", "rollout", "server", "reward", "", "train"]
        order = random.Random(SEED).sample(victims, len(victims))
        at = range(1, STEPS, 3)  # six times, of which one is before the first checkpoint
        strikes = {step: lambda victim=victim: chaos.strike(victim) for step, victim in zip(at, order)}  # noqa: B905
        broken = start(folder, "broken")
        output = output_of(broken, strikes, 1200)
    assert broken.returncode == 0, output
    assert len(chaos.killed) == len(victims)
    n_workers = sum(victim != "server" for victim in chaos.killed)
    assert len(list(read_recoveries(folder / "broken"))) == n_workers == 5, output
    for name in ("trained.jsonl",):
        one, other = ((folder / run / name).read_text() for run in ("unbroken", "broken"))
        assert [json.loads(line)["step"] for line in one.splitlines()] == list(range(1, STEPS + 1))
        assert other == one
    first, second = weights(folder / "unbroken"), weights(folder / "broken")
    assert all(torch.equal(first[name], second[name]) for name in first)
