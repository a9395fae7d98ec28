"""One run in a folder at a time, whatever becomes of its process."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rolemesh.launch.fields import RecipeError
from rolemesh.launch.run_lock import holder_of, only_run_in

HOLD = """
import sys
from rolemesh.launch.run_lock import only_run_in
with only_run_in(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait(10)


def test_a_second_run_is_refused_and_told_who_holds_the_folder(tmp_path, holder):
    said = rf"in use by another run, process {holder.pid} on .* since 20"
    with pytest.raises(RecipeError, match=said), only_run_in(tmp_path / "run"):
        pass
    with only_run_in(tmp_path / "other"):
        assert holder_of(tmp_path / "other")
        holder.stdin.close()
        assert holder.wait(10) == 0
    assert os.listdir(tmp_path) == [], "nothing is left beside the folders"


def test_a_killed_run_holds_nothing(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    assert (tmp_path / "run.lock").exists()
    assert holder_of(tmp_path / "run") == ""
    with only_run_in(tmp_path / "run"):
        assert f"process {os.getpid()} on" in holder_of(tmp_path / "run")


def test_the_folder_may_be_moved_while_it_is_held(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with only_run_in(folder):
        folder.rename(tmp_path / "run.1")
        folder.mkdir()
        assert holder_of(folder)
        assert not holder_of(tmp_path / "run.1")


def test_of_many_that_want_a_folder_one_at_a_time_has_it(tmp_path):
    inside, most, lock = [0], [0], threading.Lock()

    def enter() -> None:
        for _ in range(20):
            try:
                with only_run_in(Path(tmp_path) / "run"):
                    with lock:
                        inside[0] += 1
                        most[0] = max(most[0], inside[0])
                    with lock:
                        inside[0] -= 1
            except RecipeError:
                continue

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most[0] == 1
    assert not (tmp_path / "run.lock").exists()
