"""What a model looks like, read from its Hugging Face `config.json`: no weights, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class ModelError(ValueError):
    """A model configuration that is incomplete or of a kind that is not supported."""


@dataclass(frozen=True)
class _Family:
    """What the model type alone decides. `attention_bias` None: the configuration's key of that name does."""

    attention_bias: bool | None = None
    out_bias: bool = True  # the attention bias covers the output projection too
    mlp_bias: bool = False  # the configuration's `mlp_bias` counts
    qk_norm: bool = False
    head_dim: int | None = None  # where the configuration leaves it out; None: hidden / heads


FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(mlp_bias=True),
    "qwen2": _Family(attention_bias=True, out_bias=False),
    "qwen3": _Family(qk_norm=True, head_dim=128),
}

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_ROPE_KINDS = ("default", "llama3")


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of a decoder with RMSNorm, rotary positions and a SwiGLU feed-forward.

    `n_labels` is None for a language model; for a classification head it is its width, and
    `label_bias` says whether it has a bias. `rope_scaling` holds the configuration's mapping
    (`rope_type: llama3`), None when positions are not scaled.
    """

    family: str
    n_layers: int
    hidden: int
    ffn: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    norm_eps: float = 1e-6
    n_labels: int | None = None
    label_bias: bool = False

    def __post_init__(self) -> None:
        sizes = ("n_layers", "hidden", "ffn", "n_heads", "n_kv_heads", "head_dim", "vocab", "max_positions")
        for name in sizes:
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ModelError(f"{name} must be a whole number of at least 1, got {getattr(self, name)!r}")
        if self.n_heads % self.n_kv_heads:
            raise ModelError(f"{self.n_heads} attention heads cannot share {self.n_kv_heads} KV heads evenly")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a `config.json` of transformers 4 or 5.

        Raises ModelError for a model type, activation, rope or attention kind that is not supported,
        and for a missing size.
        """
        family = _family(config)
        _refuse_other_maths(config)
        rope = _rope(config)
        n_labels, label_bias = _head(config)
        hidden, n_heads = config["hidden_size"], config["num_attention_heads"]
        attention_bias = family.attention_bias
        if attention_bias is None:
            attention_bias = bool(config.get("attention_bias", False))
        return cls(
            family=config["model_type"],
            n_layers=config["num_hidden_layers"],
            hidden=hidden,
            ffn=config["intermediate_size"],
            n_heads=n_heads,
            n_kv_heads=config.get("num_key_value_heads") or n_heads,
            head_dim=config.get("head_dim") or family.head_dim or hidden // n_heads,
            vocab=config["vocab_size"],
            max_positions=config["max_position_embeddings"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias,
            out_bias=attention_bias and family.out_bias,
            mlp_bias=family.mlp_bias and bool(config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            rope_theta=float(rope["rope_theta"]),
            rope_scaling=None if rope["rope_type"] == "default" else rope,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            n_labels=n_labels,
            label_bias=label_bias,
        )

    @property
    def layer_params(self) -> int:
        """Parameters of one decoder layer."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        attention = self.hidden * (q + 2 * kv) + q * self.hidden
        biases = self.qkv_bias * (q + 2 * kv) + self.out_bias * self.hidden
        mlp_biases = self.mlp_bias * (2 * self.ffn + self.hidden)
        norms = 2 * self.hidden + self.qk_norm * 2 * self.head_dim
        return attention + biases + 3 * self.hidden * self.ffn + mlp_biases + norms

    @property
    def head_params(self) -> int:
        """Parameters after the final norm: none when the head is the embedding itself."""
        if self.n_labels is not None:
            return self.n_labels * (self.hidden + self.label_bias)
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def n_params(self) -> int:
        """Parameters of the whole model, a shared matrix counted once, vocabulary not padded."""
        return self.vocab * self.hidden + self.n_layers * self.layer_params + self.hidden + self.head_params


def stage_layers(n_layers: int, pp: int) -> list[int]:
    """Layers of each pipeline stage; the first ones take one more where they do not divide (7, 2: [4, 3])."""
    if not 1 <= pp <= n_layers:
        raise ModelError(f"{n_layers} layers cannot fill {pp} pipeline stages: pp must be 1 to {n_layers}")
    each, over = divmod(n_layers, pp)
    return [each + (stage < over) for stage in range(pp)]


def padded_vocab(vocab: int, tp: int, multiple: int = 128) -> int:
    """Rows of the whole embedding once every tp rank holds the same multiple of `multiple` rows."""
    step = tp * multiple
    return -(-vocab // step) * step


def _family(config: Mapping[str, Any]) -> _Family:
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise ModelError(f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    if missing := [key for key in _REQUIRED if key not in config]:
        raise ModelError(f"the {model_type} configuration lacks {', '.join(missing)}")
    return FAMILIES[model_type]


def _refuse_other_maths(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {config['hidden_act']!r} is not supported: only silu is")
    windowed = config.get("use_sliding_window") and (
        config.get("sliding_window") is not None
        and config.get("max_window_layers", 0) < config["num_hidden_layers"]
    )
    if windowed or "sliding_attention" in (config.get("layer_types") or ()):
        raise ModelError("sliding-window attention is not supported: set use_sliding_window to false")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters with `rope_type` and `rope_theta`, from either generation of transformers."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
    rope.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    if rope["rope_type"] not in _ROPE_KINDS:
        raise ModelError(
            f"rope scaling {rope['rope_type']!r} is not supported; supported: {', '.join(_ROPE_KINDS)}"
        )
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError(
            f"partial_rotary_factor {partial} is not supported: every head dimension must rotate"
        )
    return rope


def _head(config: Mapping[str, Any]) -> tuple[int | None, bool]:
    """(n_labels, label_bias) of the head in `architectures`; transformers writes no list for 2 labels."""
    architecture = (config.get("architectures") or ["ForCausalLM"])[0]
    if not architecture.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return None, False
    n_labels = len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 2)
    return n_labels, architecture.endswith("ForTokenClassification")
