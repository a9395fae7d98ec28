"""The recipes of `rolemesh sft` and `rolemesh train-rm`: frozen dataclasses, as in `schema.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rolemesh.launch.fields import Section, key
from rolemesh.launch.roles import RECOMPUTE_DOC, LayoutPins, Optim, Recompute, TrainDtype
from rolemesh.launch.schema import Cluster, Run


@dataclass(frozen=True, kw_only=True)
class SupervisedRun(Run):
    """How long, from where, into which folder."""

    best_metric: Literal["val/loss", "val/accuracy"] = key(
        "val/loss", "Metric of keep_best: the lowest held-out loss, or the highest pair accuracy (train-rm)."
    )


@dataclass(frozen=True, kw_only=True)
class Examples(Section):
    """What `sft` and `train-rm` data have in common."""

    scalar: ClassVar[str] = "train_files"

    train_files: tuple[str, ...] = key(
        doc="Files with examples to learn from (.jsonl, .parquet).", path=True, verl="data.train_files"
    )
    val_files: tuple[str, ...] = key((), "Files with held-out examples.", path=True, verl="data.val_files")
    val_rows: int | None = key(
        None, "Use only the first so many held-out examples.", unit="examples", at_least=1, shown="all"
    )
    prompt_key: str = key(
        "prompt", "Column with the prompt: text, or a list of chat messages.", verl="data.prompt_key"
    )
    max_tokens: int = key(
        2048, "Longest prompt and answer together.", unit="tokens", at_least=2, verl="data.max_length"
    )
    overlong: Literal["error", "filter", "truncate"] = key(
        "error",
        "What to do with a longer one: stop, leave it out, or keep its first tokens.",
        verl="data.truncation",
    )
    shuffle: bool = key(True, "Shuffle the examples each epoch.")


@dataclass(frozen=True, kw_only=True)
class SftData(Examples):
    """Prompts with answers, as JSONL or parquet files."""

    response_key: str = key(
        "response", "Column with the answer: text, or messages.", verl="data.response_key"
    )
    messages_key: str = key(
        "messages",
        "Column with a whole conversation, where a row has one: all answers of the assistant are learnt.",
        verl="data.multiturn.messages_key",
    )


@dataclass(frozen=True, kw_only=True)
class PairData(Examples):
    """Prompts with a better and a worse answer, as JSONL or parquet files."""

    chosen_key: str = key(
        "chosen", "Column with the better answer: text, or messages (without a prompt: all of them)."
    )
    rejected_key: str = key("rejected", "Column with the worse answer.")


@dataclass(frozen=True, kw_only=True)
class Model(Section):
    """The model that is trained."""

    scalar: ClassVar[str] = "path"

    path: str = key(
        doc="Hugging Face folder; for train-rm a language model (its scalar head is new) or a reward model.",
        path=True,
        verl="model.partial_pretrain",
    )
    dtype: TrainDtype = key("bfloat16", "Type of weights and activations; the optimizer keeps float32.")
    recompute: Recompute = key(
        "none",
        RECOMPUTE_DOC,
        verl="model.enable_gradient_checkpointing",
    )


@dataclass(frozen=True, kw_only=True)
class ExampleBatch(Section):
    """How many examples make one update."""

    size: int = key(
        64, "Examples (pairs) per update, over all ranks.", unit="examples", at_least=1,
        verl="data.train_batch_size",
    )  # fmt: skip
    micro_batch_tokens: int = key(
        16384,
        "Tokens one rank puts through the model at once; a longer example (pair) goes alone.",
        unit="tokens",
        at_least=1,
        verl="data.max_token_len_per_gpu",
    )


@dataclass(frozen=True, kw_only=True)
class SupervisedRecipe(Section):
    """A whole recipe. `supervised_config.load_supervised` fills and checks what depends on several keys."""

    role: ClassVar[str] = ""  # of the trained model, in checkpoints, plan and export folder
    command: ClassVar[str] = ""
    head: ClassVar[Literal["lm", "value"]] = "lm"

    run: SupervisedRun = key(SupervisedRun, "Length, folder, seed, device.")
    cluster: Cluster = key(Cluster, "Machines.")
    data: Examples = key(doc="Examples.")
    model: Model = key(doc="Trained model.")
    batch: ExampleBatch = key(ExampleBatch, "Batch arithmetic.")
    optim: Optim = key(Optim, "Optimizer.", verl="optim")
    layout: LayoutPins = key(LayoutPins, "How the model is cut; dp follows from the devices.")
    source: str = field(default="", compare=False)  # where it was read from
    given: frozenset[str] = field(default=frozenset(), compare=False)  # dotted keys that were written


@dataclass(frozen=True, kw_only=True)
class SftRecipe(SupervisedRecipe):
    """A recipe of `rolemesh sft`."""

    role: ClassVar[str] = "actor"
    command: ClassVar[str] = "sft"
    head: ClassVar[Literal["lm", "value"]] = "lm"

    data: SftData = key(doc="Examples.")


@dataclass(frozen=True, kw_only=True)
class RmRecipe(SupervisedRecipe):
    """A recipe of `rolemesh train-rm`."""

    role: ClassVar[str] = "reward"
    command: ClassVar[str] = "train-rm"
    head: ClassVar[Literal["lm", "value"]] = "value"

    data: PairData = key(doc="Pairs.")


COMMANDS: dict[str, type[SupervisedRecipe]] = {recipe.command: recipe for recipe in (SftRecipe, RmRecipe)}
