"""Requests for log-probs of given token ids and their answers, in JSON or binary, for clients and servers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rolemesh.engine.remote.binary import CONTENT_TYPE, decode, encode
from rolemesh.engine.remote.forms import VERSION, FormError

JSON_TYPE = "application/json"


@dataclass(frozen=True, eq=False)
class Tokens:
    """One sequence: `input_ids` int64 [length] unpadded, whose last `response_length` are the response.

    Raises FormError when there is no token before the response, or no token at all.
    """

    id: str
    input_ids: np.ndarray
    response_length: int

    def __post_init__(self) -> None:
        length, n = len(self.input_ids), self.response_length
        if length == 0 or not 0 <= n < length:
            raise FormError(
                f"sample {self.id} has {length} input_ids and a response_length of {n}; "
                "a token is needed before the response"
            )


def log_probs_request(
    samples: Sequence[Tokens], temperature: float = 1.0, *, binary: bool = True
) -> tuple[bytes, str]:
    """Body and content type that ask for the log-prob of every response token."""
    header: dict[str, Any] = {"version": VERSION, "temperature": temperature}
    if not binary:
        listed = [
            {"id": one.id, "input_ids": one.input_ids.tolist(), "response_length": one.response_length}
            for one in samples
        ]
        return json.dumps({**header, "samples": listed}).encode(), JSON_TYPE
    header["ids"] = [one.id for one in samples]
    arrays = {
        "input_ids": np.concatenate([one.input_ids for one in samples]).astype(np.int32),
        "lengths": np.array([len(one.input_ids) for one in samples], np.int32),
        "response_lengths": np.array([one.response_length for one in samples], np.int32),
    }
    return encode(header, arrays), CONTENT_TYPE


def read_log_probs_request(content: bytes, content_type: str) -> tuple[list[Tokens], float]:
    """The sequences and the temperature. Raises FormError."""
    if is_binary(content_type):
        header, arrays = decode(content)
        _version(header)
        ids, input_ids = header.get("ids"), _array(arrays, "input_ids", np.integer)
        lengths, n_responses = (_array(arrays, name, np.integer) for name in ("lengths", "response_lengths"))
        rows = _split(ids, input_ids.astype(np.int64), lengths, "input_ids")
        if len(n_responses) != len(rows):
            raise FormError(f"response_lengths has {len(n_responses)} entries for {len(rows)} ids")
        samples = [Tokens(*row, int(n)) for row, n in zip(rows, n_responses, strict=True)]
        temperature = header.get("temperature", 1.0)
    else:
        body = _json(content)
        _version(body)
        listed = body.get("samples")
        if not isinstance(listed, list):
            raise FormError(f"samples is {type(listed).__name__}, not a list")
        samples = [_tokens(item, f"samples[{i}]") for i, item in enumerate(listed)]
        temperature = body.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not temperature > 0:
        raise FormError(f"temperature is {temperature!r}; it must be above 0")
    if not samples:
        raise FormError("the request holds no samples")
    _distinct([one.id for one in samples])
    return samples, float(temperature)


def log_probs_answer(
    samples: Sequence[Tokens], log_probs: Sequence[np.ndarray], *, binary: bool
) -> tuple[bytes, str]:
    """Body and content type of the answer: float32 [response_length] of each sample, all finite.

    Raises FormError naming the sample and the response position of a value that is not finite.
    """
    for one, values in zip(samples, log_probs, strict=True):
        check_log_probs(one, values)
    if binary:
        arrays = {
            "log_probs": np.concatenate(log_probs).astype(np.float32),
            "lengths": np.array([len(values) for values in log_probs], np.int32),
        }
        return encode({"version": VERSION, "ids": [one.id for one in samples]}, arrays), CONTENT_TYPE
    listed = [
        {"id": one.id, "log_probs": values.tolist()} for one, values in zip(samples, log_probs, strict=True)
    ]
    return json.dumps({"version": VERSION, "log_probs": listed}, allow_nan=False).encode(), JSON_TYPE


def read_log_probs_answer(content: bytes, content_type: str, samples: Sequence[Tokens]) -> list[np.ndarray]:
    """float32 [response_length] of each sample, in the samples' order, matched by id.

    Raises FormError for missing, doubled or unknown ids, a wrong length, or a value that is null or not
    finite (the sample and the response position are named).
    """
    if is_binary(content_type):
        header, arrays = decode(content)
        _version(header)
        lengths = _array(arrays, "lengths", np.integer)
        rows = _split(header.get("ids"), _array(arrays, "log_probs", np.floating), lengths, "log_probs")
    else:
        rows = _json_rows(_json(content))
    _distinct([name for name, _ in rows])
    found = dict(rows)
    asked = [one.id for one in samples]
    if missing := [name for name in asked if name not in found]:
        raise FormError(f"no log_probs for {len(missing)} of {len(asked)} samples, the first is {missing[0]}")
    if unknown := sorted(found.keys() - set(asked)):
        raise FormError(f"log_probs for {len(unknown)} samples that were not asked for, such as {unknown[0]}")
    for one in samples:
        check_log_probs(one, found[one.id])
    return [found[name].astype(np.float32) for name in asked]


def check_log_probs(sample: Tokens, log_probs: np.ndarray) -> None:
    """Raise FormError unless there is one finite value, not above 0, per response token."""
    if log_probs.shape != (sample.response_length,):
        raise FormError(
            f"sample {sample.id}: {log_probs.size} log_probs for {sample.response_length} response tokens"
        )
    good = np.isfinite(log_probs) & (log_probs <= 1e-3)
    if not good.all():
        position = int(np.argmin(good))
        raise FormError(
            f"sample {sample.id}: the log-prob at response position {position} is {log_probs[position]}"
        )


def is_binary(content_type: str) -> bool:
    """Whether the content type is that of the binary form."""
    return content_type.split(";")[0].strip().lower() == CONTENT_TYPE


def _tokens(item: Any, where: str) -> Tokens:
    if not isinstance(item, dict) or not {"id", "input_ids", "response_length"} <= item.keys():
        has = sorted(item) if isinstance(item, dict) else item
        raise FormError(f"{where} needs id, input_ids and response_length; it has {has}")
    name, input_ids, length = item["id"], item["input_ids"], item["response_length"]
    if not isinstance(name, str) or not isinstance(input_ids, list) or type(length) is not int:
        raise FormError(f"{where}: id is a string, input_ids a list and response_length a whole number")
    for position, token_id in enumerate(input_ids):
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            raise FormError(f"{where}.input_ids[{position}] is {token_id!r}, not a token id")
    return Tokens(name, np.array(input_ids, np.int64), length)


def _json_rows(body: dict[str, Any]) -> list[tuple[str, np.ndarray]]:
    _version(body)
    listed = body.get("log_probs")
    if not isinstance(listed, list):
        raise FormError(f"log_probs is {type(listed).__name__}, not a list; the answer has {sorted(body)}")
    rows = []
    for i, item in enumerate(listed):
        if not isinstance(item, dict) or not isinstance(item.get("id"), str):
            raise FormError(f"log_probs[{i}] has no id")
        values = item.get("log_probs")
        if not isinstance(values, list):
            raise FormError(f"sample {item['id']} has no list of log_probs")
        for position, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int | float):
                shown = "null (JSON has no NaN)" if value is None else repr(value)
                raise FormError(
                    f"sample {item['id']}: the log-prob at response position {position} is {shown}"
                )
        rows.append((item["id"], np.array(values, np.float64)))
    return rows


def _split(ids: Any, values: np.ndarray, lengths: np.ndarray, what: str) -> list[tuple[str, np.ndarray]]:
    """(id, its part of `values`) of each sample."""
    if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
        raise FormError("the header's ids is not a list of strings")
    if len(ids) != len(lengths) or (lengths < 0).any() or lengths.sum() != len(values):
        raise FormError(f"{len(ids)} ids, {len(lengths)} lengths of {lengths.sum()} and {len(values)} {what}")
    return list(zip(ids, np.split(values, np.cumsum(lengths)[:-1]) if ids else [], strict=True))


def _array(arrays: dict[str, np.ndarray], name: str, kind: Any) -> np.ndarray:
    found: np.ndarray | None = arrays.get(name)
    if found is None or found.ndim != 1 or not np.issubdtype(found.dtype, kind):
        raise FormError(
            f"the binary body needs a flat array {name} of {kind.__name__}; it has {sorted(arrays)}"
        )
    return found


def _json(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except ValueError as error:
        raise FormError(f"the body is not JSON ({error}): {content[:80]!r}") from error
    if not isinstance(body, dict):
        raise FormError(f"the body is {type(body).__name__}, not an object")
    return body


def _version(body: dict[str, Any]) -> None:
    if body.get("version") != VERSION:
        raise FormError(f"version is {body.get('version')!r}; this side speaks version {VERSION}")


def _distinct(ids: Sequence[str]) -> None:
    if len(set(ids)) < len(ids):
        raise FormError("an id comes more than once")
