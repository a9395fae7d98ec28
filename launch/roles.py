"""The recipe's role sections: a model each, its numbers, its optimizer and how it is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rolemesh.launch.fields import RecipeError, Section, key
from rolemesh.launch.service_keys import RequestLimits, Speed, check_endpoints
from rolemesh.launch.tokens import check_one_place, token_env_key, token_file_key

TrainDtype = Literal["bfloat16", "float32"]
InferDtype = Literal["bfloat16", "float32", "float16"]
Recompute = Literal["none", "selective", "full"]
RECOMPUTE_DOC = (
    "What the backward pass makes anew: nothing, attention (selective), or whole layers (full: the least "
    "memory, about a third more compute)."
)


@dataclass(frozen=True, kw_only=True)
class LayoutPins(Section):
    """The layout keys that a role pins; the pool's size fills the rest."""

    tp: int | None = key(
        None,
        "Tensor parallel ranks.",
        unit="ranks",
        at_least=1,
        verl=".tensor_model_parallel_size",
        shown="1",
    )
    pp: int | None = key(
        None, "Pipeline stages.", unit="ranks", at_least=1, verl=".pipeline_model_parallel_size", shown="1"
    )
    dp: int | None = key(
        None, "Replicas.", unit="ranks", at_least=1, shown="the pool's devices / (tp * pp * cp)"
    )
    cp: int | None = key(
        None, "Context parallel ranks.", unit="ranks", at_least=1, verl=".context_parallel_size", shown="1"
    )
    ep: int | None = key(
        None,
        "Expert parallel ranks.",
        unit="ranks",
        at_least=1,
        verl=".expert_model_parallel_size",
        shown="1",
    )
    etp: int | None = key(
        None,
        "Tensor parallel ranks of experts.",
        unit="ranks",
        at_least=1,
        verl=".expert_tensor_parallel_size",
        shown="1",
    )
    vpp: int | None = key(
        None,
        "Virtual stages per rank.",
        unit="stages",
        at_least=1,
        verl=".virtual_pipeline_model_parallel_size",
        shown="1",
    )
    sequence_parallel: bool | None = key(
        None, "Cut activations along the sequence too.", verl=".sequence_parallel", shown="false"
    )
    pp_layers: tuple[int, ...] = key(
        (),
        "Layers of each pipeline stage (with vpp: of each part, stage after stage, round after round).",
        unit="layers",
        shown="as even as can be",
    )

    @property
    def pins(self) -> dict[str, Any]:
        """Only the keys that were given: what `Layout.fill` takes."""
        return {name: value for name, value in vars(self).items() if value not in (None, ())}


