"""Log-probabilities and entropies straight from hidden states and the lm head, without whole logits."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rolemesh.kernels.arrays import wide_dtype
from rolemesh.kernels.forms import form_of, group_name, group_named, note_kernel
from rolemesh.kernels.labels import check_labels
from rolemesh.kernels.library import torch_op
from rolemesh.kernels.log_prob import (
    backward_numbers,
    blank_bad_labels,
    check_types,
    checked_vocab_size,
    fake_outputs,
    finish,
    log_prob_backward,
    log_prob_stats,
    new_stats,
    shard_columns,
)

# A tile holds at most this share of the logits and this many elements of them (16 MiB and 256 MiB of fp32).
_SHARE = 1 / 32
_CPU_TILE, _GPU_TILE = 1 << 22, 1 << 26
# Below this it is not worth cutting.
_SMALL_TILE = 1 << 16
_CPU_ROWS, _GPU_ROWS = 1024, 8192


def linear_log_prob_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = True,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`log_prob_and_entropy(hidden @ weight.T, labels)` with only a tile of the logits at any time.

    Forward and backward walk over tiles of tokens x vocabulary; the backward pass makes each tile anew (a
    fourth matrix product beside the three of a plain linear layer) and writes the tile's gradient in place.

    Args:
        hidden: [n, h] float, the same on every rank of `group`.
        weight: [v, h] of the same type: the lm head, or the embedding that a model ties to it. With `group`
            this rank's shard: rows `rank * v` to `(rank + 1) * v` of the vocabulary.
        labels: [n] int64, ids in the whole vocabulary, the same on every rank.
        temperature, entropy, group, vocab_size: as for `log_prob_and_entropy`.

    Returns:
        log_prob [n] and entropy [n] (or None), fp32 (float64 for float64), the same on every rank. The
        gradient of `hidden` is summed over the ranks; that of `weight` is this rank's shard, 0 for padding.

    Raises:
        ValueError: as `log_prob_and_entropy`, and for hidden and weight of different types or widths.
    """
    fit = hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1]
    if not fit or labels.shape != hidden.shape[:1]:
        shapes = [[*hidden.shape], [*weight.shape], [*labels.shape]]
        raise ValueError("want hidden [n, h], weight [v, h], labels [n], got {}, {}, {}".format(*shapes))
    check_types(hidden, labels)
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, weight is {weight.dtype}: both must be of one type")
    vocab_size = checked_vocab_size(weight.shape[0], group, vocab_size, temperature)
    log_prob, token_entropy, _ = _linear_log_prob_and_entropy(
        hidden, weight, labels, temperature, entropy, group_name(group), vocab_size
    )
    return log_prob, token_entropy if entropy else None


