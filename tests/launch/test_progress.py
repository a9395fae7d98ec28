"""A slow step and a hung one look different, with and without a terminal."""

import io
import time

import pytest

from rolemesh.launch.progress import PLAIN_INTERVAL_S, Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_status_names_every_running_phase_with_its_count_and_time():
    clock = Clock()
    progress = Progress(3, io.StringIO(), clock=clock)
    progress.start("values")
    clock.now += 5
    progress.start("ref_log_prob")
    progress.advance(2, 9)
    clock.now += 60
    phases = "values 65 s, ref_log_prob 60 s"
    assert (
        progress.render()
        == f"step 1/3, 2/9 operations | {phases} | 1:05 elapsed, time left known after step 1"
    )
    progress.end("ref_log_prob")
    progress.end("values")
    assert "| between operations |" in progress.render()


def test_time_left_follows_finished_steps_and_leaves_loading_out():
    clock = Clock()
    progress = Progress(3, io.StringIO(), clock=clock)
    clock.now += 500  # loading
    progress.begin_steps()
    clock.now += 60
    progress.end_step()
    assert progress.render().endswith("2:00 left")
    clock.now += 30
    assert progress.render().endswith("1:30 left")
    clock.now += 300  # a step slower than the others never promises less than the ones after it
    assert progress.render().endswith("1:00 left")
    progress.end_step()
    progress.end_step()
    assert progress.render().endswith("0:00 left")


def test_without_a_terminal_a_line_comes_at_least_every_ten_seconds():
    assert PLAIN_INTERVAL_S <= 10
    stream = io.StringIO()
    with Progress(1, stream, interval_s=0.02) as progress:
        progress.start("generate")
        progress.advance(0, 9)
        deadline = time.monotonic() + 10
        while stream.getvalue().count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 3
    assert all("0/9 operations | generate" in line for line in lines)
    assert "\r" not in stream.getvalue()


def test_on_a_terminal_the_status_is_redrawn_and_figures_stay():
    stream = io.StringIO()
    stream.isatty = lambda: True
    with Progress(2, stream, interval_s=0.01) as progress:
        progress.start("values")
        time.sleep(0.1)
        progress.end_step("step 1: reward 0.5")
    assert "\r\033[K" in stream.getvalue()
    assert "step 1: reward 0.5\n" in stream.getvalue()
    assert stream.getvalue().endswith("\r\033[K")


def test_output_that_finds_no_room_on_its_disk_ends_nothing():
    stream = open("/dev/full", "w")  # noqa: SIM115  closing it fails
    with Progress(1, stream, interval_s=0.01) as progress:
        progress.write("step 1: reward 0.5")
        time.sleep(0.05)
        assert progress._thread.is_alive()
    with pytest.raises(OSError, match="No space left"):
        stream.close()