@dataclass(frozen=True, kw_only=True)
class Optim(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = key(1e-6, "Learning rate.", at_least=0, verl=".lr")
    min_lr: float = key(0.0, "Learning rate at the end of a decay.", at_least=0, verl=".min_lr")
    warmup_steps: int = key(
        0,
        "Optimizer updates of linear warm-up.",
        unit="updates",
        at_least=0,
        verl=".lr_warmup_steps",
    )
    decay: Literal["constant", "linear", "cosine"] = key(
        "constant",
        "Shape after the warm-up, down to min_lr at the last step.",
        verl=".lr_decay_style",
    )
    weight_decay: float = key(0.01, "Decoupled weight decay.", at_least=0, verl=".weight_decay")
    beta1: float = key(0.9, "Adam's beta1.", at_least=0, at_most=1)
    beta2: float = key(0.999, "Adam's beta2.", at_least=0, at_most=1)
    eps: float = key(1e-8, "Adam's epsilon.", above=0)
    clip_grad: float = key(
        1.0,
        "Largest gradient norm; 0: no clipping.",
        at_least=0,
        verl=".clip_grad",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_lr > self.lr:
            raise RecipeError(f"min_lr is {self.min_lr:g}, above the lr of {self.lr:g}")


def layout_key(verl: str = "") -> Any:
    """The `layout` of a role with a model."""
    return key(LayoutPins, "How the model is cut.", verl=verl)


def micro_batch_tokens_key() -> Any:
    """The `micro_batch_tokens` of such a role."""
    return key(None, "Tokens per rank at once.", unit="tokens", at_least=1, shown="batch.micro_batch_tokens")


def offload_key(verl: str = "") -> Any:
    """The `offload` of such a role."""
    return key(False, "Its states wait in host memory while other roles of the pool run.", verl=verl)


def worker_key(base: str) -> Any:
    """The `worker` of a placed role; `base` names the class that the user's must be one of."""
    return key(
        None,
        f"A class of your own as the role's worker: `file.py:Class`, a subclass of {base}.",
        path=True,
        shown="the role's own",
    )


@dataclass(frozen=True, kw_only=True)
class Lora(Section):
    """Low-rank adapters, trained in place of the model."""

    scalar: ClassVar[str] = "rank"

    rank: int = key(
        0, "Rank of the adapters of attention and feed-forward; 0: the whole model is trained.",
        at_least=0, verl=".lora_rank",
    )  # fmt: skip
    alpha: float = key(16.0, "An adapter counts alpha / rank times.", above=0, verl=".lora_alpha")


@dataclass(frozen=True, kw_only=True)
class Actor(Section):
    """The model that is trained."""

    scalar: ClassVar[str] = "path"

    path: str = key(doc="Hugging Face folder.", path=True, verl="actor_rollout_ref.model.path")
    dtype: TrainDtype = key("bfloat16", "Type of weights and activations; the optimizer keeps float32.")
    optim: Optim = key(Optim, "Optimizer.", verl="actor_rollout_ref.actor.optim")
    layout: LayoutPins = layout_key("actor_rollout_ref.actor.megatron")
    recompute: Recompute = key(
        "none",
        RECOMPUTE_DOC,
        verl="actor_rollout_ref.model.enable_gradient_checkpointing",
    )
    router_loss: float = key(
        0.0,
        "Weight of the load-balancing loss of a mixture of experts, per layer (0: off).",
        at_least=0.0,
        verl="actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff",
    )
    micro_batch_tokens: int | None = micro_batch_tokens_key()
    offload: bool = offload_key("actor_rollout_ref.actor.megatron.param_offload")
    lora: Lora = key(Lora, "Low-rank adapters in place of the whole model.", verl="actor_rollout_ref.model")
    worker: str | None = worker_key("ActorWorker")


@dataclass(frozen=True, kw_only=True)
class Critic(Section):
    """The value model (ppo)."""

    scalar: ClassVar[str] = "path"

    path: str | None = key(
        None, "Hugging Face folder.", path=True, shown="none: required by ppo", verl="critic.model.path"
    )
    new_head: bool = key(
        False, "Allow a fresh value head where the checkpoint is a causal model without one."
    )
    dtype: TrainDtype = key("bfloat16", "Type of weights and activations; the optimizer keeps float32.")
    optim: Optim = key(Optim, "Optimizer.", verl="critic.optim")
    layout: LayoutPins = layout_key("critic.megatron")
    recompute: Recompute = key(
        "none",
        RECOMPUTE_DOC,
        verl="critic.model.enable_gradient_checkpointing",
    )
    micro_batch_tokens: int | None = micro_batch_tokens_key()
    offload: bool = offload_key("critic.megatron.param_offload")
    lora: Lora = key(
        Lora, "Low-rank adapters and the value head in place of the whole model.", verl="critic.model"
    )
    worker: str | None = worker_key("CriticWorker")


@dataclass(frozen=True, kw_only=True)
class Ref(Section):
    """The frozen reference policy, present when algorithm.kl.in is not none."""

    scalar: ClassVar[str] = "path"

    kind: Literal["model", "remote", "actor"] | None = key(
        None,
        "model: a placed role; remote: a service (`rolemesh serve-ref`); actor: the actor itself, "
        "without its adapters (actor.lora).",
        shown="actor with actor.lora and without ref.path, else model",
    )
    path: str | None = key(None, "Hugging Face folder (model).", path=True, shown="actor.path")
    dtype: InferDtype = key("bfloat16", "Type of weights and activations (model).")
    layout: LayoutPins = layout_key("actor_rollout_ref.ref.megatron")
    micro_batch_tokens: int | None = micro_batch_tokens_key()
    offload: bool = offload_key("actor_rollout_ref.ref.megatron.param_offload")
    worker: str | None = worker_key("RefWorker (model)")
    stream: bool = key(
        False,
        "Score samples as they are finished, while others are generated: for a reference on another pool "
        "than the rollout's (model; a remote one always does).",
    )
    endpoints: tuple[str, ...] = key(
        (), "URLs of the service, one or several (remote).", shown="required by remote"
    )
    token_env: str | None = token_env_key("remote")
    token_file: str | None = token_file_key("remote")
    limits: RequestLimits = key(RequestLimits, "What bounds requests (remote).")
    speed: Speed = key(Speed, "How fast it is, for the planner (remote).")
    expect_initial_kl: float | None = key(
        None,
        "Stop when actor and reference differ by more before the first update: one of them is another "
        "checkpoint than was meant.",
        unit="nats per token",
        above=0,
        shown="not looked at",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_endpoints(self.endpoints)
        check_one_place(self)
