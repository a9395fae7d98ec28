"""`rolemesh status`: how a run stands, by its folder alone, from any machine that sees it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rolemesh.engine.recovery import read_recoveries
from rolemesh.launch.run_lock import is_held
from rolemesh.launch.run_state import RankState, RunState, read_state, this_machine

State = Literal["running", "finished", "stopped", "failed", "silent", "dead"]
EXIT_CODES: Mapping[State, int] = {
    "running": 0, "finished": 0, "stopped": 0, "failed": 1, "silent": 1, "dead": 1,
}  # fmt: skip
EXIT_NO_RUN = 2
_LATE_S = 15.0  # over three beats: workers that do not answer hold up a beat, and so does a slow disk
_TAIL_BYTES = 256 << 10
SHOWN = (
    "critic/score/mean", "val/reward/mean", "actor/pg_loss", "critic/vf_loss", "train/loss", "val/loss",
    "response_length/mean", "timing_s/step", "perf/throughput",
)  # fmt: skip


class NoRunError(ValueError):
    """A folder in which no run has said anything."""


@dataclass(frozen=True)
class RunStatus:
    """How a run stands. `why` says what tells that a run is silent or dead; `age_s` is that of its last word.

    `metrics` are those of the last step that has some; `checkpoints` the steps that have one.
    """

    folder: Path
    state: State
    why: str
    age_s: float
    told: RunState
    metrics: Mapping[str, float] = field(default_factory=dict)
    recoveries: tuple[str, ...] = ()
    checkpoints: tuple[int, ...] = ()
    logs: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """Of the command: 0 for a run that goes on or ended in good order, else 1."""
        return EXIT_CODES[self.state]

    def json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self) | {"folder": str(self.folder)}, indent=1)

    def text(self) -> str:
        """For a terminal."""
        told, now = self.told, self.state == "running"
        lines = [f"{self.folder}: {self.state}{f' ({self.why})' if self.why else ''}"]
        if told.error:
            lines += [f"  {line}" for line in told.error.splitlines()]
        driver = f"process {told.pid} on {told.host}, since {_clock(told.began_s)}"
        lines.append(_row("driver", driver))
        if told.exit_code is None:
            lines.append(_row("last heartbeat", f"{_clock(told.at_s)}, {duration(self.age_s)} ago"))
        else:
            lines.append(_row("ended", f"{_clock(told.at_s)}, exit code {told.exit_code}"))
        lines += _steps(told, now)
        if told.exit_code is None:
            lines += _operations(told)
        if shown := [f"{name} {self.metrics[name]:.4g}" for name in SHOWN if name in self.metrics]:
            lines.append(_row(f"step {self.metrics.get('step', 0):.0f}", "; ".join(shown)))
        lines += [_row("recovery", recovery) for recovery in self.recoveries]
        saved = ", ".join(map(str, self.checkpoints[-5:]))
        lines.append(_row("checkpoints", f"of step {saved}" if saved else "none"))
        where = f"{self.folder / 'logs'} ({len(self.logs)} files)"
        lines.append(_row("logs", where if self.logs else "none in the run folder"))
        if self.ranks:
            lines += ["", *_table(self.ranks, told.at_s)]
        return "\n".join(lines)

    @property
    def ranks(self) -> tuple[RankState, ...]:
        """What the workers said last; none of a run that has ended."""
        return self.told.ranks if self.told.exit_code is None else ()


def read_status(
    folder: str | Path,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> RunStatus:
    """How the run in `folder` stands now.

    From another machine than the driver's this takes a few seconds: clocks may differ, so the heartbeat is
    watched until it moves. Raises NoRunError where there is no run that tells.
    """
    folder = Path(folder)
    told = read_state(folder)
    if told is None:
        raise NoRunError(_nothing(folder))
    moves = None
    if told.state == "running" and told.machine != this_machine()[1]:
        moves = _moves(folder, told, sleep)
    held = is_held(folder.resolve() if folder.is_symlink() else folder)
    told = read_state(folder) or told  # after the look at the lock: it may have ended before that
    age_s = max(0.0, clock() - told.at_s)
    state, why = verdict(told, held, age_s, moves)
    return RunStatus(
        folder,
        state,
        why,
        age_s,
        told,
        last_metrics(folder),
        tuple(map(str, read_recoveries(folder))),
        _checkpoints(folder),
        tuple(sorted(path.name for path in folder.glob("logs/*.log"))),
    )


def verdict(told: RunState, held: bool | None, age_s: float, moves: bool | None) -> tuple[State, str]:
    """What the driver's last word, `age_s` old, comes to, and why.

    `held` is whether a process holds the folder, as far as this machine can know; `moves` whether the
    heartbeat did while it was watched from another machine than the driver's (None: this is that machine).
    """
    if told.state != "running":
        return told.state, ""
    late = age_s > 3 * told.every_s + _LATE_S if moves is None else not moves
    if held is False and moves is None:
        return "dead", "its process is gone without a word, as after kill -9: nobody holds its folder"
    if not late:
        return "running", ""
    stands = f"its heartbeat has stood still for {duration(age_s)}"
    if held:
        return "silent", f"{stands}, though its process is there: stopped, swapped out, or its disk hangs"
    return "dead", f"{stands}: its process or its machine is gone, or cut off from this folder"


def _moves(folder: Path, told: RunState, sleep: Callable[[float], None]) -> bool:
    """Whether the heartbeat goes on while it is watched; clocks do not count."""
    for _ in range(int((3 * told.every_s + _LATE_S) / 0.5)):
        sleep(0.5)
        now = read_state(folder)
        if now is not None and (now.beat, now.began_s) != (told.beat, told.began_s):
            return True
    return False


def last_metrics(folder: Path) -> dict[str, float]:
    """The last whole line of `metrics.jsonl`; empty where there is none."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            found = json.loads(line)
            return {name: value for name, value in found.items() if isinstance(value, int | float)}
        except (ValueError, AttributeError):
            continue  # cut off, by the end of the process or by the look at the tail alone
    return {}


