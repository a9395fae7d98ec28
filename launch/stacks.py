"""`rolemesh stacks`: the Python stacks of a run's processes, asked for and answered through its folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rolemesh.launch.run_state import RankStack, Stacks, ask_for_stacks, read_stacks
from rolemesh.launch.status import RunStatus, duration, read_status

STACK_GAP = "\n\n"  # between the threads of one process
_POLL_S = 0.1
_OVER = ("finished", "stopped", "failed")


@dataclass(frozen=True)
class StacksReport:
    """`stacks` that are new, or, where `problem` says why there are no new ones, the last known."""

    status: RunStatus
    stacks: Stacks | None
    problem: str = ""

    def text(self, role: str = "", rank: int | None = None, *, threads: bool = False) -> str:
        """For a terminal: of each process of `role` and `rank` (all), the thread that computes or all."""
        lines = [self.problem] if self.problem else []
        if self.stacks is None:
            lines.append("no stacks are known; the operations that the ranks were last seen in:")
            lines += _seen(self.status) or ["  none"]
            return "\n".join(lines)
        if self.problem:
            lines.append(f"the last known stacks are {duration(time.time() - self.stacks.at_s)} old:")
        wanted = [one for one in self.stacks.ranks if _is_wanted(one, role, rank)]
        for one in wanted:
            lines += ["", heading(one), one.text if threads else one.text.partition(STACK_GAP)[0]]
        if not wanted:
            there = ", ".join(f"{one.pool} rank {one.rank}" for one in self.stacks.ranks)
            lines.append(f"no process of the run is rank {rank} or has role {role!r}; there are: {there}")
        return "\n".join(lines)

    def json(self) -> str:
        """All of it."""
        stacks = None if self.stacks is None else asdict(self.stacks)
        return json.dumps({"state": self.status.state, "problem": self.problem, "stacks": stacks}, indent=1)


def get_stacks(
    folder: str | Path, limit_s: float, *, sleep: Callable[[float], None] = time.sleep
) -> StacksReport:
    """Ask the run in `folder` for its stacks and wait for them, `limit_s` at most.

    Where the run is over or its driver gone, and where nobody may write into the folder, the report says so.
    Raises NoRunError.
    """
    folder = Path(folder)
    status = read_status(folder)
    known = read_stacks(folder)
    if status.state in _OVER:
        return StacksReport(status, known, f"the run has {status.state}: there are no processes to ask")
    if status.state == "dead":
        return StacksReport(status, known, f"the driver is dead: {status.why}")
    try:
        number = ask_for_stacks(folder)
    except OSError as error:
        return StacksReport(status, known, f"{folder} cannot be written, so the run cannot be asked: {error}")
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        answer = read_stacks(folder)
        if answer is not None and answer.asked == number:
            return StacksReport(status, answer)
        sleep(_POLL_S)
    status = read_status(folder)
    how = f"; the run is {status.state}" + (f": {status.why}" if status.why else "")
    return StacksReport(status, read_stacks(folder), f"no answer within {limit_s:g} s{how}")


def heading(one: RankStack) -> str:
    """Which process a stack is of, and what it does."""
    if one.pool == "driver":
        return f"--- the driver, on node {one.node}; waits for: {one.operation or 'nothing'}"
    role, doing = one.operation.partition(".")[0] or "+".join(one.roles), one.operation or "no operation"
    return f"--- {role} rank {one.rank} of pool {one.pool}, on node {one.node}: {doing}"


def _is_wanted(one: RankStack, role: str, rank: int | None) -> bool:
    roles = ("driver",) if one.pool == "driver" else one.roles
    return (not role or role in roles) and rank in (None, one.rank)


def _seen(status: RunStatus) -> list[str]:
    return [
        f"  {rank.pool} rank {rank.rank} on node {rank.node}: {rank.operation or 'no operation'}"
        f"{f' for {duration(rank.seconds)}' if rank.operation else ''}"
        for rank in status.ranks
    ]
