"""What a model looks like, read from its Hugging Face `config.json`: no weights, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rolemesh.placement.families import FAMILIES, read_config
from rolemesh.placement.modules import Experts, LatentAttention, ModelError, Router, check_sizes

__all__ = [
    "Experts",
    "LatentAttention",
    "ModelError",
    "ModelShape",
    "Router",
    "padded_vocab",
    "stage_layers",
]


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of a decoder; by default with RMSNorm, rotary positions, SwiGLU feed-forward.

    `n_labels` is None for a language model; for a classification head it is its width, and
    `label_bias` says whether it has a bias. `rope_scaling` holds the configuration's mapping
    (`rope_type: llama3`), None when positions are not scaled. `window`: tokens that attention looks back.

    `moe` and `latent` describe a mixture of experts and latent attention (`head_dim` is then that of
    queries and keys). `gated`, `learned_positions` (a table of `max_positions` rows) and `norm_bias`
    (LayerNorm) tell models like GPT-3 apart, see `gpt`.
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
    gated: bool = True
    learned_positions: bool = False
    norm_bias: bool = False
    window: int | None = None
    moe: Experts | None = None
    latent: LatentAttention | None = None

    def __post_init__(self) -> None:
        check_sizes(
            self, "n_layers", "hidden", "ffn", "n_heads", "n_kv_heads", "head_dim", "vocab", "max_positions"
        )
        if self.n_heads % self.n_kv_heads:
            raise ModelError(f"{self.n_heads} attention heads cannot share {self.n_kv_heads} KV heads evenly")
        if self.moe and not set(self.moe.dense_layers) <= set(range(self.n_layers)):
            raise ModelError(f"dense layers {self.moe.dense_layers} are not among the {self.n_layers} layers")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a `config.json` of transformers 4 or 5.

        Layers for multi-token prediction are left out, as transformers leaves them out of the model.
        Raises ModelError for a model type, activation, rope or attention kind that is not supported,
        and for a missing size.
        """
        return cls(**read_config(config))

    @classmethod
    def gpt(
        cls,
        n_layers: int,
        hidden: int,
        n_heads: int,
        vocab: int,
        max_positions: int,
        *,
        ffn: int = 0,
        bias: bool = True,
        learned_positions: bool = True,
        tied: bool = True,
    ) -> ModelShape:
        """A model like GPT-3: LayerNorm, a plain feed-forward of `ffn` columns (0: four times `hidden`)."""
        return cls(
            "gpt",
            n_layers,
            hidden,
            ffn or 4 * hidden,
            n_heads,
            n_heads,
            hidden // n_heads,
            vocab,
            max_positions,
            tied=tied,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            norm_bias=bias,
            gated=False,
            learned_positions=learned_positions,
        )

    @property
    def not_runnable(self) -> str | None:
        """Why the workers cannot build this model (planning for it is possible), or None when they can."""
        runnable = [name for name, family in FAMILIES.items() if family.runnable]
        if self.family not in runnable:
            return (
                f"{self.family} models can be planned for but not run yet: "
                f"the workers build {', '.join(runnable)}"
            )
        family = FAMILIES[self.family]
        other = {
            "a mixture of experts": self.moe and not family.moe,
            "latent attention": self.latent and not family.latent,
            "sliding-window attention": self.window and not family.windowed,
            "biases of its output or feed-forward": self.out_bias or self.mlp_bias,
            "biases of latent attention": self.latent and self.qkv_bias,
            "a feed-forward without gate": not self.gated,
            "learned positions": self.learned_positions,
            "norms with biases": self.norm_bias,
        }
        if asked := [what for what, there in other.items() if there]:
            return f"{self.family} with {', '.join(asked)} cannot be run"
        return None

    def check_runnable(self) -> None:
        """Raise ModelError when the workers cannot build this model."""
        if self.not_runnable:
            raise ModelError(self.not_runnable)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers, counted from 0, whose feed-forward is a mixture of experts."""
        if self.moe is None:
            return ()
        return tuple(sorted(set(range(self.n_layers)) - set(self.moe.dense_layers)))

    @property
    def n_dense_layers(self) -> int:
        """Layers with a dense feed-forward."""
        return self.n_layers - len(self.moe_layers)

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's attention, the norms inside of it included."""
        if self.latent:
            return self._latent_params(self.latent)
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        weights = self.hidden * (q + 2 * kv) + q * self.hidden
        biases = self.qkv_bias * (q + 2 * kv) + self.out_bias * self.hidden
        return weights + biases + self.qk_norm * 2 * self.head_dim

    def _latent_params(self, latent: LatentAttention) -> int:
        q = self.n_heads * self.head_dim
        if latent.q_rank is None:
            query = self.hidden * q
        else:
            query = latent.q_rank * (self.hidden + self.qkv_bias + 1 + q)  # down, its bias, norm, up
        down = latent.kv_rank + latent.rope_dim
        keys = down * (self.hidden + self.qkv_bias) + latent.kv_rank  # the norm's
        keys += latent.kv_rank * self.n_heads * (latent.nope_dim + latent.v_dim)
        return query + keys + self.hidden * (self.n_heads * latent.v_dim + self.out_bias)

    @property
    def cached_values(self) -> int:
        """Values that the KV cache holds per token and layer, over all heads."""
        if self.latent:
            return self.latent.kv_rank + self.latent.rope_dim
        return 2 * self.n_kv_heads * self.head_dim

    @property
    def norm_params(self) -> int:
        """Parameters of one norm over the hidden size."""
        return self.hidden * (1 + self.norm_bias)

    @property
    def ffn_params(self) -> int:
        """Parameters of one dense feed-forward."""
        return self._mlp_params(self.ffn) + self.mlp_bias * ((1 + self.gated) * self.ffn + self.hidden)

    def _mlp_params(self, columns: int) -> int:
        return (2 + self.gated) * self.hidden * columns

    @property
    def expert_params(self) -> int:
        """Parameters of one routed expert; 0 without experts."""
        return self._mlp_params(self.moe.ffn) if self.moe else 0

    @property
    def shared_params(self) -> int:
        """Parameters of one layer's shared experts with their gate, and of its router; 0 without experts."""
        if self.moe is None:
            return 0
        return self._mlp_params(self.moe.shared_ffn) + self.hidden * (self.moe.shared_gate + self.moe.n)

    @property
    def layer_params(self) -> int:
        """Parameters of one decoder layer with a dense feed-forward."""
        return self.attention_params + self.ffn_params + 2 * self.norm_params

    @property
    def moe_layer_params(self) -> int:
        """Parameters of one decoder layer with a mixture of experts; 0 without experts."""
        if self.moe is None:
            return 0
        return (
            self.attention_params
            + 2 * self.norm_params
            + self.shared_params
            + self.moe.n * self.expert_params
        )

    @property
    def embedding_params(self) -> int:
        """Parameters before the first layer: tokens, and positions where they are learned."""
        return (self.vocab + self.learned_positions * self.max_positions) * self.hidden

    @property
    def head_params(self) -> int:
        """Parameters after the final norm: none when the head is the embedding itself."""
        if self.n_labels is not None:
            return self.n_labels * (self.hidden + self.label_bias)
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def n_params(self) -> int:
        """Parameters of the whole model, a shared matrix counted once, vocabulary not padded."""
        layers = self.n_dense_layers * self.layer_params + len(self.moe_layers) * self.moe_layer_params
        return self.embedding_params + layers + self.norm_params + self.head_params

    @property
    def active_params(self) -> int:
        """Parameters that one token passes: all but the routed experts it is not sent to."""
        idle = self.moe.n - self.moe.top_k if self.moe else 0
        return self.n_params - len(self.moe_layers) * idle * self.expert_params


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
