"""Runs that are told to stop at any moment: nothing of them stays, and the last checkpoint is whole."""

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest
from small_runs import MarkedRun, small_recipe

from rolemesh.engine.checkpoint.store import newest_good
from rolemesh.launch.signals import EXIT_TERMINATED, stop_on_sigterm

STEPS, SEED = 4, 20
STAGES = (  # what the run has printed, and how long after that a signal comes at most
    ("", 5.0),  # imports and check
    ("\nok\n", 6.0),  # its Ray starts
    ("train: ", 12.0),  # workers start, models load
    (r"(?m)^step 1/4 [\d.]+ s ", 1.5),  # generation and update
    ("checkpoint of step 1", 1.0),  # the next save
    ("actor exported", 3.0),  # the end
)


def test_a_sigterm_stops_after_the_step_and_at_once_where_none_has_begun():
    told: list[str] = []
    with stop_on_sigterm(told.append) as stopping:
        assert not stopping()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as stop, stop_on_sigterm(told.append, lambda: False):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.value.code == EXIT_TERMINATED


def moments() -> Iterator[tuple[str, float, signal.Signals]]:
    """Ten: each stage once, then any; SIGINT and SIGTERM in turn."""
    draw = random.Random(SEED)
    stages = [*STAGES, *(draw.choice(STAGES) for _ in range(10 - len(STAGES)))]
    for number, (after, most_s) in enumerate(stages):
        what = signal.SIGTERM if (number + number // len(STAGES)) % 2 else signal.SIGINT
        yield after, round(draw.uniform(0, most_s), 2), what


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("after", "delay_s", "what"), moments())
def test_a_run_that_is_stopped_leaves_no_process_and_a_whole_checkpoint(tmp_path, after, delay_s, what):
    sections = {"run": {"dir": "run", "steps": STEPS, "save_every": 1, "keep_last": 2, "temp_dir": "temp"}}
    run = MarkedRun(small_recipe(tmp_path, **sections))
    try:
        assert run.says(after, 250), run.output
        time.sleep(delay_s)
        run.process.send_signal(what)
        if what == signal.SIGTERM:  # the step is finished first
            run.process.wait(150)
        assert run.left_after(15) == [], run.output
        code = run.process.wait(5)
    finally:
        run.kill()
    allowed = (0,) if after == "actor exported" else ()
    assert code in (*allowed, 128 + what, -what), run.output
    assert not (tmp_path / "temp").exists() or list((tmp_path / "temp").iterdir()) == []
    folder = tmp_path / "run" / "checkpoints"
    saved = sorted(folder.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    assert saved or after not in ("checkpoint of step 1", "actor exported")
    if saved:
        found = newest_good(folder)
        assert found.path == saved[-1]
        assert all(reason.startswith(".step_") for reason in found.skipped)
