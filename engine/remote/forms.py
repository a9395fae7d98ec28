"""Requests for scores and their answers, in OpenRLHF's, slime's and our form, for clients and servers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Protocol = Literal["openrlhf", "slime", "rolemesh"]
VERSION = 1
"""Of our own form; both sides refuse another one."""

_MOST = 3.4e38  # rewards are float32
_KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}


class FormError(ValueError):
    """A body that is not of the form; the message says which key and sample, and what is there."""


@dataclass(frozen=True)
class Sample:
    """One sample to be scored, as text; its ids too where both sides have the same tokenizer.

    `id` is unique in its batch, and answers are matched by it.
    """

    id: str
    prompt: str
    response: str
    label: Any = None
    prompt_ids: tuple[int, ...] | None = None
    response_ids: tuple[int, ...] | None = None

    @property
    def query(self) -> str:
        """The whole text: the prompt followed by the response."""
        return self.prompt + self.response


@dataclass(frozen=True)
class Score:
    """A sample's score, always finite, and what else the server said about the sample."""

    id: str
    score: float
    extra: Mapping[str, Any] = field(default_factory=dict)


def request_body(protocol: Protocol, samples: Sequence[Sample]) -> dict[str, Any]:
    """The JSON body that asks for the samples' scores.

    Raises ValueError for no samples, two with one id, or several in slime's form, which holds one.
    """
    if not samples:
        raise ValueError("a request needs at least one sample")
    _unique([sample.id for sample in samples], ValueError)
    match protocol:
        case "rolemesh":
            return {"version": VERSION, "samples": [_our_sample(sample) for sample in samples]}
        case "openrlhf":
            return {
                "query": [sample.query for sample in samples],
                "prompts": [sample.prompt for sample in samples],
                "labels": [sample.label for sample in samples],
                "ids": [sample.id for sample in samples],
            }
        case "slime":
            if len(samples) > 1:
                raise ValueError(f"slime's form holds one sample per request, not {len(samples)}")
            return {name: getattr(samples[0], name) for name in ("prompt", "response", "label")}
    raise ValueError(f"protocol {protocol!r} is none of openrlhf, slime, rolemesh")


def read_answer(
    protocol: Protocol, body: Any, samples: Sequence[Sample], *, score_key: str | None = None
) -> list[Score]:
    """The samples' scores, in the samples' order, from the parsed JSON answer.

    They are matched by id where the answer has ids (our form always, and servers that send OpenRLHF's `ids`
    back), else by position. Where a score is a dict, `score_key` names the entry that counts; the others
    become extras.

    Raises FormError for a wrong number of scores, a missing, doubled or unknown id, a score that is not a
    finite number, or a dict without `score_key`.
    """
    match protocol:
        case "rolemesh":
            return _by_id(_our_scores(body, score_key), samples)
        case "openrlhf":
            return _openrlhf_scores(body, samples, score_key)
        case "slime":
            score, extra = _score(body, "the answer", score_key)
            return [Score(samples[0].id, score, extra)]
    raise ValueError(f"protocol {protocol!r} is none of openrlhf, slime, rolemesh")


def read_request(body: Any) -> tuple[Protocol, list[Sample]]:
    """The form of a parsed JSON request, told by its keys, and the samples in it.

    OpenRLHF's older requests have no prompts: the whole query counts as the response. Where there are
    prompts, the response is what follows the prompt in the query. Samples without ids get their position.

    Raises FormError.
    """
    _kind(body, dict, "the body")
    if "samples" in body:
        _version(body)
        listed = _kind(body["samples"], list, "samples")
        samples = [_read_our_sample(item, f"samples[{i}]") for i, item in enumerate(listed)]
        protocol: Protocol = "rolemesh"
    elif "query" in body or "queries" in body:
        protocol, samples = "openrlhf", _openrlhf_samples(body)
    elif "prompt" in body and "response" in body:
        prompt, response = (_kind(body[name], str, name) for name in ("prompt", "response"))
        return "slime", [Sample("0", prompt, response, body.get("label"))]
    else:
        raise FormError(
            f"the body has the keys {sorted(map(str, body))}; it needs `samples` (rolemesh), `query` or "
            "`queries` (openrlhf), or `prompt` and `response` (slime)"
        )
    if not samples:
        raise FormError("the request holds no samples")
    _unique([sample.id for sample in samples], FormError)
    return protocol, samples


