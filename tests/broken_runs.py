"""Runs of the command line to which something happens: `from broken_runs import output_of, worker_pids`."""

import re
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path


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
