"""The smallest real run, and the processes that it has: `from small_runs import small_recipe`."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import yaml
from tiny import tiny_checkpoint

MARK = "ROLEMESH_TEST_RUN"
REWARD = """
import json, os
def compute_score(data_source, solution_str, ground_truth, extra_info):
    open(os.path.join(os.path.dirname(__file__), "seen.json"), "w").write(json.dumps(dict(os.environ)))
    return float(len(solution_str))
"""


def small_recipe(folder: Path, **changes) -> Path:
    """One GRPO step with a reward function, on one worker slot per node; `changes` replaces sections."""
    tiny_checkpoint(folder / "policy", layers=1, hidden=32)
    rows = [{"prompt": f"{i}>", "reward_model": {"ground_truth": ""}} for i in range(8)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "reward.py").write_text(REWARD)
    content = {
        "run": {"dir": "run", "steps": 1},
        "cluster": {"device": "cpu", "per_node": 1},
        "data": {"train_files": ["train.jsonl"], "max_prompt_tokens": 8},
        "algorithm": {"name": "grpo"},
        "batch": {"prompts": 4, "samples_per_prompt": 2, "micro_batch_tokens": 64},
        "lengths": {"max_response_tokens": 8},
        "actor": {"path": "policy", "dtype": "float32"},
        "reward": "reward.py:compute_score",
        "placement": "colocate",
    } | changes
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


class MarkedRun:
    """`rolemesh train`, all of whose processes can be told from others by their environment."""

    def __init__(self, recipe: Path, *overrides: str) -> None:
        self.mark = uuid.uuid4().hex
        self.log = recipe.with_name(f"{self.mark}.log")
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rolemesh.launch", "train", str(recipe), *overrides],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", MARK: self.mark},
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def processes(self) -> list[str]:
        """Command lines of those alive; zombies are none."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
        return found

    def left_after(self, limit_s: float) -> list[str]:
        """The processes that are still there when the time is over, or none earlier."""
        deadline = time.monotonic() + limit_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.3)
        return left

    def says(self, pattern: str, limit_s: float) -> bool:
        """Wait until the run has printed the pattern; False when it ended, or the time did, before."""
        deadline = time.monotonic() + limit_s
        while not re.search(pattern, self.output):
            if self.process.poll() is not None or time.monotonic() > deadline:
                return bool(re.search(pattern, self.output))
            time.sleep(0.05)
        return True

    def kill(self) -> None:
        """End all of it."""
        for line in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), 9)
        self.process.wait(10)


def users_of(folder: Path) -> list[list[str]]:
    """Command lines of the processes that name a folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found.append(process.cmdline())
    return [line for line in found if any(str(folder) in word for word in line)]
