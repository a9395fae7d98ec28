"""Log-probability of given tokens and entropy of their distribution, from logits cut over the vocabulary.

A row's distribution is held in four numbers (`stats`), which grow tile by tile ("online softmax", Milakov and
Gimelshein 2018): a reference m near the largest logit, s = sum exp((x - m) / T), t = sum of those times their
exponent, and the label's logit. m and the label's logit are raw, so that x - m is exact also at 1e4.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rolemesh.kernels.arrays import wide_dtype
from rolemesh.kernels.forms import (
    Kernel,
    continued_record,
    current_record,
    form_of,
    gather_ranks,
    group_name,
    group_named,
    note_kernel,
)
from rolemesh.kernels.labels import check_labels
from rolemesh.kernels.library import torch_op

# Elements of logits that the plain form works on at a time, so that it makes no temporary of their size.
_CPU_CHUNK, _GPU_CHUNK = 1 << 18, 1 << 24


def log_prob_and_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = True,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-softmax of `logits / temperature` at `labels`, and the entropy of that distribution, in nats.

    The logits are read once, forward and backward, with fp32 accumulation; beside them and the gradient only
    a few numbers per row exist. NaN stays visible; -inf is probability 0.

    Args:
        logits: [n, v] of any float type and strides. With `group` this rank's shard of the vocabulary:
            columns `rank * v` to `(rank + 1) * v`, the same width on every rank.
        labels: [n] int64, ids in the whole vocabulary, the same on every rank.
        temperature: above 0, finite.
        entropy: False skips the entropy and returns None for it.
        group: tensor-parallel ranks, all of which call: one collective for four numbers per row. Each must
            backpropagate the same gradient, as ranks do that go on to compute the same loss.
        vocab_size: columns from this global one on are padding of the model's vocabulary and do not count.
        inplace_backward: the gradient overwrites the logits, which nothing may need any more; a second
            backward pass is refused. Eager only.

    Returns:
        log_prob [n] <= 0 and entropy [n] in [0, ln vocabulary], fp32 (float64 for float64 logits), the same
        on every rank of `group`.

    Raises:
        ValueError: shapes, types or devices do not fit, a temperature that is not above 0 or not finite,
            `inplace_backward` for logits whose rows overlap, or a label outside of the vocabulary (on a GPU
            the log-probability is NaN instead, and `raise_bad_labels` tells).
        RuntimeError: `inplace_backward` under torch.compile.
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(f"want logits [n, v] and labels [n], got {[*logits.shape]} and {[*labels.shape]}")
    check_types(logits, labels)
    vocab_size = checked_vocab_size(logits.shape[1], group, vocab_size, temperature)
    arguments = (logits, labels, temperature, entropy, group_name(group), vocab_size)
    if inplace_backward and not torch.compiler.is_compiling():
        log_prob, token_entropy = _InPlace.apply(*arguments)
    else:
        log_prob, token_entropy, _ = _log_prob_and_entropy(*arguments, inplace_backward)
    return log_prob, token_entropy if entropy else None


def check_types(rows: Tensor, labels: Tensor) -> None:
    """ValueError unless `rows`, logits or hidden states, are of a float type and `labels` are int64."""
    if not rows.is_floating_point() or labels.dtype != torch.int64:
        raise ValueError(f"want a float type and int64 labels, got {rows.dtype} and {labels.dtype}")


def checked_vocab_size(
    width: int, group: dist.ProcessGroup | None, vocab_size: int | None, temperature: float
) -> int:
    """The vocabulary that counts, of `width` columns on each rank. ValueError for one that does not fit."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}, must be above 0 and finite")
    world = 1 if group is None else group.size()
    vocab_size = width * world if vocab_size is None else vocab_size
    if not 0 < vocab_size <= width * world:
        raise ValueError(f"vocab_size is {vocab_size}, logits have {width} columns on each of {world} ranks")
    return vocab_size


def shard_columns(width: int, group: dist.ProcessGroup | None, vocab_size: int) -> tuple[int, int]:
    """First global column of this rank's shard, and how many of its `width` columns are no padding."""
    offset = 0 if group is None else group.rank() * width
    return offset, min(max(vocab_size - offset, 0), width)


