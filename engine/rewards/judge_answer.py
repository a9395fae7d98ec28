"""What a judge wrote, read as scores on a stated scale or as a choice between two responses.

Tolerant of the form (a bare number, a quoted one, `Score: 0.4/1`, JSON with or without prose around it),
strict about the meaning: a text that could mean two scores, or one outside the scale, is no answer.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_NUMBER = r"[-+]?(?>\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
# What may follow a number: no unit, no further digits ("0,7", "0-1"), no denominator but the one read.
_END = r"(?![\w%]|[.,:-]\d|\s*(?:/|out\s+of\b))"
_SCORE = rf"(?P<value>{_NUMBER})(?:\s*(?:/|out\s+of)\s*(?P<top>{_NUMBER}))?{_END}"
_MARKS = r"[\s\"'`*_\[]*"  # quotes, Markdown, [[...]]
_CHOICE = r"(?i:(?:response|answer|assistant)\s+)?(?P<choice>A|B|(?i:tie|draw))\b"
WINNER = "winner"


class AnswerError(ValueError):
    """A judge's answer that is no score, or no choice; says why and shows the text."""


@dataclass(frozen=True)
class Scale:
    """The scores a judge may give: `low` to `high`, in steps of `step` where there is one.

    `step` bounds what a server that constrains answers lets the judge write; any value of the scale is read.
    `clamp`: a value outside is taken as the nearer end; otherwise it is an error.

    Raises:
        ValueError: bounds that are not finite or not ascending, or a step that does not divide the scale.
    """

    low: float = 0.0
    high: float = 1.0
    step: float | None = None
    clamp: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"judge scale: [{self.low}, {self.high}] must be two finite ascending numbers")
        if self.step is not None:
            steps = (self.high - self.low) / self.step if self.step > 0 else math.nan
            if not (steps <= 1000 and abs(steps - round(steps)) < 1e-6):
                raise ValueError(
                    f"judge scale: step {self.step} does not cut [{self.low}, {self.high}] into at most "
                    "1000 whole steps"
                )

    def values(self) -> list[float]:
        """Every score of a scale with steps, ascending; whole numbers as integers."""
        if self.step is None:
            raise ValueError("a scale without step has no list of values")
        count = round((self.high - self.low) / self.step)
        values = [round(self.low + index * self.step, 10) for index in range(count + 1)]
        return [int(value) if value == int(value) else value for value in values]

    def place(self, value: float) -> float:
        """`value` if it is on the scale, the nearer end with `clamp`.

        Raises:
            AnswerError: it is not finite, or outside and not clamped.
        """
        if not math.isfinite(value):
            raise AnswerError(f"{value} is not a finite number")
        if self.low <= value <= self.high:
            return value
        if not self.clamp:
            raise AnswerError(f"{value:g} is outside the scale {self.low:g} to {self.high:g}")
        return min(max(value, self.low), self.high)


def read_scores(text: str, names: Sequence[str], scale: Scale) -> dict[str, float]:
    """A score for each of `names`: of JSON's keys, or of lines such as `NAME: 0.4`, `NAME: 4/5`.

    With one name the whole text may be the number, quoted or not, or hold it as `[[0.4]]`. Names are
    compared without regard to case, spaces and underscores. `a/b` is read where b is the top of the scale.

    Raises:
        AnswerError: a score is missing, doubled with another value, not a number, or not on the scale.
    """
    with _showing(text):
        answer = _final_answer(text)
        whole = _whole_json(answer)
        if len(names) == 1 and isinstance(whole, str | int | float):
            return {names[0]: _score(whole, scale)}
        objects = [whole] if isinstance(whole, dict) else _objects(answer)
        if objects:
            return _agreeing([_scores_of(found, names, scale) for found in _with_any(objects, names)])
        bare = re.fullmatch(rf"{_MARKS}{_SCORE}[\s\"'`*_\].]*", answer)
        if len(names) == 1 and bare:
            return {names[0]: _matched(bare, scale)}
        return {name: _labelled_score(answer, name, scale, alone=len(names) == 1) for name in names}


def read_choice(text: str) -> str:
    """Which response a judge prefers: "A", "B" or "tie".

    Read from JSON's key `winner`, from `Winner: A`, from `[[A]]`, or from a text that is nothing else.

    Raises:
        AnswerError: there is none, or there are two.
    """
    with _showing(text):
        answer = _final_answer(text)
        whole = _whole_json(answer)
        objects = [whole] if isinstance(whole, dict) else _objects(answer)
        if objects:
            found = [_choice(_lookup(item, WINNER)) for item in _with_any(objects, [WINNER])]
        elif isinstance(whole, str) or re.fullmatch(rf"{_MARKS}{_CHOICE}[\s\"'`*_\].]*", answer):
            found = [_choice(whole if isinstance(whole, str) else answer.strip(" \n\t\"'`*_[]."))]
        else:
            marked = re.finditer(rf"\[\[\s*{_CHOICE}\s*\]\]", answer)
            labelled = re.finditer(rf"(?i:\bwinner\b){_MARKS}(?:[:=>]|is\b){_MARKS}{_CHOICE}", answer)
            found = [_choice(match["choice"]) for match in (*marked, *labelled)]
        return _agreeing(found, "no winner")


