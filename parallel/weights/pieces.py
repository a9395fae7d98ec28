"""How a megatron-core parameter is cut out of Hugging Face tensors: geometry, good for both directions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rolemesh.placement.model import padded_vocab


@dataclass(frozen=True)
class HfTensor:
    """Name and shape of a tensor in a Hugging Face checkpoint; `fp32`: whatever the model's dtype."""

    name: str
    shape: tuple[int, ...]
    fp32: bool = False


@dataclass(frozen=True)
class Piece:
    """`parameter[target]` and the Hugging Face tensor's `[source]` hold the same numbers."""

    tensor: str
    source: tuple[slice, ...]
    target: tuple[slice, ...]


@dataclass(frozen=True)
class Cut:
    """One tp rank's part of a parameter: its shape, and what fills it (rows no piece fills are zero)."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class Rule(Protocol):
    """How a parameter follows from Hugging Face tensors and how tp cuts it."""

    @property
    def tensors(self) -> tuple[HfTensor, ...]:
        """The whole Hugging Face tensors that the parameter is made of."""

    @property
    def whole(self) -> bool:
        """Whether every tp rank that has the parameter has all of it."""

    def cut(self, tp: int, rank: int) -> Cut:
        """The part of `rank` out of `tp`."""


@dataclass(frozen=True)
class Replicated:
    """The same tensor on every tp rank."""

    tensor: HfTensor
    whole: ClassVar[bool] = True

    @property
    def tensors(self) -> tuple[HfTensor, ...]:
        return (self.tensor,)

    def cut(self, tp: int, rank: int) -> Cut:
        whole = _whole(self.tensor.shape)
        return Cut(self.tensor.shape, (Piece(self.tensor.name, whole, whole),))


@dataclass(frozen=True)
class Buffer(Replicated):
    """The same tensor on every rank, in fp32 whatever the parameters' dtype, and never trained."""


@dataclass(frozen=True)
class Expert:
    """Routed expert `index` of a layer, on the ranks that have it: whole, or cut over all of tp."""

    index: int
    rule: Rule
    cut_over_tp: bool = False

    @property
    def tensors(self) -> tuple[HfTensor, ...]:
        return self.rule.tensors

    @property
    def whole(self) -> bool:
        return not self.cut_over_tp

    def cut(self, tp: int, rank: int) -> Cut:
        return self.rule.cut(tp, rank) if self.cut_over_tp else self.rule.cut(1, 0)


@dataclass(frozen=True)
class Rows:
    """Dimension 0 in equal parts (column-parallel layers: each rank makes a part of the outputs)."""

    tensor: HfTensor
    whole: ClassVar[bool] = False

    @property
    def tensors(self) -> tuple[HfTensor, ...]:
        return (self.tensor,)

    def cut(self, tp: int, rank: int) -> Cut:
        n_rows, *rest = self.tensor.shape
        height = n_rows // tp
        return _cut_rows([Run(self.tensor, 0, n_rows)], rank * height, height, rest)


@dataclass(frozen=True)
class Columns:
    """Dimension 1 in equal parts (row-parallel layers: each rank sees a part of the inputs)."""

    tensor: HfTensor
    whole: ClassVar[bool] = False

    @property
    def tensors(self) -> tuple[HfTensor, ...]:
        return (self.tensor,)

    def cut(self, tp: int, rank: int) -> Cut:
        n_rows, n_columns = self.tensor.shape
        width = n_columns // tp
        source = (slice(0, n_rows), slice(rank * width, (rank + 1) * width))
        return Cut((n_rows, width), (Piece(self.tensor.name, source, _whole((n_rows, width))),))


@dataclass(frozen=True)
class VocabRows:
    """Vocabulary rows, padded with zero rows until they divide by tp, in equal parts."""

    tensor: HfTensor
    whole: ClassVar[bool] = False

    @property
    def tensors(self) -> tuple[HfTensor, ...]:
        return (self.tensor,)

    def cut(self, tp: int, rank: int) -> Cut:
        vocab, *rest = self.tensor.shape
        height = padded_vocab(vocab, tp) // tp
        return _cut_rows([Run(self.tensor, 0, vocab)], rank * height, height, rest)


@dataclass(frozen=True)
class GateUp:
    """Gate and up projection in one: each rank has its rows of the gate, then those of the up projection."""

    gate: HfTensor
    up: HfTensor
    whole: ClassVar[bool] = False

    @property
    def tensors(self) -> tuple[HfTensor, ...]:
        return (self.gate, self.up)

    def cut(self, tp: int, rank: int) -> Cut:
        ffn, *rest = self.gate.shape
        part = ffn // tp
        runs = [Run(tensor, rank * part, part) for tensor in self.tensors]
        return _cut_rows(runs, 0, 2 * part, rest)


@dataclass(frozen=True)
class QueryKeyValue:
    """Query, key and value in one, KV group by KV group (q0 q1 k0 v0 | q2 q3 k1 v1), in equal parts over tp.

    With fewer KV groups than tp ranks a part may end inside a group: megatron-core stores it so and gathers
    the group's activations before attention.
    """

    query: HfTensor
    key: HfTensor
    value: HfTensor
    head_dim: int
    whole: ClassVar[bool] = False

    @property
    def tensors(self) -> tuple[HfTensor, ...]:
        return (self.query, self.key, self.value)

    def cut(self, tp: int, rank: int) -> Cut:
        n_rows = sum(tensor.shape[0] for tensor in self.tensors)
        height = n_rows // tp
        return _cut_rows(self._groups(), rank * height, height, self.query.shape[1:])

    def _groups(self) -> Iterator[Run]:
        n_groups = self.key.shape[0] // self.head_dim
        query_rows = self.query.shape[0] // n_groups
        for group in range(n_groups):
            yield Run(self.query, group * query_rows, query_rows)
            yield Run(self.key, group * self.head_dim, self.head_dim)
            yield Run(self.value, group * self.head_dim, self.head_dim)


@dataclass(frozen=True)
class Run:
    """`n_rows` rows of a tensor, from row `start`."""

    tensor: HfTensor
    start: int
    n_rows: int


def _cut_rows(runs: Iterable[Run], start: int, n_rows: int, rest: Iterable[int]) -> Cut:
    """Rows `start` to `start + n_rows` of the tensor that the runs make when laid end to end."""
    rest, pieces, at = tuple(rest), [], 0
    for run in runs:
        low, high = max(start, at), min(start + n_rows, at + run.n_rows)
        if low < high:
            source = slice(run.start + low - at, run.start + high - at)
            target = slice(low - start, high - start)
            pieces.append(Piece(run.tensor.name, (source, *_whole(rest)), (target, *_whole(rest))))
        at += run.n_rows
    return Cut((n_rows, *rest), tuple(pieces))


def _whole(shape: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)
