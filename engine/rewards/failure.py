"""What becomes of samples that a reward service could not score."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rolemesh.engine.rewards.pool import RewardError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failed:
    """A sample without a score; `why` says what was asked of whom, and what came back."""

    why: str


@dataclass(frozen=True)
class Decided:
    """What counts for each sample of a batch.

    Attributes:
        scores: float64 [b]; 0 where dropped.
        dropped: bool [b]; these rows are in no loss, statistic or mini-batch.
        metrics: `reward/failed`, `reward/dropped`, `reward/defaulted` (samples), `reward/dropped_groups`.
    """

    scores: np.ndarray
    dropped: np.ndarray
    metrics: dict[str, float]


@dataclass
class FailurePolicy:
    """`raise` ends the run, `drop_group` leaves the failed samples' whole groups out, `value` scores them so.

    Args:
        do: which of the three.
        value: the score, for `value`.
        stop_above: the run ends when more than this share of samples failed, whatever `do` is.
        window: of how many samples, at least: a share of the latest `window` ones, with those not yet seen
            counted as scored. 0: of the batch at hand. Where batches come in parts, the samples of a step.

    Raises:
        ValueError: a share outside [0, 1], or a value that is missing, not finite, or of no use.
    """

    do: Literal["raise", "drop_group", "value"]
    value: float | None = None
    stop_above: float = 0.02
    window: int = 0
    _recent: deque[bool] = field(default_factory=deque, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.do not in ("raise", "drop_group", "value"):
            raise ValueError(f"on_failure is {self.do!r}; choose raise, drop_group or value")
        if (self.do == "value") != (self.value is not None):
            raise ValueError(
                f"on_failure {self.do} with value {self.value}: a value goes with value, and only it"
            )
        if self.value is not None and not np.isfinite(self.value):
            raise ValueError(f"on_failure.value is {self.value}; give a finite number")
        if not 0 <= self.stop_above <= 1:
            raise ValueError(f"on_failure.stop_above is {self.stop_above}; a share, from 0 to 1")

    def apply(
        self, outcomes: Sequence[float | Failed], uids: Sequence[Hashable] | np.ndarray | None = None
    ) -> Decided:
        """Decide for a batch of b samples; `uids` [b] name their groups, and `drop_group` needs them.

        Raises:
            RewardError: a sample failed and `do` is `raise`, or too many failed.
        """
        failed = np.array([isinstance(outcome, Failed) for outcome in outcomes], dtype=bool)
        reasons = [outcome.why for outcome in outcomes if isinstance(outcome, Failed)]
        self._check(failed, reasons)
        scores = np.array([0.0 if isinstance(o, Failed) else o for o in outcomes], dtype=np.float64)
        dropped = np.zeros(len(outcomes), dtype=bool)
        groups: set[Hashable] = set()
        if self.do == "value":
            scores[failed] = self.value
        elif failed.any():
            if uids is None:
                raise RewardError(
                    "on_failure drop_group needs column uid, the samples' groups; use value or raise"
                )
            groups = {uids[row] for row in np.flatnonzero(failed)}
            dropped = np.array([uid in groups for uid in uids], dtype=bool)
            scores[dropped] = 0.0
        if reasons:
            log.warning(
                "%d of %d samples got no score (%s); the first: %s",
                len(reasons),
                len(outcomes),
                self,
                reasons[0],
            )
        metrics = {
            "reward/failed": float(failed.sum()),
            "reward/defaulted": float(failed.sum()) if self.do == "value" else 0.0,
            "reward/dropped": float(dropped.sum()),
            "reward/dropped_groups": float(len(groups)),
        }
        return Decided(scores, dropped, metrics)

    def __str__(self) -> str:
        return f"value: {self.value:g}" if self.value is not None else self.do

    def _check(self, failed: np.ndarray, reasons: Sequence[str]) -> None:
        self._recent.extend(failed.tolist())
        of = max(self.window, len(failed))
        while len(self._recent) > of:
            self._recent.popleft()
        if not reasons:
            return
        n = len(reasons)
        if self.do == "raise":
            raise RewardError(f"{n} of {len(failed)} samples got no score{_listed(reasons)}")
        recent = sum(self._recent)
        if recent > self.stop_above * of:
            raise RewardError(
                f"{recent} of {of} samples got no score, {recent / of:.1%}; on_failure.stop_above allows "
                f"{self.stop_above:.1%}{_listed(reasons)}"
            )


def _listed(reasons: Sequence[str], most: int = 3) -> str:
    """Different reasons, the commonest first."""
    ordered = sorted(set(reasons), key=lambda why: (-reasons.count(why), why))
    more = f"\n  and {len(ordered) - most} more reasons" if len(ordered) > most else ""
    return ":" + "".join(f"\n  {reasons.count(why)} x {why}" for why in ordered[:most]) + more
