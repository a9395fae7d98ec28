"""What scores text, as values that travel to the process that will do it, and made from them there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rolemesh.engine.remote import forms
from rolemesh.engine.remote.fingerprint import differences, tokenizer_fingerprint
from rolemesh.engine.remote.http import Client, Limits
from rolemesh.engine.rewards.composite import CompositeReward, Part, Reward
from rolemesh.engine.rewards.failure import FailurePolicy
from rolemesh.engine.rewards.function import FunctionReward
from rolemesh.engine.rewards.judge import Asked, JudgeReward, chat_endpoint
from rolemesh.engine.rewards.judge_cache import JudgeCache
from rolemesh.engine.rewards.judge_forms import Scores
from rolemesh.engine.rewards.judge_pairs import Pairwise
from rolemesh.engine.rewards.judge_template import JudgeTemplate
from rolemesh.engine.rewards.pool import RewardError
from rolemesh.engine.rewards.remote import RemoteReward
from rolemesh.engine.rewards.texts import RewardTexts

READY_S = 5.0
Special = Literal["keep", "strip"]


@dataclass(frozen=True)
class Function:
    """A Python function; the arguments of `FunctionReward`."""

    path: str
    limit_s: float
    workers: int
    special_tokens: Special


@dataclass(frozen=True)
class Service:
    """Endpoints of one service, how they are asked, and what becomes of samples that get no score.

    `section` is the recipe's, for messages; `window` the samples of a step.
    """

    section: str
    endpoints: tuple[str, ...]
    limits: Limits
    on_failure: Literal["raise", "drop_group", "value"]
    value: float | None
    stop_above: float
    window: int
    token: str | None = field(default=None, repr=False)

    def client(self, tokenizer: PreTrainedTokenizerBase | None = None) -> Client:
        """A client whose endpoints are there, each with `tokenizer` where it is given.

        Raises RemoteError when none is there, RewardError for one with another tokenizer.
        """
        client = Client(self.endpoints, self.limits, token=self.token, what=self.section)
        try:
            infos = client.wait_ready(READY_S)
            ours = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
            for url, info in infos.items():
                if ours and (wrong := differences(ours, info.get("tokenizer") or {})):
                    raise RewardError(
                        f"{self.section}.send_ids needs a service with the actor's tokenizer; that of {url} "
                        "differs:" + "".join(f"\n  {line}" for line in wrong)
                    )
        except BaseException:
            client.close()
            raise
        return client

    def policy(self) -> FailurePolicy:
        """The failure policy, new: it remembers what failed."""
        return FailurePolicy(self.on_failure, self.value, self.stop_above, window=self.window)


@dataclass(frozen=True)
class Remote:
    """A reward service; `tokenizer` is the folder of the reward model's, for template chat.

    `send_ids`: token ids too, which asks for a service with the actor's tokenizer.
    """

    service: Service
    protocol: forms.Protocol
    score_key: str | None
    template: Literal["raw", "chat"]
    special_tokens: Special
    tokenizer: str | None
    send_ids: bool


@dataclass(frozen=True)
class Judge:
    """A language model that is asked; see `JudgeReward`. `template` is a file, `cache_dir` a folder."""

    service: Service
    model: str
    form: Scores | Pairwise
    template: str | None
    system: str | None
    sampling: Mapping[str, float]
    constraint: Literal["auto", "json_schema", "regex", "none"]
    retries: int
    cache_dir: str | None
    special_tokens: Special


@dataclass(frozen=True)
class Composite:
    """The weighted sum of parts: (weight, part) by name."""

    parts: Mapping[str, tuple[float, Function | Remote | Judge]]


Scorer = Function | Remote | Judge | Composite


def build(scorer: Scorer, actor: str) -> Reward:
    """The reward, ready to score; `actor` is the folder of the actor's tokenizer.

    Raises RewardError for a function that cannot be loaded, RemoteError for a service that is not there,
    JudgeError for a judge that is set up wrong.
    """
    if isinstance(scorer, Composite):  # parts run in threads: each has its own tokenizer
        parts = {name: Part(build(part, actor), weight) for name, (weight, part) in scorer.parts.items()}
        return CompositeReward(parts)
    tokenizer = AutoTokenizer.from_pretrained(actor, trust_remote_code=False)
    match scorer:
        case Function():
            return FunctionReward(
                scorer.path,
                tokenizer,
                limit_s=scorer.limit_s,
                workers=scorer.workers,
                special_tokens=scorer.special_tokens,
            )
        case Remote():
            urls = tuple(score_endpoint(url, scorer.protocol) for url in scorer.service.endpoints)
            service = replace(scorer.service, endpoints=urls)
            own = (
                AutoTokenizer.from_pretrained(scorer.tokenizer, trust_remote_code=False)
                if scorer.tokenizer
                else None
            )
            return RemoteReward(
                service.client(tokenizer if scorer.send_ids else None),
                RewardTexts(tokenizer, scorer.template, scorer.special_tokens, own),
                service.policy(),
                protocol=scorer.protocol,
                score_key=scorer.score_key,
                send_ids=scorer.send_ids,
            )
        case Judge():
            service = scorer.service
            urls = tuple(map(chat_endpoint, service.endpoints))
            return judge_reward(scorer, actor, replace(service, endpoints=urls).client())


def score_endpoint(url: str, protocol: forms.Protocol) -> str:
    """The URL for scores of a server, given as that URL, or as its root."""
    parts = urlsplit(url)
    path = "/v1/score" if protocol == "rolemesh" else "/get_reward"
    return urlunsplit(parts._replace(path=path)) if parts.path in ("", "/") else url


def judge_reward(judge: Judge, actor: str, client: Asked) -> JudgeReward:
    """The judge behind `client`, asked a short question; see `build`."""
    tokenizer = AutoTokenizer.from_pretrained(actor, trust_remote_code=False)
    template = None
    if judge.template is not None:
        text = Path(judge.template).read_text()
        template = JudgeTemplate(text, pairs=judge.form.pairs, name=judge.template)
    reward = JudgeReward(
        client,
        RewardTexts(tokenizer, special_tokens=judge.special_tokens),
        judge.service.policy(),
        model=judge.model,
        form=judge.form,
        template=template,
        system=judge.system,
        sampling=judge.sampling,
        constraint=judge.constraint,
        retries=judge.retries,
        cache=JudgeCache(judge.cache_dir) if judge.cache_dir else None,
    )
    reward.start()
    return reward