def answer(protocol: Protocol, samples: Sequence[Sample], scores: Sequence[Score]) -> Any:
    """The JSON answer to a request of this form; the scores are matched to the samples by id.

    Slime's is a number, or a dict with `score` when there are extras.

    Raises FormError when scores are missing, doubled or unknown.
    """
    ordered = _by_id(scores, samples)
    match protocol:
        case "rolemesh":
            return {
                "version": VERSION,
                "scores": [
                    {"id": one.id, "score": one.score, **({"extra": dict(one.extra)} if one.extra else {})}
                    for one in ordered
                ],
            }
        case "openrlhf":
            names = sorted({name for one in ordered for name in one.extra})
            rewards = [one.score for one in ordered]
            return {
                "rewards": rewards,
                "scores": rewards,
                "extra_logs": {name: [one.extra.get(name) for one in ordered] for name in names},
                "ids": [one.id for one in ordered],
            }
        case "slime":
            (one,) = ordered
            return {**one.extra, "score": one.score} if one.extra else one.score
    raise ValueError(f"protocol {protocol!r} is none of openrlhf, slime, rolemesh")


def _our_sample(sample: Sample) -> dict[str, Any]:
    body = {"id": sample.id, "prompt": sample.prompt, "response": sample.response, "label": sample.label}
    ids = {"prompt_ids": sample.prompt_ids, "response_ids": sample.response_ids}
    return body | {name: list(value) for name, value in ids.items() if value is not None}


def _read_our_sample(item: Any, where: str) -> Sample:
    _kind(item, dict, where)
    lacking = [name for name in ("id", "prompt", "response") if name not in item]
    if lacking:
        raise FormError(f"{where} lacks {', '.join(lacking)}; it has {sorted(map(str, item))}")
    name, prompt, response = (_kind(item[key], str, f"{where}.{key}") for key in ("id", "prompt", "response"))
    prompt_ids, response_ids = (
        read_ids(item.get(key), f"{where}.{key}") for key in ("prompt_ids", "response_ids")
    )
    if (prompt_ids is None) != (response_ids is None):
        raise FormError(f"{where} has only one of prompt_ids and response_ids")
    return Sample(name, prompt, response, item.get("label"), prompt_ids, response_ids)


def read_ids(value: Any, where: str) -> tuple[int, ...] | None:
    """Token ids from JSON, None where there are none. Raises FormError unless whole and >= 0."""
    if value is None:
        return None
    for position, token_id in enumerate(_kind(value, list, where)):
        if type(token_id) is not int or token_id < 0:
            raise FormError(f"{where}[{position}] is {_shown(token_id)}, not a token id")
    return tuple(value)


def _our_scores(body: Any, score_key: str | None) -> list[Score]:
    _kind(body, dict, "the answer")
    _version(body)
    scores = []
    for i, item in enumerate(_kind(body.get("scores"), list, "scores")):
        where = f"scores[{i}]"
        _kind(item, dict, where)
        name = _kind(item.get("id"), str, f"{where}.id")
        if "score" not in item:
            raise FormError(f"{where} (sample {name}) has no score; it has {sorted(map(str, item))}")
        score, extra = _score(item["score"], f"the score of sample {name}", score_key)
        scores.append(Score(name, score, {**_kind(item.get("extra", {}), dict, f"{where}.extra"), **extra}))
    return scores


def _openrlhf_samples(body: Mapping[str, Any]) -> list[Sample]:
    key = "query" if "query" in body else "queries"
    queries = [body[key]] if isinstance(body[key], str) else _kind(body[key], list, key)
    columns: dict[str, list[Any]] = {}
    for name in ("prompts", "labels", "ids"):
        value = body.get(name)
        if value is None:
            continue
        columns[name] = [value] if isinstance(body[key], str) and not isinstance(value, list) else value
        _kind(columns[name], list, name)
        if len(columns[name]) != len(queries):
            raise FormError(f"{name} has {len(columns[name])} entries for {len(queries)} in {key}")
    samples = []
    for i, query in enumerate(queries):
        _kind(query, str, f"{key}[{i}]")
        prompt = _kind(columns["prompts"][i], str, f"prompts[{i}]") if "prompts" in columns else ""
        name = _kind(columns["ids"][i], str, f"ids[{i}]") if "ids" in columns else str(i)
        start = query.find(prompt)  # a bos token may stand before the prompt
        end = start + len(prompt) if start >= 0 else 0
        label = columns["labels"][i] if "labels" in columns else None
        samples.append(Sample(name, query[:end], query[end:], label))
    return samples


