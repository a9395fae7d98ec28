"""How responses are drawn: the options, and a sampler whose draws belong to the row, not to the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper


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


class RowSampler(LogitsProcessor):
    """Chooses each row's next token and leaves only it to `generate`, run greedily.

    `generate` itself draws all rows from one generator, so a row's response would depend on its neighbours.
    Here row i puts `uniforms[i, step]` through its inverse cumulative distribution. `log_probs` collects, per
    step, the chosen token's log-probability [b] under the policy at `temperature`, before top-k and top-p
    take tokens away: that is what the trainer recomputes.
    """

    def __init__(self, options: SamplingOptions, uniforms: Tensor | None) -> None:
        self.temperature = options.temperature
        self.uniforms = uniforms  # [b, max_response_tokens]; None: greedy
        self.truncate = LogitsProcessorList()
        if options.top_k:
            self.truncate.append(TopKLogitsWarper(options.top_k))
        if options.top_p < 1:
            self.truncate.append(TopPLogitsWarper(options.top_p))
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`scores` [b, v] fp32 logits in; out: 0 at the chosen token and -inf elsewhere."""
        log_probs = (scores / self.temperature).log_softmax(-1)
        if self.uniforms is None:
            chosen = scores.argmax(-1, keepdim=True)
        else:
            kept = self.truncate(input_ids, log_probs)  # type: ignore[arg-type]  # asks for torch.LongTensor
            cumulative = kept.double().softmax(-1).cumsum(-1)
            step = len(self.log_probs)
            threshold = self.uniforms[:, step : step + 1] * cumulative[:, -1:]
            # right=True: the first token whose sum exceeds the threshold, so never one of probability 0.
            chosen = torch.searchsorted(cumulative, threshold, right=True).clamp(max=scores.shape[-1] - 1)
        self.log_probs.append(log_probs.gather(-1, chosen).squeeze(-1))
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0.0)
