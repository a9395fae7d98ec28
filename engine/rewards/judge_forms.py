"""What a judge is asked and how its answers become rewards: by one score, or by a rubric's several.

The third form, pair by pair, is in judge_pairs.py.
"""

import json
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rolemesh.engine.rewards import judge_template
from rolemesh.engine.rewards.failure import Failed
from rolemesh.engine.rewards.judge_answer import Scale, read_scores
from rolemesh.engine.rewards.judge_template import JudgeError

Constraint = Literal["json_schema", "regex", "none"]
REASONING_CHARS = 1000


@dataclass(frozen=True)
class JudgeSample:
    """One sample: `name` says which in errors, `label` is the reference answer or None, `uid` its group."""

    name: str
    prompt: str
    response: str
    label: Any = None
    uid: Hashable | None = None


@dataclass(frozen=True)
class Question:
    """What the template gets for one question, and which sample it is about."""

    values: Mapping[str, Any]
    where: str


@dataclass(frozen=True)
class Result:
    """A sample's reward and what is kept beside it."""

    score: float
    extra: Mapping[str, Any] = field(default_factory=dict)


class JudgeForm(Protocol):
    """A way of asking. `read` turns one answer's text into a value; `results` all answers into rewards.

    In `results`, answers are in the order of `questions`; one that could not be had is `Failed`, and so is
    the result of a sample that has no reward for that reason.
    """

    @property
    def default_template(self) -> str: ...
    @property
    def pairs(self) -> bool:
        """Whether the template shows two responses."""
        ...

    @property
    def whole_groups(self) -> bool:
        """Whether the samples of one group must come in one batch."""
        ...

    def answer_form(self, constraint: Constraint) -> str: ...
    def schema(self) -> dict[str, Any]: ...
    def regex(self) -> str: ...
    def questions(self, samples: Sequence[JudgeSample]) -> list[Question]: ...
    def read(self, text: str) -> Any: ...
    def results(self, samples: Sequence[JudgeSample], answers: Sequence[Any]) -> list[Result | Failed]: ...


@dataclass(frozen=True)
class Criterion:
    """One criterion of a rubric: its share of the score, and what it means."""

    weight: float = 1.0
    text: str = ""


@dataclass(frozen=True)
class Scores:
    """Each response gets a score by each criterion; the reward is their weighted mean, on the same scale.

    Without criteria it is the pointwise form: one score. `reasoning`: the judge writes why before it scores.

    Raises:
        JudgeError: a weight that is not positive and finite.
    """

    scale: Scale = field(default_factory=Scale)
    criteria: Mapping[str, Criterion] = field(default_factory=dict)
    reasoning: bool = True
    pairs = False
    whole_groups = False

    def __post_init__(self) -> None:
        wrong = {name: c.weight for name, c in self.criteria.items() if not 0 < c.weight < math.inf}
        if wrong:
            raise JudgeError(f"judge criteria: weights must be positive; got {wrong}")
        if "reasoning" in self.criteria:
            raise JudgeError("judge criteria: 'reasoning' names the judge's reasoning; rename the criterion")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.criteria) or ("score",)

    @property
    def default_template(self) -> str:
        return judge_template.RUBRIC if self.criteria else judge_template.POINTWISE

    def answer_form(self, constraint: Constraint) -> str:
        """The sentence that says how to answer."""
        if constraint == "regex":
            lines = ", ".join(f"{name}: NUMBER" for name in self.names)
            return f"Answer in one line each: {lines}." if self.criteria else "Answer with the number only."
        return json_form(self.reasoning, dict.fromkeys(self.names, "NUMBER"))

    def schema(self) -> dict[str, Any]:
        """JSON schema of an answer."""
        scale = self.scale
        number: dict[str, Any] = (
            {"type": "number", "minimum": scale.low, "maximum": scale.high}
            if scale.step is None
            else {"enum": scale.values()}
        )
        return object_schema(self.reasoning, dict.fromkeys(self.names, number))

    def regex(self) -> str:
        """A pattern that answers match; without reasoning. Values outside the scale are left to `read`."""
        scale = self.scale
        if scale.step is not None:
            number = "(" + "|".join(re.escape(str(value)) for value in scale.values()) + ")"
        elif scale.low >= 0 and scale.low == int(scale.low) and scale.high == int(scale.high) <= 100:
            below = "|".join(str(value) for value in range(int(scale.low), int(scale.high)))
            number = rf"(({below})(\.[0-9]{{1,3}})?|{int(scale.high)})"
        else:
            digits = len(str(int(max(abs(scale.low), abs(scale.high)))))
            number = rf"-?[0-9]{{1,{digits}}}(\.[0-9]{{1,3}})?"
        return "\n".join(f"{re.escape(name)}: {number}" for name in self.criteria) or number

    def questions(self, samples: Sequence[JudgeSample]) -> list[Question]:
        """One for each sample."""
        texts = {name: criterion.text for name, criterion in self.criteria.items()}
        common = {"low": f"{self.scale.low:g}", "high": f"{self.scale.high:g}", "criteria": texts}
        return [
            Question(common | {"prompt": s.prompt, "response": s.response} | given_label(s), s.name)
            for s in samples
        ]

    def read(self, text: str) -> dict[str, float]:
        """Each criterion's score (`score` without criteria). Raises AnswerError."""
        return read_scores(text, self.names, self.scale)

    def results(self, samples: Sequence[JudgeSample], answers: Sequence[Any]) -> list[Result | Failed]:
        """The weighted mean of each answer; each criterion's score as `judge_NAME` beside it."""
        return [answer if isinstance(answer, Failed) else self._result(answer) for answer in answers]

    def _result(self, scores: Mapping[str, float]) -> Result:
        if not self.criteria:
            return Result(scores["score"])
        weights = {name: criterion.weight for name, criterion in self.criteria.items()}
        total = math.fsum(weights[name] * scores[name] for name in weights) / math.fsum(weights.values())
        return Result(total, {f"judge_{name}": score for name, score in scores.items()})


def given_label(sample: JudgeSample) -> dict[str, Any]:
    """The label for the template; not there, rather than None, where the sample has none."""
    return {} if sample.label is None else {"label": sample.label}


def json_form(reasoning: bool, values: Mapping[str, str]) -> str:
    """The sentence that asks for JSON with these entries."""
    why = {"reasoning": '"WHY, IN AT MOST THREE SENTENCES"'} if reasoning else {}
    body = ", ".join(f"{json.dumps(name)}: {value}" for name, value in {**why, **values}.items())
    return f"Answer with JSON only: {{{body}}}"


def object_schema(reasoning: bool, properties: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object with exactly these entries, the reasoning first."""
    why = {"reasoning": {"type": "string", "maxLength": REASONING_CHARS}} if reasoning else {}
    properties = {**why, **properties}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
