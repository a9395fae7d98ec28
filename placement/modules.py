"""Parts of a model whose sizes are their own: experts, latent attention."""

from __future__ import annotations

from dataclasses import dataclass


class ModelError(ValueError):
    """A model configuration that is incomplete or of a kind that is not supported."""


@dataclass(frozen=True)
class Experts:
    """The feed-forward of a mixture-of-experts layer: a router sends each token to `top_k` of `n` experts.

    The router is a matrix; a correction bias that balances the load is no parameter (a buffer, not trained).

    Attributes:
        ffn: columns of one routed expert.
        shared_ffn: columns of the shared experts together, which every token passes; 0 without.
        shared_gate: the shared expert's output is weighed by a gate of its own (one more column).
        dense_layers: layers, counted from 0, that have a dense feed-forward instead.
    """

    n: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_sizes(self, "n", "top_k", "ffn")
        if self.top_k > self.n:
            raise ModelError(
                f"top_k={self.top_k} of {self.n} experts: a token cannot take more than there are"
            )


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values from one small vector.

    A head's query and key have `nope_dim` values without and `rope_dim` with rotary position, the latter
    shared by all keys of a token; the cache holds `kv_rank + rope_dim` values per token and layer.
    `q_rank` None: queries are projected in one step.
    """

    kv_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    q_rank: int | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "kv_rank", "rope_dim", "nope_dim", "v_dim", *["q_rank"] * (self.q_rank is not None))


def check_sizes(value: object, *names: str) -> None:
    """Raise ModelError unless each named attribute is a whole number of at least 1."""
    for name in names:
        size = getattr(value, name)
        if type(size) is not int or size < 1:
            raise ModelError(f"{name} must be a whole number of at least 1, got {size!r}")
