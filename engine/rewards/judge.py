"""JudgeReward: a prompted language model as reward, through an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal, Protocol, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

import numpy as np
import torch

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.remote.http import BadAnswer, RemoteError
from rolemesh.engine.response import own_tokens
from rolemesh.engine.rewards.extras import present_means, ragged_columns
from rolemesh.engine.rewards.failure import Failed, FailurePolicy
from rolemesh.engine.rewards.function import at_last_token
from rolemesh.engine.rewards.judge_answer import AnswerError
from rolemesh.engine.rewards.judge_cache import JudgeCache, content_key
from rolemesh.engine.rewards.judge_forms import Constraint, JudgeForm, JudgeSample, Result
from rolemesh.engine.rewards.judge_template import JudgeError, JudgeTemplate
from rolemesh.engine.rewards.pool import RewardError
from rolemesh.engine.rewards.texts import RewardTexts

T = TypeVar("T")
log = logging.getLogger(__name__)

CONSTRAINTS: tuple[Constraint, ...] = ("json_schema", "regex", "none")
SAMPLING: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 512}
PROBE_TOKENS = 16
_COUNTED = ("questions", "cache_hits", "parse_retries", "parse_failures")
_OURS = ("model", "messages", "response_format", "structured_outputs", "stream", "n")


class Asked(Protocol):
    """Who is asked: a service's `Client`, or what stands for one."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T: ...

    async def post(self, content: bytes, content_type: str, read: Callable[[bytes, str], T]) -> T: ...

    def take_metrics(self, prefix: str) -> dict[str, float]: ...

    def close(self) -> None: ...