@contextmanager
def _showing(text: str) -> Iterator[None]:
    """Adds the judge's text to an AnswerError."""
    try:
        yield
    except AnswerError as error:
        shown = text if len(text) <= 200 else f"{text[:120]} ... {text[-70:]}"
        raise AnswerError(f"{error}: the judge wrote {shown!r}") from None


def _final_answer(text: str) -> str:
    """The text without the model's thoughts, which may hold scores it weighs."""
    text = text.strip()
    if not text:
        raise AnswerError("the answer is empty")
    if _whole_json(text) is not None:  # "</think>" in there is a quotation
        return text
    if text.startswith("<think>") and "</think>" not in text:
        raise AnswerError("the answer ends before the model's thoughts do")
    text = text.rpartition("</think>")[2].strip()
    if not text:
        raise AnswerError("there is nothing after the model's thoughts")
    return text


def _whole_json(text: str) -> Any:
    """The text, or what its code fence holds, as JSON; None where it is none."""
    fenced = re.fullmatch(r"\s*```(?:json)?\s*(.*?)\s*```\s*", text, re.DOTALL)
    try:
        return json.loads(fenced[1] if fenced else text, object_pairs_hook=_single_keys)
    except AnswerError:
        raise
    except (ValueError, RecursionError):  # a number of thousands of digits is a plain ValueError
        return None


def _objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects in a text, outermost only. Raises AnswerError where there is but a broken one."""
    decoder = json.JSONDecoder(object_pairs_hook=_single_keys)
    found: list[dict[str, Any]] = []
    position, broken = 0, False
    while (start := text.find("{", position)) >= 0:
        try:
            value, position = decoder.raw_decode(text, start)
            found.append(value)
        except AnswerError:
            raise
        except (ValueError, RecursionError):
            position = start + 1
            broken = broken or re.match(r"\{\s*(\"|$)", text[start : start + 100]) is not None
    if broken and not found:
        raise AnswerError("the JSON is broken")
    return found


def _single_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    doubled = sorted({key for key in keys if keys.count(key) > 1})
    if doubled:
        raise AnswerError(f"the JSON has {doubled} twice")
    return dict(pairs)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()


def _lookup(item: Mapping[str, Any], name: str) -> Any:
    """The value under `name`; None where there is none."""
    return next((value for key, value in item.items() if _plain(key) == _plain(name)), None)


def _with_any(objects: list[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """The objects that have one of the keys."""
    wanted = [found for found in objects if any(_lookup(found, name) is not None for name in names)]
    if not wanted:
        keys = sorted({str(key) for found in objects for key in found})
        raise AnswerError(f"the JSON has no {' or '.join(map(repr, names))}; it has {keys}")
    return wanted


def _scores_of(item: Mapping[str, Any], names: Sequence[str], scale: Scale) -> dict[str, float]:
    missing = [name for name in names if _lookup(item, name) is None]
    if missing:
        raise AnswerError(f"the JSON has no {missing}")
    return {name: _score(_lookup(item, name), scale) for name in names}


def _score(value: Any, scale: Scale) -> float:
    """A JSON value as a score: a number, a string that holds one, or an object with `score`."""
    match value:
        case bool():
            raise AnswerError(f"{value} is not a number")
        case int() | float():
            return scale.place(float(value) if abs(value) < 1e300 else math.inf)
        case str() if matched := re.fullmatch(rf"\s*{_SCORE}\s*", value):
            return _matched(matched, scale)
        case dict() if _lookup(value, "score") is not None:
            return _score(_lookup(value, "score"), scale)
    raise AnswerError(f"{value!r} is not a number")


def _matched(match: re.Match[str], scale: Scale) -> float:
    """The number of a match of `_SCORE`."""
    if match["top"] is not None and float(match["top"]) != scale.high:
        raise AnswerError(f"a score out of {match['top']} on a scale up to {scale.high:g}")
    return scale.place(float(match["value"]))


def _labelled_score(text: str, name: str, scale: Scale, *, alone: bool) -> float:
    """The score after `name:` in prose, or of `[[0.4]]` where only one score is asked."""
    label = r"[\s_-]+".join(map(re.escape, _plain(name).split(" ")))
    separator = rf"[\"'`*_\]]*(?:\s*\([^)\n]*\))?{_MARKS}(?:[:=>]|is\b){_MARKS}"
    matches = list(re.finditer(rf"(?i)(?<!\w){label}(?!\w){separator}{_SCORE}", text))
    if alone:
        matches += re.finditer(rf"\[\[\s*{_SCORE}\s*\]\]", text)
    return _agreeing([_matched(match, scale) for match in matches], f"no {name!r} with a number")


def _choice(value: Any) -> str:
    match = re.fullmatch(_CHOICE, value.strip()) if isinstance(value, str) else None
    if not match:
        raise AnswerError(f"{value!r} is not A, B or tie")
    return match["choice"] if match["choice"] in ("A", "B") else "tie"


def _agreeing(found: list[Any], none: str = "nothing was found") -> Any:
    """What was found, if it is one thing."""
    if not found:
        raise AnswerError(none)
    if any(item != found[0] for item in found):
        raise AnswerError(f"the answer could mean {' or '.join(map(str, found))}")
    return found[0]