@dataclass(frozen=True)
class _Tiles:
    """Cuts [n, v] logits into tiles of `rows` x `columns`."""

    n: int
    v: int
    rows: int
    columns: int

    @classmethod
    def cut(cls, n: int, v: int, device: torch.device) -> "_Tiles":
        limit, most_rows = (_CPU_TILE, _CPU_ROWS) if device.type == "cpu" else (_GPU_TILE, _GPU_ROWS)
        elements = min(max(int(n * v * _SHARE), _SMALL_TILE), limit)
        rows = max(min(n, most_rows), 1)
        return cls(n, v, rows, min(max(elements // rows, 1), max(v, 1)))

    def row_slices(self) -> list[slice]:
        return [slice(start, min(start + self.rows, self.n)) for start in range(0, self.n, self.rows)]

    def column_slices(self) -> list[slice]:
        return [slice(start, min(start + self.columns, self.v)) for start in range(0, self.v, self.columns)]

    def __iter__(self) -> Iterator[tuple[slice, int, slice]]:
        """Columns, the number of the run of rows, rows: a part of the weight stays in the cache."""
        for columns in self.column_slices():
            for number, rows in enumerate(self.row_slices()):
                yield columns, number, rows


def _logits(hidden: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    """hidden [n, h] @ weight [v, h].T as [n, v] in the buffer's memory."""
    tile = buffer[: len(hidden) * len(weight)].view(len(hidden), len(weight))
    return torch.mm(hidden, weight.T, out=tile)


def _fake_gradients(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    with_hidden, with_weight = rest[-2:]
    return (
        hidden.new_empty(hidden.shape if with_hidden else 0),
        weight.new_empty(weight.shape if with_weight else 0),
    )


@torch_op(fake=_fake_gradients)
def _linear_log_prob_and_entropy_backward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    numbers: Tensor,
    temperature: float,
    entropy: bool,
    group: str | None,
    vocab_size: int,
    with_hidden: bool,
    with_weight: bool,
) -> tuple[Tensor, Tensor]:
    ranks = group_named(group)
    offset, v = shard_columns(weight.shape[0], ranks, vocab_size)
    local = labels - offset
    tiles = _Tiles.cut(len(hidden), v, hidden.device)
    buffer = hidden.new_empty(tiles.rows * tiles.columns)
    parts = [numbers[:, rows].contiguous() for rows in tiles.row_slices()]
    dtype = wide_dtype(hidden)
    hidden_grad = hidden.new_zeros(hidden.shape if with_hidden else 0, dtype=dtype)
    weight_grad = weight.new_zeros(weight.shape if with_weight else 0)
    weight_sum = weight.new_empty((tiles.columns, weight.shape[1]) if with_weight else 0, dtype=dtype)
    for columns, number, rows in tiles:
        tile = _logits(hidden[rows], weight[columns], buffer)
        log_prob_backward(tile, local[rows] - columns.start, parts[number], 1 / temperature, entropy, tile)
        if with_hidden:
            _add_product(hidden_grad[rows], tile, weight[columns])
        if with_weight and len(parts) == 1:
            torch.mm(tile.T, hidden, out=weight_grad[columns])
        elif with_weight:
            total = weight_sum[: columns.stop - columns.start]
            _add_product(total.zero_() if number == 0 else total, tile.T, hidden[rows])
            if number == len(parts) - 1:
                weight_grad[columns] = total
    if with_hidden and ranks is not None:
        dist.all_reduce(hidden_grad, group=ranks)
    return hidden_grad.to(hidden.dtype), weight_grad


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where total may be of higher precision than the factors."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, out=total)
    else:
        total += left @ right


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, labels, *ctx.settings = inputs
    _, token_entropy, rows = output
    ctx.mark_non_differentiable(rows)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, labels, token_entropy, rows)


def _backward(
    ctx: Any, log_prob_grad: Tensor | None, entropy_grad: Tensor | None, _: None
) -> tuple[Any, ...]:
    hidden, weight, labels, token_entropy, rows = ctx.saved_tensors
    temperature, entropy, group, vocab_size = ctx.settings
    with_entropy = entropy and entropy_grad is not None
    numbers = backward_numbers(rows, token_entropy, log_prob_grad, entropy_grad if with_entropy else None)
    with_hidden, with_weight = ctx.needs_input_grad[:2]
    hidden_grad, weight_grad = _linear_log_prob_and_entropy_backward(
        hidden,
        weight,
        labels,
        numbers,
        temperature,
        with_entropy,
        group,
        vocab_size,
        with_hidden,
        with_weight,
    )
    none = (None, None, None, None, None)
    return hidden_grad if with_hidden else None, weight_grad if with_weight else None, *none


def _fake_linear(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, entropy: bool, *_: Any
) -> Any:
    return fake_outputs(hidden, entropy)


@torch_op(fake=_fake_linear, setup=_setup, backward=_backward)
def _linear_log_prob_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    entropy: bool,
    group: str | None,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    check_labels(labels, vocab_size)
    note_kernel("linear_log_prob_and_entropy", form_of(hidden.device))
    ranks = group_named(group)
    offset, v = shard_columns(weight.shape[0], ranks, vocab_size)
    local = labels - offset
    tiles = _Tiles.cut(len(hidden), v, hidden.device)
    buffer = hidden.new_empty(tiles.rows * tiles.columns)
    stats = [new_stats(rows.stop - rows.start, hidden) for rows in tiles.row_slices()]
    for columns, number, rows in tiles:
        tile = _logits(hidden[rows], weight[columns], buffer)
        log_prob_stats(tile, local[rows] - columns.start, stats[number], 1 / temperature, entropy)
    whole = torch.cat(stats, dim=1) if stats else new_stats(0, hidden)
    log_prob, token_entropy, numbers = finish(whole, 1 / temperature, entropy, ranks)
    return blank_bad_labels(log_prob, labels, vocab_size), token_entropy, numbers