class JudgeReward:
    """Asks a language model about each sample, or each pair of samples, and reads its answers as rewards.

    Questions are in flight together, as many as the client allows; equal ones are asked once. An answer that
    cannot be read is asked for again, with a note of what was wrong, `retries` times; then the question has
    failed, and `on_failure` decides about its samples.

    Args:
        client: of endpoints as `chat_endpoint` writes them.
        texts: the samples' texts; the judge's own server applies its chat template.
        model: its name at the endpoint.
        form: what is asked; see judge_forms.py.
        template: None: the form's own.
        system: a system message, as it is.
        sampling: keys of the request, in place of `SAMPLING`.
        constraint: how the server is to hold the judge to the form of an answer: `json_schema`
            (`response_format`), `regex` (vLLM's), `none`, or `auto`: the first of these that it takes.
        cache: answers that could be read are kept there, and taken from there in place of asking.

    Raises:
        JudgeError: the template does not fit the form, or `sampling` has a key that is not sampling.
    """

    def __init__(
        self,
        client: Asked,
        texts: RewardTexts,
        on_failure: FailurePolicy,
        *,
        model: str,
        form: JudgeForm,
        template: JudgeTemplate | None = None,
        system: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        constraint: Literal["auto"] | Constraint = "auto",
        retries: int = 2,
        cache: JudgeCache | None = None,
    ) -> None:
        if wrong := sorted({*(sampling or {})} & {*_OURS}):
            raise JudgeError(f"judge sampling has {wrong}, which the judge sets itself")
        self.client, self.texts, self.on_failure, self.form = client, texts, on_failure, form
        self.template = template or JudgeTemplate(form.default_template, pairs=form.pairs)
        if self.template.pairs != form.pairs:
            shows = "two responses" if self.template.pairs else "one response"
            raise JudgeError(f"judge template {self.template.name} shows {shows}; the form needs the other")
        self.model, self.system, self.retries, self.cache = model, system, retries, cache
        self.sampling = dict(SAMPLING if sampling is None else sampling)
        self._candidates: tuple[Constraint, ...] = CONSTRAINTS if constraint == "auto" else (constraint,)
        self._constraint: Constraint | None = None
        self._counts: Counter[str] = Counter()

    @property
    def whole_groups(self) -> bool:
        """Whether all samples of a group (`uid`) must be in one batch."""
        return self.form.whole_groups

    def start(self) -> Constraint:
        """Ask a short question, to find which constraint the server takes; `score` does it where it must.

        Raises:
            JudgeError: the server cannot be reached, has no such model, or refuses each kind of question.
        """
        refusals = []
        for constraint in self._candidates:
            text = f"A test of the connection. {self.form.answer_form(constraint)}"
            body = self._body(text, constraint, retry=0)
            body |= {key: PROBE_TOKENS for key in ("max_tokens", "max_completion_tokens") if key in body}
            try:
                self.client.run(self._post(body))
            except RemoteError as error:
                if not error.of_content:
                    raise JudgeError(f"judge model {self.model!r}: {error}") from error
                refusals.append(f"{constraint}: {error}")
                continue
            if refusals:
                log.warning(
                    "the judge's answers are constrained by %s; refused: %s", constraint, "; ".join(refusals)
                )
            self._constraint = constraint
            return constraint
        raise JudgeError(f"judge model {self.model!r} refuses questions:\n  " + "\n  ".join(refusals))

    def score(self, data: DataProto) -> DataProto:
        """Column `rm_scores` float32 [b, R]: the reward at the last response token, 0 elsewhere.

        Args:
            data: `prompts` [b, P], `responses` [b, R], `attention_mask` [b, P + R]; `reward_model`, whose
                `ground_truth` is the label, and `uid`, where there are any.

        Returns:
            Also `dropped` bool [b]: rows of groups that `drop_group` leaves out; and the form's extras as
            object columns. Meta information has `metrics`: those of the failure policy and the client,
            `reward/questions` (different ones), `reward/cache_hits`, `reward/parse_retries` (answers that
            were asked for again), `reward/parse_failures` (questions without an answer that can be read),
            and the mean of every numeric extra as `reward/NAME/mean`.

        Raises:
            RewardError: questions without an answer, as `on_failure` says; or an extra named as a column is.
            JudgeError: the judge is set up wrong, or the template uses what a sample does not have.
        """
        constraint = self._constraint or self.start()
        samples = self._samples(data)
        questions = self.form.questions(samples)
        common = {"answer_form": self.form.answer_form(constraint)}
        texts = [self.template.render(common | dict(q.values), q.where) for q in questions]
        asked = {text: question.where for text, question in zip(texts, questions, strict=True)}
        answers = self.client.run(self._all(asked, constraint))
        outcomes = self.form.results(samples, [answers[text] for text in texts])
        decided = self.on_failure.apply(
            [o.score if isinstance(o, Result) else o for o in outcomes], data.non_tensor_batch.get("uid")
        )
        extras = ragged_columns([o.extra if isinstance(o, Result) else {} for o in outcomes])
        if taken := sorted(extras.keys() & {*data.columns}):
            raise RewardError(f"the judge's criteria make columns {taken}, which the batch has; rename them")
        counts, self._counts = self._counts, Counter()
        metrics = decided.metrics | self.client.take_metrics("reward")
        metrics |= {f"reward/{name}": float(counts[name]) for name in _COUNTED}
        metrics |= {f"reward/{name}/mean": mean for name, mean in present_means(extras).items()}
        tensors = {
            "rm_scores": at_last_token(torch.from_numpy(decided.scores).float(), own_tokens(data)),
            "dropped": torch.from_numpy(decided.dropped),
        }
        return DataProto.from_dict(tensors, extras, {"metrics": metrics})

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _samples(self, data: DataProto) -> list[JudgeSample]:
        objects = data.non_tensor_batch
        truths = objects.get("reward_model", [None] * len(data))
        uids = objects.get("uid", [None] * len(data))
        samples = []
        for row, (text, truth, uid) in enumerate(zip(self.texts(data), truths, uids, strict=True)):
            label = (truth or {}).get("ground_truth")
            label = label.tolist() if isinstance(label, np.ndarray | np.generic) else label
            name = f"sample {row}" + (f" (uid {uid})" if uid is not None else "")
            samples.append(JudgeSample(name, text.prompt, text.response, label, uid))
        return samples

    async def _all(self, asked: Mapping[str, str], constraint: Constraint) -> dict[str, Any]:
        """Every question's answer, by its text. With `raise`, the first failure ends the others."""
        self._counts["questions"] += len(asked)
        tasks = [asyncio.create_task(self._ask(*question, constraint)) for question in asked.items()]
        try:
            return dict(zip(asked, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()

    async def _ask(self, text: str, where: str, constraint: Constraint) -> Any:
        """The answer as the form reads it, or Failed."""
        note, why = "", ""
        for retry in range(1 + self.retries):
            body = self._body(text + note, constraint, retry)
            try:
                return await self._answer(body)
            except RemoteError as error:
                why = str(error)
                break
            except AnswerError as error:
                why = f"{where}: {error}"
                note = f"\n\nAn earlier answer could not be read. {self.form.answer_form(constraint)}"
                self._counts["parse_retries" if retry < self.retries else "parse_failures"] += 1
        if self.on_failure.do == "raise":
            raise RewardError(f"the judge gave no answer for {where}: {why.removeprefix(f'{where}: ')}")
        return Failed(why)

    async def _answer(self, body: Mapping[str, Any]) -> Any:
        """What the form reads in the answer, from the cache or the server.

        Raises:
            AnswerError: it cannot be read.
            RemoteError: there is none.
        """
        key = content_key(body)
        kept = await asyncio.to_thread(self.cache.get, key) if self.cache else None
        if kept is not None:
            try:
                answer = self.form.read(kept)
                self._counts["cache_hits"] += 1
                return answer
            except AnswerError:
                pass  # kept under another scale: ask anew
        text, finish = await self._post(body)
        if finish == "length":
            raise AnswerError(
                f"the answer was cut at its longest length, {self._longest}; it ends {text[-80:]!r}"
            )
        answer = self.form.read(text)
        if cache := self.cache:  # another question may find out meanwhile that it cannot be written
            try:
                await asyncio.to_thread(cache.put, key, text)
            except OSError as error:
                log.warning("the judge's cache %s is no longer used: %s", cache.folder, error)
                self.cache = None
        return answer

    async def _post(self, body: Mapping[str, Any]) -> tuple[str, str | None]:
        return await self.client.post(json.dumps(body).encode(), "application/json", read_completion)

    @property
    def _longest(self) -> str:
        """The limit of an answer's length, for messages."""
        named = [f"{key} {self.sampling[key]}" for key in self.sampling if key.startswith("max_")]
        return named[0] if named else "which the server sets"

    def _body(self, text: str, constraint: Constraint, retry: int) -> dict[str, Any]:
        """A request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, {"role": "user", "content": text}],
            **self.sampling,
        }
        if "seed" in body:
            body["seed"] += retry
        if constraint == "json_schema":
            schema = {"name": "answer", "strict": True, "schema": self.form.schema()}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif constraint == "regex":
            body["structured_outputs"] = {"regex": self.form.regex()}
        return body


def chat_endpoint(url: str) -> str:
    """The URL for chat completions of a server, given as that URL, as `.../v1`, or as its root."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    if not path.endswith("/chat/completions"):
        path = f"{path or '/v1'}/chat/completions"
    return urlunsplit(parts._replace(path=path))


def read_completion(body: bytes, kind: str) -> tuple[str, str | None]:
    """The text of a chat completion, empty where the model wrote none, and why it ended.

    Raises:
        BadAnswer: this is no chat completion.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"the answer is not JSON ({error})") from None
    try:
        choice = answer["choices"][0]
        content = choice["message"].get("content") or ""
        text = content if isinstance(content, str) else "".join(_part(part) for part in content)
        return text, choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise BadAnswer("the answer is no chat completion: it has no choices[0].message") from None


def _part(part: Any) -> str:
    """The text of one part of a message that comes in parts."""
    return str(part.get("text") or "")
