"""Parts of a model that have sizes of their own: routers, experts, latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class ModelError(ValueError):
    """A model configuration that is incomplete or of a kind that is not supported."""


@dataclass(frozen=True)
class Router:
    """How a token's experts and their weights follow from the router's outputs, one number per expert.

    Attributes:
        score: what makes scores of the outputs.
        bias: a correction is added to the scores where experts are chosen, not where they are weighed; it is
            no parameter (a buffer, not trained).
        n_groups: the experts form so many groups, of which only the `top_groups` best are chosen from; a
            group is as good as the sum of its `group_best` best scores.
        norm: the weights of the chosen experts add up to 1 (before they are multiplied by `scale`).
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    norm: bool = True
    scale: float = 1.0
    bias: bool = False
    n_groups: int = 1
    top_groups: int = 1
    group_best: int = 1


@dataclass(frozen=True)
class Experts:
    """The feed-forward of a mixture-of-experts layer: a router sends each token to `top_k` of `n` experts.

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
    router: Router = Router()

    def __post_init__(self) -> None:
        check_sizes(self, "n", "top_k", "ffn")
        if self.top_k > self.n:
            raise ModelError(
                f"top_k={self.top_k} of {self.n} experts: a token cannot take more than there are"
            )
        if self.n % self.router.n_groups:
            raise ModelError(f"{self.router.n_groups} groups do not divide the {self.n} experts")


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