def duration(seconds: float) -> str:
    """Such as `12 s`, `3:05`, `26:00:10` (hours)."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"


def _nothing(folder: Path) -> str:
    if not folder.is_dir():
        return f"no folder {folder}: give the run folder, run.dir of its recipe (runs/NAME by default)"
    if (folder / "recipe.yaml").is_file():
        return f"{folder} holds a run that has not begun yet, or of a version without status.json"
    return f"{folder} is no run folder: it has no status.json"


def _steps(told: RunState, running: bool) -> list[str]:
    if told.steps is None:
        return [_row("step", "none yet: data, models and cluster are looked at")] if running else []
    at = f"{told.done} of {told.steps} done"
    if told.exit_code is None and told.step is not None and told.done < told.steps:
        at = f"{told.step} of {told.steps}, for {duration(told.step_s)}"
    elif told.exit_code is None and told.step is None:
        at = f"none of {told.steps} yet: the run starts"
    left = f"; {duration(told.left_s)} left" if told.left_s is not None and running else ""
    return [_row("step", at + left)]


def _operations(told: RunState) -> list[str]:
    """A row for what the driver waits for, then one for each role that a rank works for."""
    names = ", ".join(f"{name} for {duration(seconds)}" for name, seconds in told.operations.items())
    done = "" if told.done_operations is None else "; {} of {} done".format(*told.done_operations)
    rows = [_row("operations", (names or "none") + done)]
    by_role: dict[tuple[str, str], list[RankState]] = {}
    for rank in told.ranks:
        if rank.operation:
            role, _, method = rank.operation.partition(".")
            by_role.setdefault((role, method), []).append(rank)
    for (role, method), ranks in by_role.items():
        pools = "+".join(dict.fromkeys(rank.pool for rank in ranks))
        of = sum(rank.pool in {one.pool for one in ranks} for rank in told.ranks)
        longest = duration(max(rank.seconds for rank in ranks))
        rows.append(_row(f"  {role}", f"{method} on {len(ranks)} of {of} ranks of {pools}, for {longest}"))
    return rows


def _table(ranks: tuple[RankState, ...], at_s: float) -> list[str]:
    rows = [("rank", "node", "operation", "step", "for", "resident", "node has free", "heard")]
    for rank in ranks:
        heard = "never" if not rank.heard_s else f"{duration(max(0.0, at_s - rank.heard_s))} before"
        rows.append(
            (
                f"{rank.pool} {rank.rank}",
                rank.node,
                rank.operation or "no operation",
                "-" if rank.step is None else str(rank.step),
                duration(rank.seconds) if rank.operation else "-",
                f"{rank.resident_bytes / 2**30:.2f} GiB",
                f"{rank.available_bytes / 2**30:.1f} GiB",
                f"{heard}; {rank.silent}" if rank.silent else heard,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _checkpoints(folder: Path) -> tuple[int, ...]:
    names = (path.name.removeprefix("step_") for path in folder.glob("checkpoints/step_*"))
    return tuple(sorted(int(name) for name in names if name.isdigit()))


def _row(name: str, text: Any) -> str:
    return f"{name:<15} {text}"


def _clock(epoch_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(epoch_s))