def _openrlhf_scores(body: Any, samples: Sequence[Sample], score_key: str | None) -> list[Score]:
    n = len(samples)
    logs: Mapping[str, Any] = {}
    ids: Any = None
    if isinstance(body, dict):
        if "rewards" not in body:
            raise FormError(f"the answer has no `rewards`; it has the keys {sorted(map(str, body))}")
        logs = _kind(body.get("extra_logs") or {}, dict, "extra_logs")
        ids, body = body.get("ids"), body["rewards"]
    rewards = body if isinstance(body, list) else [body]
    if len(rewards) != n:
        raise FormError(f"the answer holds {len(rewards)} rewards for {n} samples")
    for name, values in logs.items():
        if isinstance(values, list) and len(values) != n:
            raise FormError(f"extra_logs.{name} has {len(values)} entries for {n} samples")
    names = [sample.id for sample in samples] if ids is None else _kind(ids, list, "ids")
    if len(names) != n:
        raise FormError(f"ids has {len(names)} entries for {n} samples")
    scores = []
    for i, value in enumerate(rewards):
        score, extra = _score(value, f"rewards[{i}] (sample {names[i]})", score_key)
        logged = {key: values[i] if isinstance(values, list) else values for key, values in logs.items()}
        scores.append(Score(_kind(names[i], str, f"ids[{i}]"), score, {**logged, **extra}))
    return _by_id(scores, samples)


def _score(value: Any, where: str, score_key: str | None) -> tuple[float, dict[str, Any]]:
    """The finite number that `value` is or holds at `score_key`, and the other entries."""
    extra: dict[str, Any] = {}
    if isinstance(value, dict):
        if score_key is None or score_key not in value:
            named = "score_key names none" if score_key is None else f"none is score_key {score_key!r}"
            raise FormError(
                f"{where} is a dict with the keys {sorted(map(str, value))}, and {named}; "
                "set score_key to the one that is the score"
            )
        extra = dict(value)
        value = extra.pop(score_key)
        where += f"[{score_key!r}]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FormError(f"{where} is {_shown(value)}, not a number")
    if abs(value) > _MOST or math.isnan(value):  # a long integer is no float
        raise FormError(f"{where} is {_shown(value)}, not a finite number of float32")
    return float(value), extra


def _by_id(scores: Sequence[Score], samples: Sequence[Sample]) -> list[Score]:
    """The scores in the samples' order."""
    _unique([score.id for score in scores], FormError)
    found = {score.id: score for score in scores}
    asked = [sample.id for sample in samples]
    if missing := [name for name in asked if name not in found]:
        raise FormError(
            f"no score for {_some(missing)}: {len(scores)} scores came back for {len(asked)} samples"
        )
    if unknown := sorted(found.keys() - set(asked)):
        raise FormError(f"scores for {_some(unknown)}, which were not asked for")
    return [found[name] for name in asked]


def _unique(ids: Sequence[str], error: Callable[[str], Exception]) -> None:
    if doubled := sorted(name for name, n in Counter(ids).items() if n > 1):
        raise error(f"more than one entry for {_some(doubled)}")


def _version(body: Mapping[str, Any]) -> None:
    if body.get("version") != VERSION:
        raise FormError(f"version is {_shown(body.get('version'))}; this side speaks version {VERSION}")


def _kind(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        raise FormError(f"{where} is {_shown(value)}, not {_KINDS[kind]}")
    return value


def _some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"sample{'s' if len(names) > 1 else ''} {', '.join(names[:most])}{more}"


def _shown(value: Any, most: int = 60) -> str:
    """A value for a message, cut short; null as JSON has it."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= most else text[:most] + "..."
