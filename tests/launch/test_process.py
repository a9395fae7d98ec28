"""The end of a command's process, and the start of a long one."""

import gc
import subprocess
import sys

import pytest

from rolemesh.launch.process import quick_imports

PROGRAM = """
import atexit, sys
from rolemesh.launch.process import end_with

class Held:
    def __del__(self):
        print("taken apart")

def main():
    global held, cycle
    held = Held()
    atexit.register(print, "exit handler")
    print("ran", flush=False)
    {end}

end_with(main)
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("return None", 0, ""),
        ("return 3", 3, ""),
        ("sys.exit(143)", 143, ""),
        ("sys.exit('a reason')", 1, "a reason"),
        ("raise KeyError('a key')", 1, "KeyError: 'a key'"),
    ],
)
def test_a_process_ends_with_its_code_after_its_exit_handlers(end, code, said):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[:2] == ["ran", "exit handler"]
    assert ("taken apart" in done.stdout) == bool(said)
    assert said in done.stderr


def test_modules_are_loaded_without_collecting_garbage_and_left_alone_later():
    before = gc.get_freeze_count()
    with quick_imports():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)
