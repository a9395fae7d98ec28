"""Packed samples, and how context parallel ranks share them: which tokens a rank has and what each sees.

A packed sequence is segments one behind the other: samples, and maybe padding at the end. Attention is causal
inside of a segment and blind outside of it. Over cp ranks every segment is cut into 2 cp chunks of equal
length, and rank r has chunks r and 2 cp - 1 - r of each: an early and a late one, so that causal attention
costs all ranks the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


class Span(NamedTuple):
    """`n_queries` tokens of a rank that follow each other: the last ones of tokens `start` to `stop` of the
    whole sequence, which are what they may see.
    """

    n_queries: int
    start: int
    stop: int


@dataclass
class Packed(PackedSeqParams):
    """What megatron-core is told of a packed sequence, and what our attention needs beside it.

    Attributes:
        spans: this rank's tokens, in their order.
        order: [t] where each token of the sequence stands among the cp ranks' tokens laid end to end; None
            without context parallelism.
    """

    spans: Sequence[Span] = ()
    order: Tensor | None = None

    @classmethod
    def of(cls, bounds: Sequence[int], cp: int, rank: int, device: torch.device) -> Packed:
        """Segments `bounds[i]` to `bounds[i + 1]` as context parallel rank `rank` of `cp` sees them."""
        starts = torch.tensor(bounds, dtype=torch.int32, device=device)
        longest = max(stop - start for start, stop in _segments(bounds))
        order = None
        if cp > 1:
            laid = torch.cat([tokens_of(bounds, cp, other) for other in range(cp)])
            order = torch.argsort(laid).to(device)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            spans=tuple(_spans(bounds, cp, rank)),
            order=order,
        )


def tokens_of(bounds: Sequence[int], cp: int, rank: int) -> Tensor:
    """Places [t / cp] in the packed sequence of the tokens that a rank has, in the rank's order.

    Raises ValueError for a segment that cannot be cut into 2 cp chunks.
    """
    if cp == 1:
        return torch.arange(bounds[-1])
    chunks = [
        torch.arange(start + chunk * size, start + (chunk + 1) * size)
        for start, stop in _segments(bounds)
        for size in [_chunk_size(stop - start, cp)]
        for chunk in (rank, 2 * cp - 1 - rank)
    ]
    return torch.cat(chunks)


def _spans(bounds: Sequence[int], cp: int, rank: int) -> Iterator[Span]:
    for start, stop in _segments(bounds):
        if cp == 1:
            yield Span(stop - start, start, stop)
            continue
        size = _chunk_size(stop - start, cp)
        for chunk in (rank, 2 * cp - 1 - rank):
            yield Span(size, start, start + (chunk + 1) * size)


def _segments(bounds: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The segments that have tokens."""
    return ((start, stop) for start, stop in pairwise(bounds) if start < stop)


def _chunk_size(length: int, cp: int) -> int:
    if length % (2 * cp):
        raise ValueError(f"a segment of {length} tokens cannot be cut into 2 x cp={2 * cp} chunks: pad it")
    return length // (2 * cp)
