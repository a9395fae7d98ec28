"""Servers in other processes, for tests: `from service_process import served`."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

START_S = 280.0


@dataclass
class Served:
    """A server that is ready at `url`; `lines` is what it has printed."""

    url: str
    process: subprocess.Popen
    lines: list[str] = field(default_factory=list)

    def stop(self, limit_s: float = 60.0) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit_s)


@contextmanager
def served(*arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Served]:
    """`rolemesh ARGUMENTS --port 0` in another process, once it is ready; it is killed at the end."""
    command = [sys.executable, "-m", "rolemesh.launch", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {})},
    )
    lines: list[str] = []
    news: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.append(line)
            news.put(line)
        news.put("")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while line := news.get(timeout=START_S):
            if found := re.match(r"ready: .* at (http://\S+)", line):
                break
        else:
            raise AssertionError(f"{' '.join(command)} ended with {process.wait(20)}:\n{''.join(lines)}")
        yield Served(found[1], process, lines)
    finally:
        process.kill()
        process.wait(20)
        reader.join(20)
