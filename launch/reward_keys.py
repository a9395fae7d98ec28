"""The recipe's reward section: a placed model, a function, a service, a judge, or several of them weighed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from rolemesh.engine.rewards.judge_answer import Scale
from rolemesh.launch.fields import RecipeError, Section, key
from rolemesh.launch.roles import (
    InferDtype,
    LayoutPins,
    layout_key,
    micro_batch_tokens_key,
    offload_key,
    worker_key,
)
from rolemesh.launch.service_keys import RequestLimits, Speed, check_endpoints
from rolemesh.launch.tokens import check_one_place, token_env_key, token_file_key

RewardKind = Literal["model", "function", "remote", "judge", "composite"]
PartKind = Literal["function", "remote", "judge"]

# The keys that count for each kind, and those of them that it cannot do without.
_SERVICE = ("endpoints", "token_env", "token_file", "text", "limits", "on_failure", "speed")
KEYS: Mapping[str, tuple[str, ...]] = {
    "model": ("path", "dtype", "layout", "micro_batch_tokens", "offload", "worker"),
    "function": ("path", "limit_s", "workers", "text", "speed"),
    "remote": ("protocol", "score_key", "send_ids", *_SERVICE),
    "judge": ("model", "judge", "path", "dtype", "layout", "max_batch_tokens", *_SERVICE),
    "composite": ("parts", "speed"),
}
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "model": ("path",),
    "function": ("path",),
    "remote": ("endpoints", "on_failure"),
    "judge": ("on_failure",),
    "composite": ("parts",),
}
# Of a judge that is served by others, and of one that has devices of this run.
_BY_ADDRESS = ("endpoints", "model", "token_env", "token_file", "speed")
_PLACED = ("dtype", "layout", "max_batch_tokens")
REASONS = {"model": "reward.path is a model", "function": "reward.path is a function"}


@dataclass(frozen=True, kw_only=True)
class OnFailure(Section):
    """What becomes of samples without a score once the retries are used up."""

    scalar: ClassVar[str] = "do"

    do: Literal["raise", "drop_group", "value"] | None = key(
        None,
        "raise: stop the run; drop_group: leave the samples of the prompt out of the step; value: score them "
        "with `value`.",
        shown="value where one is given, else required",
    )
    value: float | None = key(
        None, "The score of a failed sample (do: value).", shown="required by do: value"
    )
    stop_above: float = key(
        0.02, "Share of failed samples above which the run stops all the same.", at_least=0, at_most=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.do is None and self.value is not None:
            object.__setattr__(self, "do", "value")
        if self.do is None:
            raise RecipeError("do is missing: raise, drop_group, or value (with value: the score)")
        if self.do == "value" and self.value is None:
            raise RecipeError("value is missing: do is value, so which score does a failed sample get?")


@dataclass(frozen=True, kw_only=True)
class RewardText(Section):
    """The text that is scored."""

    template: Literal["raw", "chat"] = key(
        "raw",
        "raw: exactly what the policy saw and wrote; chat: the conversation, rendered with the reward "
        "model's chat template (remote).",
    )
    special_tokens: Literal["keep", "strip"] | None = key(
        None, "Whether the text holds special tokens.", shown="keep for kind remote, else strip"
    )
    tokenizer: str | None = key(
        None,
        "Folder of the reward model's tokenizer, for its chat template (template: chat).",
        path=True,
        shown="required by template chat",
    )


@dataclass(frozen=True, kw_only=True)
class Criterion(Section):
    """One criterion of a rubric."""

    scalar: ClassVar[str] = "text"

    text: str = key("", "What it means, for the judge.")
    weight: float = key(1.0, "Its share of the score.", above=0)


@dataclass(frozen=True, kw_only=True)
class Judge(Section):
    """How a language model is asked for a score."""

    form: Literal["pointwise", "pairwise", "rubric"] = key(
        "pointwise",
        "pointwise: a score; rubric: a score by each criterion; pairwise: which of two responses is better.",
    )
    criteria: dict[str, Criterion] = key({}, "Criteria by name (form: rubric).")
    against: Literal["group", "label"] = key(
        "group", "What a response is compared with: others of its prompt, or its label (form: pairwise)."
    )
    opponents: int = key(
        8, "Most others that a response meets, an even number (against: group).", unit="samples", at_least=2
    )
    scale: tuple[float, ...] = key(
        (0.0, 1.0), "Lowest and highest score (pointwise, rubric); what lies outside is no answer."
    )
    step: float | None = key(
        None, "Scores that the judge may give are so far apart.", above=0, shown="any score of the scale"
    )
    clamp: bool = key(False, "Take a score outside of the scale as its end instead.")
    template: str | None = key(
        None,
        "File with a Jinja template over `prompt`, `response`, `label`.",
        path=True,
        shown="the form's own",
    )
    system: str | None = key(None, "System message.", shown="none")
    reasoning: bool = key(True, "Let the judge write why before it answers.")
    constraint: Literal["auto", "json_schema", "regex", "none"] = key(
        "auto",
        "What holds the judge to the form of an answer; auto: the first of them that its server takes.",
    )
    temperature: float = key(0.0, "Sampling temperature.", at_least=0)
    max_tokens: int = key(512, "Longest answer.", unit="tokens", at_least=1)
    retries: int = key(
        2, "How often an answer that cannot be read is asked for again.", unit="tries", at_least=0
    )
    cache_dir: str | None = key(
        None, "Folder where answers are kept, by what was asked.", path=True, shown="none: nothing is kept"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.scale) != 2 or self.scale[0] >= self.scale[1]:
            raise RecipeError(f"scale is {list(self.scale)}, but must be [lowest, highest]")
        try:
            Scale(*self.scale, step=self.step)
        except ValueError as error:
            raise RecipeError(str(error)) from None
        if (self.form == "rubric") != bool(self.criteria):
            raise RecipeError(
                f"form is {self.form} with {len(self.criteria)} criteria: a rubric needs at least one, the "
                "other forms have none"
            )
        if self.opponents % 2:
            raise RecipeError(f"opponents is {self.opponents}, but must be even: as many after as before")

    def useless(self) -> dict[str, str]:
        """Keys that count for nothing, with the reason."""
        if self.form != "pairwise":
            return dict.fromkeys(("against", "opponents"), f"form is {self.form}")
        idle = dict.fromkeys(("scale", "step", "clamp"), "form is pairwise, which gives win rates")
        return idle | ({"opponents": "against is label"} if self.against == "label" else {})


@dataclass(frozen=True, kw_only=True)
class Scorer(Section):
    """What scores a sample: the keys that a reward and a part of one have in common."""

    scalar: ClassVar[str] = "path"

    path: str | None = key(
        None,
        "Hugging Face folder of a sequence-classification model, or file.py:function; kind judge: folder of "
        "a language model that this run places and asks itself, in place of endpoints.",
        path=True,
        shown="required by model and function",
        verl="reward_model.model.path, custom_reward_function.path",
    )
    limit_s: float = key(30.0, "Longest time one call may take (function).", unit="s", above=0)
    workers: int = key(2, "Processes that call it (function).", unit="processes", at_least=1)
    text: RewardText = key(RewardText, "The text that is scored (function, remote, judge).")
    protocol: Literal["openrlhf", "slime", "rolemesh"] = key(
        "rolemesh", "What the service speaks (remote); docs/remote.md has each."
    )
    endpoints: tuple[str, ...] = key(
        (),
        "URLs of the service, one or several (remote, judge).",
        shown="required by remote, and by a judge without path",
    )
    token_env: str | None = token_env_key("remote, judge")
    token_file: str | None = token_file_key("remote, judge")
    limits: RequestLimits = key(RequestLimits, "What bounds requests (remote, judge).")
    on_failure: OnFailure | None = key(
        None,
        "What becomes of a sample without a score (remote, judge).",
        shown="required by remote and judge",
    )
    send_ids: bool = key(
        False,
        "Send token ids beside the text, for a service with the actor's tokenizer (protocol: rolemesh).",
    )
    score_key: str | None = key(
        None, "Which entry is the score where a service answers with several (remote).", shown="none"
    )
    model: str | None = key(
        None, "The judge's name at its endpoint (judge).", shown="required with endpoints"
    )
    judge: Judge = key(Judge, "How the judge is asked (judge).")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_endpoints(self.endpoints)
        check_one_place(self)

    @property
    def strips_special_tokens(self) -> bool:
        """Whether the text handed over is without special tokens."""
        default = "keep" if getattr(self, "kind", None) == "remote" else "strip"
        return (self.text.special_tokens or default) == "strip"


@dataclass(frozen=True, kw_only=True)
class Part(Scorer):
    """One part of a composite reward."""

    kind: PartKind | None = key(
        None,
        "What scores: a function, a service or a judge.",
        shown="function where path reads file.py:name, else required",
        later={
            "model": "serve it (`rolemesh serve-rm`) and name it as a part of kind remote",
            "composite": "write its parts beside the others",
        },
    )
    weight: float = key(1.0, "What its score is multiplied with.")


@dataclass(frozen=True, kw_only=True)
class Reward(Scorer):
    """Where rewards come from."""

    kind: RewardKind | None = key(
        None,
        "model: a placed role; function: path's; remote: a service; judge: a language model that is asked; "
        "composite: the weighted sum of parts.",
        shown="function where path reads file.py:name, else model",
    )
    dtype: InferDtype = key("bfloat16", "Type of weights and activations (model, judge with path).")
    layout: LayoutPins = layout_key("reward_model.megatron")
    micro_batch_tokens: int | None = micro_batch_tokens_key()
    max_batch_tokens: int = key(
        131072,
        "Tokens of questions and answers that the judge's engine holds at a time (judge with path); no "
        "question is longer.",
        unit="tokens",
        at_least=1,
    )
    offload: bool = offload_key("reward_model.megatron.param_offload")
    worker: str | None = worker_key("RewardWorker (model)")
    speed: Speed = key(Speed, "How fast it is, for the planner (all but model).")
    parts: dict[str, Part] = key(
        {},
        "Parts by name (composite), each logged: keys as those of `reward`, with `weight`, without what a "
        "placed model and the planner read.",
    )


def scorers(reward: Reward) -> Iterator[tuple[str, Scorer, str]]:
    """The scorers of a reward as (dotted section, keys, kind): itself, or its parts after it."""
    yield "reward", reward, str(reward.kind)
    for name, part in reward.parts.items():
        yield f"reward.parts.{name}", part, str(part.kind)


def has_batches(scorer: Scorer, kind: str) -> bool:
    """Whether a request of the service may hold several samples."""
    return kind == "remote" and scorer.protocol != "slime"


def needs_groups(reward: Reward) -> bool:
    """Whether the samples of a prompt have to be scored together: compared, or dropped as one."""
    return any(
        getattr(scorer.on_failure, "do", None) == "drop_group"
        or (kind == "judge" and scorer.judge.form == "pairwise" and scorer.judge.against == "group")
        for _, scorer, kind in scorers(reward)
    )


def useless_reward_keys(reward: Reward) -> dict[str, str]:
    """Dotted keys below `reward` that count for nothing, with the reason."""
    idle: dict[str, str] = {}
    for section, scorer, kind in scorers(reward):
        names = {name for keys in KEYS.values() for name in keys} - set(KEYS[kind])
        why = REASONS.get(kind, "") if section == "reward" else ""
        reason = f"{why or f'{section}.kind is {kind}'}, {_others(kind)}"
        idle |= {f"{section}.{name}": reason for name in sorted(names)}
        if kind == "judge" and scorer.path is not None:
            idle |= {f"{section}.{name}": f"{section}.path is placed by this run" for name in _BY_ADDRESS}
        elif kind == "judge":
            idle |= {
                f"{section}.{name}": f"{section}.endpoints are not placed by this run" for name in _PLACED
            }
        if kind in ("function", "judge"):
            idle |= dict.fromkeys(
                (f"{section}.text.template", f"{section}.text.tokenizer"),
                f"a {kind} gets prompt and response as they are",
            )
        elif scorer.text.template == "raw":
            idle[f"{section}.text.tokenizer"] = f"{section}.text.template is raw"
        if kind in ("remote", "judge") and not has_batches(scorer, kind):
            what = "judge" if kind == "judge" else "request of slime's form"
            idle[f"{section}.limits.batch"] = f"a {what} gets one sample at a time"
        if kind == "judge":
            useless = scorer.judge.useless()
            idle |= {f"{section}.judge.{name}": f"{section}.judge.{why}" for name, why in useless.items()}
        if kind == "remote" and scorer.protocol != "rolemesh":
            idle[f"{section}.send_ids"] = (
                f"{section}.protocol is {scorer.protocol}, which has no place for ids"
            )
        if (policy := scorer.on_failure) is not None:
            reason = f"{section}.on_failure.do is {policy.do}"
            if policy.do != "value":
                idle[f"{section}.on_failure.value"] = reason
            if policy.do == "raise":
                idle[f"{section}.on_failure.stop_above"] = reason
    return idle


def _others(kind: str) -> str:
    return {"model": "not a function or service", "function": "not a model or service"}.get(
        kind, "which has no use for it"
    )


def check_reward(reward: Reward) -> None:
    """Raise RecipeError for a key that the kind of reward, or of a part, cannot do without."""
    for section, scorer, kind in scorers(reward):
        for name in REQUIRED[kind]:
            if not getattr(scorer, name):
                raise RecipeError(f"{section}.{name} is missing: {_wanted(name, kind)}")
        if kind == "judge":
            _check_judge(section, scorer)
        if scorer.text.template == "chat" and scorer.text.tokenizer is None and kind == "remote":
            raise RecipeError(
                f"{section}.text.tokenizer is missing: template chat is that of the reward model's tokenizer"
            )


def _check_judge(section: str, scorer: Scorer) -> None:
    if scorer.path is None:
        for name in ("endpoints", "model"):
            if not getattr(scorer, name):
                raise RecipeError(f"{section}.{name} is missing: {_wanted(name, 'judge')}")
    elif not isinstance(scorer, Reward):
        raise RecipeError(f"{section}.path: a judge that is a part is asked at its endpoints: serve it")


def _wanted(name: str, kind: str) -> str:
    return {
        "path": "a Hugging Face folder, or file.py:function",
        "endpoints": f"where does the service of kind {kind} listen? such as [http://rm-0:5000]",
        "model": "which of the endpoint's models is the judge?",
        "on_failure": "what becomes of a sample without a score? raise, {do: drop_group, stop_above: 0.02} "
        "or {value: 0.0}; there is no default",
        "parts": "what is it composed of? parts: {name: {weight: 1, path: file.py:function}}",
    }[name]
