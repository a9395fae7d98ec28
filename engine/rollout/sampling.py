"""How responses are drawn: the options, and random numbers that belong to the row, not to the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class RolloutError(ValueError):
    """Generation cannot start: a model too large, weights that do not fit, or options out of range."""


@dataclass(frozen=True)
class SamplingOptions:
    """What a rollout engine needs besides weights and prompts.

    A response ends with the first of `eos_ids` and is padded with `pad_id`, which may be one of them.
    `top_k` 0 and `top_p` 1 mean off. `do_sample` False takes the most likely token. A new `seed` draws anew.
    `max_batch_tokens` bounds rows x (prompt width + `max_response_tokens`) generated at a time, and so the
    KV cache; one row is always allowed. It does not change what is drawn.
    """

    max_response_tokens: int
    eos_ids: tuple[int, ...]
    pad_id: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    do_sample: bool = True
    seed: int = 0
    max_batch_tokens: int = 131_072

    def __post_init__(self) -> None:
        if self.max_response_tokens < 1:
            raise RolloutError(f"max_response_tokens is {self.max_response_tokens}; it must be at least 1")
        if self.max_batch_tokens < 1:
            raise RolloutError(f"max_batch_tokens is {self.max_batch_tokens}; it must be at least 1")
        if self.temperature <= 0:
            raise RolloutError(f"temperature is {self.temperature}; use do_sample=False for greedy decoding")
        if not 0 < self.top_p <= 1:
            raise RolloutError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k < 0:
            raise RolloutError(f"top_k is {self.top_k}; it must be 0 (off) or the number of tokens to keep")


def row_uniforms(seed: int, row_ids: Tensor, n: int) -> Tensor:
    """`n` uniform numbers in [0, 1) per row, [b, n] float64, from `seed` and the row's own id [b] alone."""
    return seeded_uniforms([row_seed(seed, row_id) for row_id in row_ids.tolist()], n)


def seeded_uniforms(seeds: Sequence[int], n: int) -> Tensor:
    """`n` uniform numbers in [0, 1) per seed, [len(seeds), n] float64."""
    uniforms = torch.empty(len(seeds), n, dtype=torch.float64)
    for row, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        uniforms[row] = torch.rand(n, generator=generator, dtype=torch.float64)
    return uniforms


def row_seed(seed: int, row_id: int, n_done: int = 0) -> int:
    """The 63-bit seed of a row's random numbers; of those after its first `n_done` tokens, where a response
    is continued.
    """
    mixed = _mix(_mix(seed) ^ row_id)
    return _mix(mixed ^ n_done) if n_done else mixed


def _mix(x: int) -> int:
    """splitmix64's finaliser (Steele et al. 2014): neighbouring numbers get unrelated 63-bit seeds."""
    x = (x + 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) >> 1
