"""Runs of the command line to which something happens: `from broken_runs import start_run, output_of`."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file


def start_run(folder: Path, *overrides: str, recipe: str = "recipe.yaml") -> subprocess.Popen:
    """`rolemesh train` in `folder`, a session of its own; what it prints is in a pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "rolemesh.launch", "train", recipe, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def actor_of(run: Path, steps: int) -> dict[str, torch.Tensor]:
    """The weights that a run has exported after its last step."""
    return load_file(run / "export" / f"step_{steps}" / "actor" / "model.safetensors")


def worker_pids(run: Path) -> dict[str, int]:
    """The processes of a run's workers, by pool and rank, as their logs tell: `train_rank_0`."""
    pids = {}
    for log in sorted((run / "logs").glob("*.log")):
        if told := re.findall(r"\| process (\d+) on node", log.read_text(errors="replace")):
            pids[log.stem] = int(told[-1])
    return pids


def output_of(process: subprocess.Popen, after: Mapping[int, Callable[[], None]], limit_s: float) -> str:
    """What a run printed until its end; `after[step]()` is called once, when a step's figures are there."""
    lines: list[str] = []
    left = dict(after)

    def read() -> None:
        for line in process.stdout or ():
            lines.append(line)
            # A step's figures; the status line has a comma there.
            if (found := re.match(r"step (\d+)/\d+ [\d.]+ s ", line)) and int(found[1]) in left:
                left.pop(int(found[1]))()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        process.wait(limit_s)
        reader.join(10)
    finally:
        process.kill()
    output = "".join(lines)
    assert not left, f"never came to steps {sorted(left)}:\n{output}"
    return output
