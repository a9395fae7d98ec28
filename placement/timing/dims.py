"""The sizes of a model that decide how long it takes: a decoder of any family, as its matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rolemesh.placement.model import ModelShape


@dataclass(frozen=True)
class Dims:
    """Matrix sizes of a decoder. `ffn` is the width of dense layers, `expert_ffn` of one expert.

    `gated` feed-forwards have an up and a gate matrix. `n_dense_layers` counts the leading layers of a
    mixture-of-experts model that have a plain feed-forward. Latent attention (DeepSeek) is `kv_rank` > 0:
    queries and keys are `head_dim` wide, values `value_dim`, and the cache holds `kv_rank` + `rope_dim`
    numbers of a token. `window` > 0 limits attention to that many tokens on `windowed` of the layers;
    `attention_share` is the part of the layers that have softmax attention at all. `gate_dim` is how much
    wider the first attention matrix is than queries, keys and values: output gates, or what linear attention
    has more (mean over the layers). `head_columns` is the width of the head, 0: the vocabulary.
    """

    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    n_experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    n_dense_layers: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    window: int = 0
    windowed: float = 0.0
    attention_share: float = 1.0
    gate_dim: int = 0
    head_columns: int = 0

    @classmethod
    def of(cls, shape: ModelShape | Dims) -> Dims:
        """The sizes of a `ModelShape`; a `Dims` is itself."""
        if isinstance(shape, Dims):
            return shape
        sizes: dict[str, Any] = {
            "tied": shape.tied and shape.n_labels is None,
            "gated": shape.gated,
            "window": shape.window or 0,
            "windowed": 1.0 if shape.window else 0.0,
        }
        if moe := shape.moe:
            sizes |= {"n_experts": moe.n, "top_k": moe.top_k, "expert_ffn": moe.ffn}
            sizes |= {"shared_ffn": moe.shared_ffn, "n_dense_layers": shape.n_dense_layers}
        if latent := shape.latent:
            sizes |= {"q_rank": latent.q_rank or 0, "kv_rank": latent.kv_rank}
            sizes |= {"rope_dim": latent.rope_dim, "value_dim": latent.v_dim}
        head = shape.vocab if shape.n_labels is None else shape.n_labels
        kept = (shape.n_layers, shape.hidden, shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.ffn)
        return cls(*kept, shape.vocab, head_columns=head, **sizes)

    @property
    def q_dim(self) -> int:
        """Width of all queries."""
        return self.n_heads * self.head_dim

    @property
    def v_dim(self) -> int:
        """Width of all attention outputs."""
        return self.n_heads * (self.value_dim or self.head_dim)

    @property
    def n_moe_layers(self) -> int:
        """Layers with experts."""
        return self.n_layers - self.n_dense_layers if self.n_experts else 0

    @property
    def cache_numbers(self) -> float:
        """Numbers that the KV cache holds of one token in one layer (mean over the layers)."""
        each = self.kv_rank + self.rope_dim if self.kv_rank else 2 * self.n_kv_heads * self.head_dim
        return each * self.attention_share

    def attention_weights(self) -> list[tuple[int, int, str]]:
        """(in, out, cut) of each attention matrix; `cut` says which side tp divides: in, out or none."""
        h = self.hidden
        if not self.kv_rank:
            kv = self.n_kv_heads * self.head_dim
            return [(h, self.q_dim + 2 * kv + self.gate_dim, "out"), (self.v_dim, h, "in")]
        up = self.n_heads * (self.head_dim - self.rope_dim) + self.v_dim
        down = self.kv_rank + self.rope_dim
        if not self.q_rank:
            return [
                (h, self.q_dim, "out"),
                (h, down, "none"),
                (self.kv_rank, up, "out"),
                (self.v_dim, h, "in"),
            ]
        return [
            (h, self.q_rank + down, "none"),
            (self.q_rank, self.q_dim, "out"),
            (self.kv_rank, up, "out"),
            (self.v_dim, h, "in"),
        ]

    def ffn_weights(self, width: int) -> list[tuple[int, int, str]]:
        """(in, out, cut) of a feed-forward of that width."""
        return [(self.hidden, width * (2 if self.gated else 1), "out"), (width, self.hidden, "in")]

    def attention_params(self) -> int:
        """Parameters of one layer's attention matrices."""
        return sum(i * o for i, o, _ in self.attention_weights())

    def ffn_params(self, width: int) -> int:
        """Parameters of one feed-forward of that width."""
        return sum(i * o for i, o, _ in self.ffn_weights(width))

    def dense_params(self) -> int:
        """Parameters outside experts and embeddings (norms and biases left out: under 0.1%)."""
        moe, dense = self.n_moe_layers, self.n_layers - self.n_moe_layers
        shared = self.ffn_params(self.shared_ffn) + self.hidden * self.n_experts
        return self.n_layers * self.attention_params() + dense * self.ffn_params(self.ffn) + moe * shared

    def expert_params(self) -> int:
        """Parameters of all experts."""
        return self.n_moe_layers * self.n_experts * self.ffn_params(self.expert_ffn)

    def embedding_params(self) -> int:
        """Parameters of the embedding and, where it is not tied, of the head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)
