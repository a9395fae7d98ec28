"""Predicted beside measured step seconds on this machine's worker slots, for `colocate` and `split`.

    python benchmarks/local_prediction.py [--rounds 5] [--steps 8] [--out runs/local-prediction]

Each round calibrates the slots, then trains each strategy for a few steps; so what slows the machine down for
a while slows down all three. Every process of a slot is kept on a core of its own. The prediction is that of
the median of the rounds, each made with its round's profile; measured is the median of the rounds' medians.
The aim: an error of at most the larger of 15% and twice the spread of the rounds, and the right order.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from rolemesh.launch.bench_result import CellResult, slug
from rolemesh.launch.bench_run import run_cell
from rolemesh.launch.bench_simulate import simulate_case
from rolemesh.launch.bench_spec import Limits, load_spec
from rolemesh.parallel.calibrate import CalibrationError, calibrate
from rolemesh.placement.timeline import Timeline

SPEC = Path(__file__).parents[1] / "examples" / "bench" / "local_cpu.yaml"
STRATEGIES = ("colocate", "split")
AIM = 0.15


@dataclass(frozen=True)
class Round:
    """One strategy in one round: seconds of a step, and seconds in which both updates ran."""

    predicted_s: float
    measured_s: float
    both_s: float


@dataclass(frozen=True)
class Compared:
    """All rounds of one strategy."""

    strategy: str
    rounds: tuple[Round, ...]

    @property
    def predicted_s(self) -> float:
        """Median prediction."""
        return median(one.predicted_s for one in self.rounds)

    @property
    def measured_s(self) -> float:
        """Median of the rounds' measured medians."""
        return median(one.measured_s for one in self.rounds)

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def spread(self) -> float:
        """Half of the range of the rounds, as a part of the median."""
        seconds = [one.measured_s for one in self.rounds]
        return (max(seconds) - min(seconds)) / 2 / self.measured_s

    @property
    def reached(self) -> bool:
        """Whether the error is within the aim."""
        return abs(self.error) <= max(AIM, 2 * self.spread)


def table(compared: list[Compared]) -> str:
    """What was found, for a person."""
    lines = [f"{'strategy':<10}{'predicted':>11}{'measured':>11}{'error':>8}{'spread':>9}  aim"]
    for one in compared:
        aim = f"{max(AIM, 2 * one.spread):.0%}: {'reached' if one.reached else 'missed'}"
        seconds = f"{one.predicted_s:>9.3g} s{one.measured_s:>9.3g} s"
        lines.append(f"{one.strategy:<10}{seconds}{one.error:>+8.0%}{one.spread:>9.0%}  {aim}")
    order = [
        sorted(compared, key=lambda one: one.predicted_s),
        sorted(compared, key=lambda one: one.measured_s),
    ]
    said = [" before ".join(one.strategy for one in ranked) for ranked in order]
    right = "right" if said[0] == said[1] else "wrong"
    lines.append(f"order: predicted {said[0]}, measured {said[1]}: {right}")
    for one in compared:
        both = median(each.both_s for each in one.rounds)
        lines.append(f"{one.strategy}: both updates compute at once for {both:.3g} s of a run")
    lines.append(f"load of the machine: {os.getloadavg()[0]:.1f} runnable processes, {os.cpu_count()} cores")
    return "\n".join(lines)


def main() -> None:
    """Run the rounds and print the table; the folder keeps every run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/local-prediction"))
    parser.add_argument("--full", action="store_true", help="calibrate with all sizes")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Round]] = {name: [] for name in STRATEGIES}
    for number in range(asked.rounds):
        folder = asked.out / f"round-{number}"
        folder.mkdir(exist_ok=True)
        try:
            (folder / "cpu.yaml").write_text(calibrate("cpu", quick=not asked.full).to_yaml())
        except CalibrationError as error:  # such as on a machine that others keep busy
            print(f"round {number} is left out: {error}", flush=True)
            continue
        for cell, both_s in run_round(folder, asked.steps):
            assert cell.predicted_s is not None, cell.reason
            assert cell.step_s is not None, cell.reason
            found[cell.strategy].append(Round(cell.predicted_s, cell.step_s, both_s))
            print(f"round {number}: {cell.strategy} predicted {cell.predicted_s:.3g} s, "
                  f"measured {cell.step_s:.3g} s", flush=True)  # fmt: skip
    if not all(found.values()):
        parser.exit(1, "no round was measured\n")
    compared = [Compared(name, tuple(rounds)) for name, rounds in found.items()]
    (asked.out / "results.json").write_text(
        json.dumps({one.strategy: [vars(each) for each in one.rounds] for one in compared}, indent=1)
    )
    print(table(compared))


def run_round(folder: Path, steps: int) -> Iterator[tuple[CellResult, float]]:
    """Each strategy once, with the profile of the folder; and the seconds in which both updates computed."""
    profile = json.dumps(str((folder / "cpu.yaml").absolute()))
    (case,) = load_spec(SPEC, [f"profiles=[{profile}]", f"strategies={json.dumps(STRATEGIES)}"]).cases
    limits = Limits(steps=steps, run_s=900)
    for predicted in simulate_case(case, limits):
        run = folder / slug(predicted.strategy)
        with kept_on_cores() as keep:
            cell = run_cell(case, predicted, limits, run, during=keep)
        timeline = Timeline.load(run / "run" / "timeline.json")
        yield cell, timeline.overlap_s("update_actor", "update_critic")


@contextmanager
def kept_on_cores() -> Iterator:
    """A function that keeps each worker of a run's processes on a core of its own, until the block ends."""
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def keep(process: subprocess.Popen) -> None:
        threads.append(threading.Thread(target=_keep, args=(process.pid, stop), daemon=True))
        threads[-1].start()

    try:
        yield keep
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _keep(pid: int, stop: threading.Event) -> None:
    """Threads that a worker starts later inherit its core; those that it had are moved one by one."""
    cores = sorted(os.sched_getaffinity(0))
    while not stop.wait(0.5):
        try:
            children = psutil.Process(pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        workers = sorted(child.pid for child in children if _is_host(child))
        for i, worker in enumerate(workers):
            for thread in _threads(worker):
                with suppress(psutil.Error, OSError):
                    os.sched_setaffinity(thread, {cores[i % len(cores)]})


def _is_host(process: psutil.Process) -> bool:
    with suppress(psutil.Error, OSError):
        return " ".join(process.cmdline()).startswith("ray::Host")
    return False


def _threads(pid: int) -> list[int]:
    with suppress(psutil.Error, OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


if __name__ == "__main__":
    main()