def new_stats(n: int, like: Tensor) -> Tensor:
    """Stats [4, n] of rows of which nothing was seen, in the accumulation type for `like`."""
    stats = like.new_zeros((4, n), dtype=wide_dtype(like))
    stats[0] = -torch.inf
    return stats


def finish(
    stats: Tensor, inv_temperature: float, entropy: bool, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """log_prob [n], entropy [n] (empty without) and rows [2, n]: m and log s, from all ranks' `stats`.

    `stats` are used up: what is returned may lie in their memory.
    """
    if group is not None:
        stats = _merged(stats, inv_temperature, group)
    m, s, t, label = stats.unbind()
    exponent = t.div_(s) if entropy else t  # its mean
    log_sum = s.log_()
    log_prob = label.sub_(m).mul_(inv_temperature).sub_(log_sum).clamp_(max=0)
    token_entropy = (log_sum - exponent).clamp_(min=0) if entropy else stats.new_empty(0)
    return log_prob.clone(), token_entropy, stats[:2]


def _merged(stats: Tensor, inv_temperature: float, group: dist.ProcessGroup) -> Tensor:
    """Stats of the whole vocabulary. A maximum and sums that depend on it need no second collective."""
    m, s, t, label = gather_ranks(stats, group).unbind(dim=1)
    top = m.amax(dim=0)
    # -inf, a shard with nothing possible, becomes finite: its s and t are 0, and 0 * -inf is not.
    shift = ((m - top) * inv_temperature).clamp_(min=torch.finfo(m.dtype).min)
    scale = shift.exp()
    return torch.stack([top, (s * scale).sum(0), ((t + s * shift) * scale).sum(0), label.sum(0)])


def fake_outputs(rows: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of log_prob, entropy and rows without values, for `rows` [n, ...]."""
    n, dtype = rows.shape[0], wide_dtype(rows)
    token_entropy = rows.new_empty(n if entropy else 0, dtype=dtype)
    return rows.new_empty(n, dtype=dtype), token_entropy, rows.new_empty((2, n), dtype=dtype)


def blank_bad_labels(log_prob: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """`log_prob` with NaN where the label is outside of the vocabulary; a CPU has raised already."""
    if labels.device.type == "cpu":
        return log_prob
    return log_prob.masked_fill_((labels < 0) | (labels >= vocab_size), torch.nan)


def backward_numbers(
    rows: Tensor, token_entropy: Tensor, log_prob_grad: Tensor | None, entropy_grad: Tensor | None
) -> Tensor:
    """[5, n] for `log_prob_backward`: m, log s, entropy, and the gradients of log_prob and entropy."""
    m, log_sum = rows
    zero = torch.zeros_like(m)
    return torch.stack(
        [
            m,
            log_sum,
            zero if entropy_grad is None else token_entropy,
            zero if log_prob_grad is None else log_prob_grad.to(m.dtype),
            zero if entropy_grad is None else entropy_grad.to(m.dtype),
        ]
    )


def _write_gradient(
    logits: Tensor,
    labels: Tensor,
    numbers: Tensor,
    temperature: float,
    entropy: bool,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    out: Tensor,
) -> None:
    offset, columns = shard_columns(logits.shape[1], group, vocab_size)
    shard = _rows_contiguous(logits[:, :columns])
    log_prob_backward(shard, labels - offset, numbers, 1 / temperature, entropy, out[:, :columns])
    out[:, columns:] = 0


def _fake_gradient(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


@torch_op(fake=_fake_gradient)
def _log_prob_and_entropy_backward(
    logits: Tensor,
    labels: Tensor,
    numbers: Tensor,
    temperature: float,
    entropy: bool,
    group: str | None,
    vocab_size: int,
) -> Tensor:
    grad = logits.new_empty(logits.shape)
    _write_gradient(logits, labels, numbers, temperature, entropy, group_named(group), vocab_size, grad)
    return grad


def _fake_log_prob(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    entropy: bool,
    group: str | None,
    vocab_size: int,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    # Only traced calls come here with it. After an error before tracing torch.compile would run it eagerly.
    if inplace_backward:
        raise ValueError("inplace_backward is for eager mode: torch.compile plans memory on its own")
    return fake_outputs(logits, entropy)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, labels, *ctx.settings, _ = inputs
    _, token_entropy, rows = output
    ctx.mark_non_differentiable(rows)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, labels, token_entropy, rows)


def _backward(
    ctx: Any, log_prob_grad: Tensor | None, entropy_grad: Tensor | None, _: None
) -> tuple[Any, ...]:
    logits, labels, token_entropy, rows = ctx.saved_tensors
    temperature, entropy, group, vocab_size = ctx.settings
    with_entropy = entropy and entropy_grad is not None
    numbers = backward_numbers(rows, token_entropy, log_prob_grad, entropy_grad if with_entropy else None)
    grad = _log_prob_and_entropy_backward(
        logits, labels, numbers, temperature, with_entropy, group, vocab_size
    )
    return grad, None, None, None, None, None, None


@torch_op(fake=_fake_log_prob, setup=_setup, backward=_backward)
def _log_prob_and_entropy(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    entropy: bool,
    group: str | None,
    vocab_size: int,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    check_labels(labels, vocab_size)
    note_kernel("log_prob_and_entropy", form_of(logits.device))
    ranks = group_named(group)
    offset, columns = shard_columns(logits.shape[1], ranks, vocab_size)
    stats = new_stats(len(logits), logits)
    shard = _rows_contiguous(logits[:, :columns])
    log_prob_stats(shard, labels - offset, stats, 1 / temperature, entropy)
    log_prob, token_entropy, rows = finish(stats, 1 / temperature, entropy, ranks)
    return blank_bad_labels(log_prob, labels, vocab_size), token_entropy, rows


class _InPlace(torch.autograd.Function):
    """The same with a gradient that overwrites the logits, which `torch.library` has no word for."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        if not _has_plain_rows(logits):
            shape, strides = [*logits.shape], logits.stride()
            raise ValueError(
                f"inplace_backward wants rows of their own memory, not {shape} of strides {strides}"
            )
        output = _log_prob_and_entropy(logits, labels, *settings)
        ctx.save_for_backward(logits, labels, *output[1:])
        ctx.settings, ctx.spent, ctx.record = settings, False, current_record()
        ctx.set_materialize_grads(False)
        return output[0], output[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, log_prob_grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Any, ...]:
        if ctx.spent:
            raise RuntimeError("a second backward pass: the first one wrote its gradient over the logits")
        ctx.spent = True
        logits, labels, token_entropy, rows = ctx.saved_tensors
        temperature, entropy, group, vocab_size = ctx.settings
        with_entropy = entropy and entropy_grad is not None
        numbers = backward_numbers(rows, token_entropy, log_prob_grad, entropy_grad if with_entropy else None)
        grad = logits.detach()
        with continued_record(ctx.record):
            _write_gradient(
                grad, labels, numbers, temperature, with_entropy, group_named(group), vocab_size, grad
            )
        torch.autograd.graph.increment_version(logits)  # whoever else saved the logits is told, not misled
        return grad, None, None, None, None, None


def _has_plain_rows(logits: Tensor) -> bool:
    n, v = logits.shape
    return (v <= 1 or logits.stride(1) == 1) and (n <= 1 or logits.stride(0) >= v)


def _rows_contiguous(logits: Tensor) -> Tensor:
    return logits if _has_plain_rows(logits) else logits.contiguous()


def log_prob_stats_reference(
    logits: Tensor, labels: Tensor, stats: Tensor, inv_temperature: float, entropy: bool
) -> None:
    """Merge the tile `logits` [n, v], with labels counted from its first column, into `stats` [4, n]."""
    if not logits.shape[1]:
        return
    m = torch.maximum(stats[0], logits.amax(dim=1).to(stats.dtype))
    # Before anything possible was seen there is nothing to rescale, and -inf - -inf would be NaN.
    shift = torch.where(stats[0] == -torch.inf, 0.0, (stats[0] - m) * inv_temperature)
    if entropy:
        stats[2] = (stats[2] + stats[1] * shift) * shift.exp()
    stats[1] *= shift.exp()
    stats[0] = m
    for rows in _chunks(logits):
        exponent = _exponent(logits[rows], m[rows], inv_temperature)
        stats[3, rows] += _at_labels(logits[rows], labels[rows])
        p = exponent.exp()
        stats[1, rows] += p.sum(dim=1)
        if entropy:
            stats[2, rows] += _times_log(p, exponent).sum(dim=1)


def log_prob_backward_reference(
    logits: Tensor, labels: Tensor, numbers: Tensor, inv_temperature: float, entropy: bool, out: Tensor
) -> None:
    """Write the gradient of a tile's logits [n, v] to `out`, which may be the logits themselves."""
    m, log_sum, token_entropy, log_prob_grad, entropy_grad = numbers
    for rows in _chunks(logits):
        log_p = _exponent(logits[rows], m[rows], inv_temperature).sub_(log_sum[rows, None])
        p = log_p.exp()
        grad = p * -log_prob_grad[rows, None]
        if entropy:
            surprise = _times_log(p, log_p + token_entropy[rows, None])
            grad -= surprise * entropy_grad[rows, None]
        _add_at_labels(grad, labels[rows], log_prob_grad[rows])
        out[rows] = grad.mul_(inv_temperature).to(out.dtype)


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Runs of rows with a bounded number of elements; none for an empty tile."""
    if logits.numel():
        step = max((_CPU_CHUNK if logits.device.type == "cpu" else _GPU_CHUNK) // logits.shape[1], 1)
        for start in range(0, logits.shape[0], step):
            yield slice(start, start + step)


def _exponent(logits: Tensor, m: Tensor, inv_temperature: float) -> Tensor:
    """(x - m) / T; a row of only -inf so far keeps -inf in place of NaN."""
    m = torch.where(m == -torch.inf, 0.0, m)
    return logits.to(m.dtype, copy=True).sub_(m[:, None]).mul_(inv_temperature)


def _at_labels(rows: Tensor, local: Tensor) -> Tensor:
    """The raw logit of each row's label, 0 where this tile does not hold it."""
    held = (local >= 0) & (local < rows.shape[1])
    found = rows.gather(1, local.clamp(0, rows.shape[1] - 1)[:, None])[:, 0]
    return torch.where(held, found, 0.0)


def _add_at_labels(rows: Tensor, local: Tensor, amounts: Tensor) -> None:
    held = (local >= 0) & (local < rows.shape[1])
    rows.scatter_add_(1, local.clamp(0, rows.shape[1] - 1)[:, None], torch.where(held, amounts, 0.0)[:, None])


def _times_log(p: Tensor, log_p: Tensor) -> Tensor:
    """p * log_p with 0 * -inf = 0."""
    return log_p.clamp(min=torch.finfo(log_p.dtype).min).mul_(p)


def _stats_cpp(
    cpu: Any, logits: Tensor, labels: Tensor, stats: Tensor, inv_temperature: float, entropy: bool
) -> None:
    cpu.log_prob_stats(logits.detach(), labels, stats, inv_temperature, entropy, torch.get_num_threads())


def _backward_cpp(
    cpu: Any,
    logits: Tensor,
    labels: Tensor,
    numbers: Tensor,
    inv_temperature: float,
    entropy: bool,
    out: Tensor,
) -> None:
    cpu.log_prob_backward(
        logits.detach(), labels, numbers, inv_temperature, entropy, out, torch.get_num_threads()
    )


log_prob_stats = Kernel(
    "log_prob_stats", reference=log_prob_stats_reference, cpp=_stats_cpp, triton="log_prob"
)
log_prob_backward = Kernel(
    "log_prob_backward", reference=log_prob_backward_reference, cpp=_backward_cpp, triton="log_prob"
)
