"""The pairwise form of a judge: responses compared two by two, win rates as rewards."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rolemesh.engine.rewards import judge_template
from rolemesh.engine.rewards.failure import Failed
from rolemesh.engine.rewards.judge_answer import WINNER, read_choice
from rolemesh.engine.rewards.judge_forms import (
    Constraint,
    JudgeSample,
    Question,
    Result,
    given_label,
    json_form,
    object_schema,
)
from rolemesh.engine.rewards.judge_template import JudgeError


@dataclass(frozen=True)
class Pairwise:
    """Responses are compared two by two; the reward is a response's win rate, 0 to 1, a tie counting half.

    `against` "group": each sample meets others of its group (`uid`), all of them or, in a larger group,
    `opponents` of them: the next ones and the previous ones around the group, so that all meet as many.
    `against` "label": each sample meets its label, a reference answer.

    Each pair is asked in both orders, and both count half: a judge that prefers a position, not a response,
    makes a tie. Equal responses tie unasked. A pair whose answer in either order could not be had is left
    out; a sample left without any pair has no reward.

    Raises:
        JudgeError: `opponents` is not an even number of at least 2.
    """

    against: Literal["group", "label"] = "group"
    opponents: int = 8
    reasoning: bool = True
    default_template = judge_template.PAIRWISE
    pairs = True

    def __post_init__(self) -> None:
        if self.opponents < 2 or self.opponents % 2:
            raise JudgeError(f"judge opponents: {self.opponents} must be an even number, at least 2")

    @property
    def whole_groups(self) -> bool:
        return self.against == "group"

    def answer_form(self, constraint: Constraint) -> str:
        """The sentence that says how to answer."""
        if constraint == "regex":
            return "Answer with A, B or tie only."
        return json_form(self.reasoning, {WINNER: '"A", "B" or "tie"'})

    def schema(self) -> dict[str, Any]:
        """JSON schema of an answer."""
        return object_schema(self.reasoning, {WINNER: {"type": "string", "enum": ["A", "B", "tie"]}})

    def regex(self) -> str:
        """A pattern that answers match."""
        return "(A|B|tie)"

    def read(self, text: str) -> str:
        """ "A", "B" or "tie". Raises AnswerError."""
        return read_choice(text)

    def questions(self, samples: Sequence[JudgeSample]) -> list[Question]:
        """Two for each pair, the second with A and B exchanged.

        Raises:
            JudgeError: a sample that has nothing to be compared with.
        """
        questions = []
        for first, second, where in self._asked(samples):
            sample = samples[first]
            texts = sample.response, self._other(samples, first, second)
            # The label is the other response here, and shown as such only.
            values = {"prompt": sample.prompt} | (given_label(sample) if self.against == "group" else {})
            for a, b in (texts, texts[::-1]):
                questions.append(Question(values | {"response_a": a, "response_b": b}, where))
        return questions

    def results(self, samples: Sequence[JudgeSample], answers: Sequence[Any]) -> list[Result | Failed]:
        """Each sample's win rate, with `judge_pairs` (counted) and `judge_flips` (share of the asked pairs in
        which the two orders named the same position) beside it."""
        points: list[list[float]] = [[] for _ in samples]
        flips: list[list[float]] = [[] for _ in samples]
        failures: dict[int, Failed] = {}
        asked: dict[tuple[int, int | None], Sequence[Any]] = {}
        for number, (first, second, _) in enumerate(self._asked(samples)):
            asked[first, second] = answers[2 * number : 2 * number + 2]
        for first, second in self._matches(samples):
            both = [row for row in (first, second) if row is not None]
            orders = asked.get((first, second), ["tie", "tie"])
            failed = next((answer for answer in orders if isinstance(answer, Failed)), None)
            if failed is not None:
                failures |= dict.fromkeys(both, failed)
                continue
            share = (_POINTS[orders[0]] + 1 - _POINTS[orders[1]]) / 2
            for row, points_won in zip(both, (share, 1 - share), strict=False):
                points[row].append(points_won)
                if (first, second) in asked:
                    flips[row].append(orders[0] == orders[1] != "tie")
        return [
            Result(_mean(won), {"judge_pairs": len(won), "judge_flips": _mean(flipped) if flipped else None})
            if won
            else failures[row]
            for row, (won, flipped) in enumerate(zip(points, flips, strict=True))
        ]

    def _asked(self, samples: Sequence[JudgeSample]) -> list[tuple[int, int | None, str]]:
        """The matches of different responses, and their names."""
        asked = []
        for first, second in self._matches(samples):
            if samples[first].response == self._other(samples, first, second):
                continue
            other = "its label" if second is None else samples[second].name
            asked.append((first, second, f"{samples[first].name} and {other}"))
        return asked

    def _other(self, samples: Sequence[JudgeSample], first: int, second: int | None) -> str:
        return samples[second].response if second is not None else str(samples[first].label)

    def _matches(self, samples: Sequence[JudgeSample]) -> list[tuple[int, int | None]]:
        """The rows that meet; None is the label."""
        if self.against == "label":
            if missing := [sample.name for sample in samples if sample.label is None]:
                raise JudgeError(f"pairwise judge against the label: {missing[0]} has none")
            return [(row, None) for row in range(len(samples))]
        groups: dict[Hashable, list[int]] = {}
        for row, sample in enumerate(samples):
            groups.setdefault(sample.uid, []).append(row)
        for uid, rows in groups.items():
            if uid is None or len(rows) == 1:
                raise JudgeError(
                    f"pairwise judge: {samples[rows[0]].name} "
                    + ("has no uid" if uid is None else "is alone in its group")
                    + "; sample at least 2 responses per prompt, or compare against the label"
                )
        return [
            (rows[a], rows[b]) for rows in groups.values() for a, b in round_robin(len(rows), self.opponents)
        ]


def round_robin(n: int, opponents: int) -> list[tuple[int, int]]:
    """Pairs of `n` members in which each meets `opponents` others (even), or all where there are no more."""
    if n - 1 <= opponents:
        return [(a, b) for a in range(n) for b in range(a + 1, n)]
    return [(a, (a + step) % n) for step in range(1, opponents // 2 + 1) for a in range(n)]


_POINTS = {"A": 1.0, "B": 0.0, "tie": 0.5}  # of the response shown as A


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
