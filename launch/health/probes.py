"""Probes run in processes of their own, with a limit: one that crashes or hangs ends nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


class ProbeError(RuntimeError):
    """A probe that crashed, hung, or raised; the message has the end of what it printed."""


def probe(module: str, *arguments: str, world: int = 1, limit_s: float) -> Any:
    """What `python -m MODULE FOLDER RANK WORLD ARGUMENTS...` wrote into FOLDER/answer.json, of `world` ranks.

    Raises ProbeError.
    """
    with tempfile.TemporaryDirectory(prefix="rolemesh-doctor-") as name:
        folder = Path(name)
        ranks = [_start(module, folder, rank, world, arguments) for rank in range(world)]
        try:
            _wait(ranks, folder, limit_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        try:
            return json.loads((folder / "answer.json").read_text())
        except (OSError, ValueError) as error:
            raise ProbeError(f"it ended without an answer: {error}") from None


def answer(folder: Path, content: Any) -> None:
    """Write a probe's answer."""
    (folder / "answer.json").write_text(json.dumps(content))


def _start(
    module: str, folder: Path, rank: int, world: int, arguments: tuple[str, ...]
) -> subprocess.Popen[bytes]:
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(folder), str(rank), str(world), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                raise ProbeError(f"rank {rank} ended with {how}{_said(folder, rank)}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise ProbeError(f"not done within {limit_s:g} s{_said(folder, codes.index(None))}")
        time.sleep(0.05)


def _said(folder: Path, rank: int) -> str:
    lines = (folder / f"{rank}.log").read_text(errors="replace").strip().splitlines()
    return f": {lines[-1][:300]}" if lines else ""
