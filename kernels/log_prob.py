"""Log-probability of given tokens and entropy of their distribution, from logits cut over the vocabulary."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of logits worked on at a time: 1 MiB of fp32 stays in a core's cache; a GPU needs more to be busy.
_CPU_CHUNK, _GPU_CHUNK = 1 << 18, 1 << 24


def log_prob_and_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = True,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-softmax of `logits / temperature` at `labels`, and the entropy of that distribution, in nats.

    Rows are worked on in chunks with fp32 accumulation, forward and backward, so that beside the logits, the
    gradient and three numbers per row nothing of their size exists. NaN stays visible; -inf is probability 0.

    Args:
        logits: [n, v] of any float type and strides. With `group` this rank's shard of the vocabulary:
            columns `rank * v` to `(rank + 1) * v`, the same width on every rank.
        labels: [n] int64, ids in the whole vocabulary, the same on every rank.
        temperature: above 0.
        entropy: False skips the entropy and returns None for it.
        group: tensor-parallel ranks, all of which call. Each must backpropagate the same gradient, as ranks
            do that go on to compute the same loss.
        vocab_size: columns from this global one on are padding of the model's vocabulary and do not count.

    Returns:
        log_prob [n] <= 0 and entropy [n] in [0, ln vocabulary], fp32 (float64 for float64 logits), the same
        on every rank of `group`.

    Raises:
        ValueError: shapes do not fit, a temperature that is not above 0, or a label outside of the vocabulary
            (on a GPU, where looking would stall it, the log-probability of such a label is NaN instead).
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(f"want logits [n, v] and labels [n], got {[*logits.shape]} and {[*labels.shape]}")
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}, must be above 0")
    width, world = logits.shape[1], 1 if group is None else group.size()
    vocab_size = width * world if vocab_size is None else vocab_size
    if not 0 < vocab_size <= width * world:
        raise ValueError(f"vocab_size is {vocab_size}, logits have {width} columns on each of {world} ranks")
    if labels.device.type == "cpu" and ((labels < 0) | (labels >= vocab_size)).any():
        raise ValueError(
            f"labels lie in [{labels.min()}, {labels.max()}], outside of the vocabulary [0, {vocab_size})"
        )
    return _LogProb.apply(logits, labels, temperature, entropy, group, vocab_size)


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        temperature: float,
        with_entropy: bool,
        group: dist.ProcessGroup | None,
        vocab_size: int,
    ) -> tuple[Tensor, Tensor | None]:
        n, width = logits.shape
        offset = 0 if group is None else group.rank() * width
        shard = logits[:, : max(vocab_size - offset, 0)]  # no column: this rank holds only padding
        local = labels - offset
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32

        row_max = logits.new_full((n,), -torch.inf, dtype=dtype)
        if shard.shape[1]:
            row_max = shard.amax(dim=1).to(dtype) / temperature
        if group is not None:
            dist.all_reduce(row_max, op=dist.ReduceOp.MAX, group=group)

        # Per row: shifted logit of the label, sum of exp, sum of exp * shifted. Each rank adds its part.
        sums = logits.new_zeros((3 if with_entropy else 2, n), dtype=dtype)
        for rows in _chunks(shard):
            shifted = _shifted(shard[rows], temperature, row_max[rows])
            sums[0, rows] = _at_labels(shifted, local[rows])
            exp = shifted.exp()
            sums[1, rows] = exp.sum(dim=1)
            if with_entropy:
                sums[2, rows] = _times_log(exp, shifted).sum(dim=1)
        if group is not None:
            dist.all_reduce(sums, group=group)

        log_sum = sums[1].log()
        log_prob = (sums[0] - log_sum).masked_fill_((labels < 0) | (labels >= vocab_size), torch.nan)
        entropy = log_sum - sums[2] / sums[1] if with_entropy else None
        ctx.save_for_backward(logits, local, row_max, log_sum, entropy)
        ctx.temperature, ctx.columns = temperature, shard.shape[1]
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, log_prob_grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Any, ...]:
        logits, local, row_max, log_sum, entropy = ctx.saved_tensors
        shard = logits[:, : ctx.columns]
        grad = torch.zeros_like(logits)
        weight = torch.zeros_like(log_sum)
        if log_prob_grad is not None:
            weight += log_prob_grad
        if entropy_grad is not None:
            weight += entropy_grad * entropy
        for rows in _chunks(shard):
            log_p = _shifted(shard[rows], ctx.temperature, row_max[rows]).sub_(log_sum[rows, None])
            p = log_p.exp()
            chunk = p * -weight[rows, None]
            if entropy_grad is not None:
                chunk -= _times_log(p, log_p) * entropy_grad[rows, None]
            if log_prob_grad is not None:
                _add_at_labels(chunk, local[rows], log_prob_grad[rows])
            grad[rows, : ctx.columns] = chunk.div_(ctx.temperature)
        return grad, None, None, None, None, None


def _chunks(shard: Tensor) -> Iterator[slice]:
    """Runs of rows with a bounded number of elements; none for an empty shard."""
    if shard.numel():
        step = max((_CPU_CHUNK if shard.device.type == "cpu" else _GPU_CHUNK) // shard.shape[1], 1)
        for start in range(0, shard.shape[0], step):
            yield slice(start, start + step)


def _shifted(logits: Tensor, temperature: float, row_max: Tensor) -> Tensor:
    return logits.to(row_max.dtype, copy=True).div_(temperature).sub_(row_max[:, None])


def _at_labels(rows: Tensor, local: Tensor) -> Tensor:
    """The column of each row's label, 0 where another rank holds it."""
    held = (local >= 0) & (local < rows.shape[1])
    found = rows.gather(1, local.clamp(0, rows.shape[1] - 1)[:, None])[:, 0]
    return torch.where(held, found, 0.0)


def _add_at_labels(rows: Tensor, local: Tensor, amounts: Tensor) -> None:
    held = (local >= 0) & (local < rows.shape[1])
    rows.scatter_add_(1, local.clamp(0, rows.shape[1] - 1)[:, None], torch.where(held, amounts, 0.0)[:, None])


def _times_log(p: Tensor, log_p: Tensor) -> Tensor:
    """p * log_p with 0 * -inf = 0."""
    return log_p.clamp(min=torch.finfo(log_p.dtype).min).mul_(p)
