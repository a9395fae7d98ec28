"""A run that ends before its job does: it saves in time, and its exit code says that there is more."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime

from rolemesh.launch.fields import RecipeError
from rolemesh.launch.schema import Run

EXIT_WALLTIME = 75  # EX_TEMPFAIL: the same command again, with run.resume=auto, goes on
_SCHEDULER_S = 30.0
_RECENT_STEPS = 10
_JOB, _JOB_END = "SLURM_JOB_ID", "SLURM_JOB_END_TIME"


class Walltime:
    """Asked after each step whether the next one would end too late.

    `ends_at` (seconds since the epoch, None: no limit) is when the job is over; the last save has to begin
    `before_s` seconds earlier. A step is taken to last as long as the longest of the last ten.
    """

    def __init__(
        self,
        ends_at: float | None,
        before_s: float,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.reached = False
        self._ends_at, self._before_s, self._tell, self._clock = ends_at, before_s, tell, clock
        self._last: float | None = None
        self._steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)

    @classmethod
    def of(cls, run: Run, tell: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> Walltime:
        """As the recipe says. Raises RecipeError where the job's end is not known."""
        if run.stop_before_walltime is None:
            return cls(None, 0.0, tell)
        return cls(job_end(run, environ), run.stop_before_walltime, tell)

    def due(self) -> bool:
        """Whether to stop after this step."""
        if self._ends_at is None:
            return False
        now = self._clock()
        if self._last is not None:
            self._steps_s.append(now - self._last)
        self._last = now
        step_s = max(self._steps_s, default=0.0)
        left_s = self._ends_at - now
        if not self.reached and left_s - step_s <= self._before_s:
            self.reached = True
            self._tell(
                f"the job ends in {left_s:.0f} s: stopping after this step, with a checkpoint (a step takes "
                f"{step_s:.0f} s, run.stop_before_walltime is {self._before_s:g} s)"
            )
        return self.reached


def job_end(run: Run, environ: Mapping[str, str] = os.environ) -> float:
    """When the job is over, in seconds since the epoch: by run.walltime, or by Slurm.

    Raises RecipeError where neither says.
    """
    if run.walltime is not None:
        return _started() + run.walltime
    if environ.get(_JOB_END, "").isdigit():
        return float(environ[_JOB_END])
    if job := environ.get(_JOB):
        said = _scontrol("show", "job", job, "--oneliner")
        ends = next((word for word in said.split() if word.startswith("EndTime=")), "").removeprefix(
            "EndTime="
        )
        try:
            return datetime.fromisoformat(ends).timestamp()
        except ValueError:
            raise RecipeError(
                f"run.stop_before_walltime: Slurm's job {job} has no end ({ends or said!r}): give "
                "run.walltime"
            ) from None
    raise RecipeError(
        "run.stop_before_walltime: when is the job over? Neither Slurm says so here, nor run.walltime"
    )


def requeue(environ: Mapping[str, str] = os.environ) -> str:
    """Let Slurm put this job back into its queue, which ends it here; the line to print.

    Raises RecipeError outside of Slurm, and where it refuses.
    """
    if not (job := environ.get(_JOB)):
        raise RecipeError(f"run.requeue: this is no Slurm job ({_JOB} is not set)")
    _scontrol("requeue", job)
    return f"Slurm starts job {job} again"


def walltime_lines(run: Run) -> Iterator[str]:
    """What the keys come to, for a check; nothing where they are not used."""
    if run.stop_before_walltime is not None:
        of = "Slurm's end of the job" if run.walltime is None else f"{run.walltime:g} s"
        then = "Slurm starts the job again" if run.requeue else f"the exit code is {EXIT_WALLTIME}"
        yield f"the run saves and ends {run.stop_before_walltime:g} s before {of}; then {then}"


def walltime_problems(run: Run, environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """What this machine cannot do of them."""
    if run.stop_before_walltime is None:
        return
    try:
        job_end(run, environ)
    except RecipeError as error:
        yield str(error)
    if run.requeue and _JOB not in environ:
        yield f"run.requeue: this is no Slurm job ({_JOB} is not set): leave it out"
    elif run.requeue and shutil.which("scontrol") is None:
        yield "run.requeue: scontrol is not on the PATH here (in a container: mount it)"


def _scontrol(*arguments: str) -> str:
    command = f"scontrol {' '.join(arguments)}"
    try:
        done = subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=_SCHEDULER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RecipeError(f"`{command}` did not work: {error}") from error
    if done.returncode:
        raise RecipeError(f"`{command}` said: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _started() -> float:
    import psutil

    return psutil.Process().create_time()
