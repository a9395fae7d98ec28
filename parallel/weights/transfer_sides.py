"""What the ranks of a training role and of a generation engine hold, as cuts of Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from rolemesh.parallel.weights.families import family_map
from rolemesh.parallel.weights.pieces import (
    Columns,
    Cut,
    Expert,
    GateUp,
    HfTensor,
    Piece,
    QueryKeyValue,
    Rows,
    Rule,
    VocabRows,
)
from rolemesh.parallel.weights.plan import Head, rank_plan
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape

VLLM_VOCAB_MULTIPLE = 64
"""vLLM pads a vocabulary to a multiple of this before it cuts it."""


class Side(Protocol):
    """One end of a transfer. Each rank's tensors go by names of the side's own."""

    @property
    def n_ranks(self) -> int: ...

    def dtype_of(self, tensor: str) -> torch.dtype:
        """The type in which the side keeps a Hugging Face tensor."""

    def holdings(self) -> Sequence[Mapping[str, Cut]]:
        """For each rank, its tensors by name: shape, and which Hugging Face numbers are where in it."""


@dataclass(frozen=True)
class MegatronSide:
    """Megatron ranks; tensors go by their canonical parameter names (`weights.plan`)."""

    shape: ModelShape
    layout: Layout
    dtype: torch.dtype
    head: Head = "lm"

    @property
    def n_ranks(self) -> int:
        return self.layout.world

    def dtype_of(self, tensor: str) -> torch.dtype:
        return torch.float32 if tensor in _kept_in_fp32(self.shape) else self.dtype

    def holdings(self) -> list[Mapping[str, Cut]]:
        made: dict[tuple[int, ...], Mapping[str, Cut]] = {}  # replicas hold the same
        held = []
        for rank in range(self.layout.world):
            at, expert = self.layout.coords(rank), self.layout.expert_coords(rank)
            key = (at.pp, at.tp, expert.ep)
            if key not in made:
                plans = rank_plan(self.shape, self.layout, rank, self.head)
                made[key] = {plan.name: plan.cuts[at.tp] for plan in plans}
            held.append(made[key])
        return held

    def __str__(self) -> str:
        return f"a {self.shape.family} model over {self.layout}"


@dataclass(frozen=True)
class EngineSide:
    """Generation engines: `replicas` of them over `tp` ranks each, rank = replica * tp + tp rank.

    A rank's tensors have Hugging Face names. Of one that vLLM cuts over tp it holds its own part alone, all
    that vLLM's loaders read of it: `parts` says which. `tp` 1 is a full copy.
    """

    shape: ModelShape
    dtype: torch.dtype
    tp: int = 1
    replicas: int = 1

    @property
    def n_ranks(self) -> int:
        return self.tp * self.replicas

    def dtype_of(self, tensor: str) -> torch.dtype:
        return torch.float32 if tensor in _kept_in_fp32(self.shape) else self.dtype

    def holdings(self) -> Sequence[Mapping[str, Cut]]:
        of_tp = [
            {tensor.name: _held(tensor.name, part) for tensor, part in self.parts(rank)}
            for rank in range(self.tp)
        ]
        return of_tp * self.replicas

    def parts(self, tp_rank: int) -> Iterator[tuple[HfTensor, tuple[slice, ...]]]:
        """Every tensor of the model, in its order, and which numbers of it the tp rank holds; maybe none."""
        for rule in _whole_model(self.shape):
            for tensor in rule.tensors:
                own = rule.rule if isinstance(rule, Expert) else rule
                yield tensor, _engine_part(own, tensor, self.tp, tp_rank)

    def __str__(self) -> str:
        cut = f" over tp={self.tp}" if self.tp > 1 else ""
        return f"{self.replicas} engines of a {self.shape.family} model{cut}"


@lru_cache(maxsize=4)
def _kept_in_fp32(shape: ModelShape) -> frozenset[str]:
    """Tensors that are fp32 whatever the model's type."""
    return frozenset(tensor.name for rule in _whole_model(shape) for tensor in rule.tensors if tensor.fp32)


def _held(name: str, part: tuple[slice, ...]) -> Cut:
    sizes = tuple(side.stop - side.start for side in part)
    own = tuple(slice(0, size) for size in sizes)
    return Cut(sizes, (Piece(name, part, own),) if all(sizes) else ())


def _whole_model(shape: ModelShape) -> Iterator[Rule]:
    """The rule of every parameter of the model, each once."""
    weights = family_map(shape)
    yield weights.embedding
    for n in range(shape.n_layers):
        yield from weights.layer(n).values()
    yield weights.final_norm
    if not shape.tied:
        yield weights.lm_head


def _engine_part(rule: Rule, tensor: HfTensor, tp: int, rank: int) -> tuple[slice, ...]:
    """What vLLM's tp rank reads of one of a rule's tensors; all of it where it does not cut."""
    n_rows, *rest = tensor.shape
    whole = tuple(slice(0, size) for size in rest)
    if isinstance(rule, Columns):
        return (slice(0, n_rows), _equal_part(rest[0], tp, rank))
    if isinstance(rule, QueryKeyValue) and tensor is not rule.query:
        copies = max(1, tp // (n_rows // rule.head_dim))  # ranks that share a key-value head
        return (_equal_part(n_rows, tp // copies, rank // copies), *whole)
    if isinstance(rule, VocabRows):
        padded = -(-n_rows // VLLM_VOCAB_MULTIPLE) * VLLM_VOCAB_MULTIPLE
        rows = _equal_part(padded, tp, rank)
        return (slice(min(rows.start, n_rows), min(rows.stop, n_rows)), *whole)
    if isinstance(rule, GateUp | QueryKeyValue | Rows):
        return (_equal_part(n_rows, tp, rank), *whole)
    return (slice(0, n_rows), *whole)


def _equal_part(size: int, parts: int, index: int) -> slice:
    return slice(index * size // parts, (index + 1) * size // parts)
