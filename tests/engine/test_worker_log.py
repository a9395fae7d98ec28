"""What a process prints, in its log: who, in which step, and the last words too."""

import platform
import re
import subprocess
import sys
import time

import pytest

from rolemesh.engine.worker_log import ENDED

KERNEL_TELLS = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (6, 15)
LAST = ENDED if KERNEL_TELLS else "last words"
PROGRAM = """
import os, sys
from pathlib import Path
from rolemesh.engine.worker_log import WorkerLog
log = WorkerLog(Path(sys.argv[1]) / "logs" / "pool_rank_1.log", "pool rank 1")
print("before any step")
log.begin("actor rank 1", 3, "update_actor")
print("two", "lines", sep="\\n")
sys.stderr.write("no end of line, then ")
log.end("pool rank 1")
print("in between")
log.begin("critic rank 1", None, "init_model")
os.write(2, b"from outside of Python\\n\\n")
os.system("echo from a child")
{end}
"""


def lines(folder, end: str, last: str) -> list[str]:
    subprocess.run([sys.executable, "-c", PROGRAM.replace("{end}", end), str(folder)], check=False)
    file = folder / "logs" / "pool_rank_1.log"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not re.search(last, file.read_text()):
        time.sleep(0.05)
    return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in file.read_text().splitlines()]


def test_every_line_has_role_rank_and_step_whoever_printed_it(tmp_path):
    assert lines(tmp_path, "os.write(1, b'last words'); os.kill(os.getpid(), 9)", LAST) == [
        "pool rank 1 | before any step",
        "actor rank 1 step 3 update_actor | begins",
        "actor rank 1 step 3 update_actor | two",
        "actor rank 1 step 3 update_actor | lines",
        "actor rank 1 step 3 update_actor | no end of line, then ",
        "pool rank 1 between operations | in between",
        "critic rank 1 init_model | begins",
        "critic rank 1 init_model | from outside of Python",
        "critic rank 1 init_model | ",
        "critic rank 1 init_model | from a child",
        "critic rank 1 init_model | last words",
        *(["critic rank 1 init_model | process ended: signal 9 (SIGKILL)"] if KERNEL_TELLS else []),
    ]


@pytest.mark.skipif(not KERNEL_TELLS, reason="the kernel is older than Linux 6.15")
def test_an_exit_code_is_told_even_where_python_had_no_say(tmp_path):
    assert (
        lines(tmp_path, "os._exit(7)", ENDED)[-1] == "critic rank 1 init_model | process ended: exit code 7"
    )


def test_a_fatal_signal_leaves_the_python_stack_in_the_log(tmp_path):
    end = (
        "import faulthandler; faulthandler.enable()\nprint('last words')\nimport ctypes; ctypes.string_at(0)"
    )
    said = "\n".join(lines(tmp_path, end, r'File "<string>", line'))
    assert "init_model | Fatal Python error: Segmentation fault" in said
    assert 'File "<string>", line' in said


def test_a_log_holds_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-token-of-some-length")
    end = "print('Bearer abcdefghijkl', os.environ['HF_TOKEN']); os.write(1, b'last words')"
    said = lines(tmp_path, end, "last words")
    assert "critic rank 1 init_model | Bearer *** ***" in said
