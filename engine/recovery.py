"""A run that loses workers goes on from its newest checkpoint: how often it may, and what is told of it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rolemesh.placement.appending import append_whole

RECOVERIES_FILE = "recoveries.jsonl"


class WorkersLost(RuntimeError):
    """Processes of a run are gone, or hang: `cause` says which and how. `done` steps were trained then.

    `settle` ends what the driver still does with them, once they are killed.
    """

    def __init__(self, cause: Exception, done: int, settle: Callable[[], None] = lambda: None) -> None:
        super().__init__(str(cause))
        self.cause, self.done, self.settle = cause, done, settle


@dataclass(frozen=True)
class Recovery:
    """One loss of workers while step `step` was trained, and what came of it.

    `from_step` is the step after which training went on (0: the first models; None: the workers did not come
    up again), `replayed` how many steps were trained a second time, `seconds` what passed in between.
    `placed` says how roles were placed anew, where they were.
    """

    time: str
    step: int
    lost: str
    from_step: int | None
    replayed: int
    seconds: float
    placed: str | None = None

    def __str__(self) -> str:
        what = f"{self.time} in step {self.step}: {self.lost}"
        if self.from_step is None:
            return f"{what}; not recovered"
        placed = f", placed anew: {self.placed}" if self.placed else ""
        return f"{what}; went on after step {self.from_step}, {self.seconds:.0f} s later{placed}"


class Recoveries:
    """Counts a run's recoveries and writes each as a line of `recoveries.jsonl` in the run folder.

    More than `limit` losses end the run. Lost devices may take `node_wait_s` to come back; with `elastic` the
    run is then placed on those that are left.
    """

    def __init__(
        self,
        folder: Path,
        limit: int,
        *,
        elastic: bool = False,
        node_wait_s: float = 300.0,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.limit, self.elastic, self.node_wait_s = limit, elastic, node_wait_s
        self.count = 0
        self._file, self.tell = folder / RECOVERIES_FILE, tell
        self._lost: WorkersLost | None = None
        self._since_s, self._time = 0.0, ""
        self._placed: str | None = None
        self._replayed, self._seconds = 0, 0.0

    @property
    def under_way(self) -> bool:
        """Whether workers were lost and have not come up again."""
        return self._lost is not None

    @property
    def done(self) -> int:
        """The steps that were trained when workers were lost."""
        return 0 if self._lost is None else self._lost.done

    def lost(self, lost: WorkersLost) -> None:
        """Begin a recovery. Raises the cause, with what it came to, where there were too many."""
        if self._lost is not None:
            self._write(None, 0)
        if self.count == self.limit:
            lost.cause.add_note(
                f"recovered {self.limit} times before; run.recoveries allows no more"
                if self.limit
                else "run.recoveries is 0: the first loss ends the run"
            )
            raise lost.cause from None
        self.count += 1
        lost.cause.__cause__ = lost.cause.__context__ = None  # their frames hold the lost trainer's batches
        self._lost = WorkersLost(lost.cause.with_traceback(None), lost.done)
        self._since_s = time.monotonic()
        self._time, self._placed = time.strftime("%Y-%m-%d %H:%M:%S"), None
        self.tell(f"lost workers in step {lost.done + 1}: {lost.cause}")
        self.tell(f"recovery {self.count} of at most {self.limit}: starting the workers again")

    def placed(self, how: str) -> None:
        """The run is placed anew, on what is left of the cluster."""
        self._placed = how
        self.tell(f"recovery {self.count}: placed on what is left: {how}")

    def restored(self, done: int) -> None:
        """Workers and trainer are as after step `done`; nothing happens where nothing was lost."""
        if self._lost is None:
            return
        replayed = max(0, self._lost.done - done)
        self._replayed += replayed
        self._write(done, replayed)
        where = f"the checkpoint of step {done}" if done else "the first models, for want of a checkpoint"
        first, last = done + 1, max(done, self._lost.done) + 1
        again = f"step {first} is" if first == last else f"steps {first} to {last} are"
        self.tell(f"recovery {self.count}: back at {where}; {again} trained again")
        self._lost = None

    def metrics(self) -> dict[str, float]:
        """So far: recoveries, steps trained a second time, seconds from losses to training again."""
        if not self.count:
            return {}
        return {
            "recovery/count": float(self.count),
            "recovery/replayed_steps": float(self._replayed),
            "recovery/seconds": self._seconds,
        }

    def _write(self, from_step: int | None, replayed: int) -> None:
        assert self._lost is not None
        seconds = time.monotonic() - self._since_s
        self._seconds += seconds
        lost = str(self._lost.cause).partition("\n")[0]
        entry = Recovery(
            self._time, self._lost.done + 1, lost, from_step, replayed, round(seconds, 1), self._placed
        )
        with contextlib.suppress(OSError):  # a full disk is no reason to end
            append_whole(self._file, json.dumps(asdict(entry)) + "\n")


def read_recoveries(folder: Path) -> Iterator[Recovery]:
    """The recoveries of the run in `folder`; lines that a crash cut off are left out."""
    try:
        lines = (folder / RECOVERIES_FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            content: Mapping[str, object] = json.loads(line)
            yield Recovery(**content)  # type: ignore[arg-type]
        except (ValueError, TypeError):
            continue
