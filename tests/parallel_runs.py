"""A parallel model on a test's batch: `from parallel_runs import ...`."""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hf_reference import Batch, weights
from torch import Tensor

from rolemesh.kernels import linear_log_prob_and_entropy
from rolemesh.parallel.checkpoint import ShardSave
from rolemesh.parallel.groups import make_groups
from rolemesh.parallel.micro_batches import MicroBatch, balanced, micro_batches, response_index, unpack
from rolemesh.parallel.model import ParallelModel, TrainResult
from rolemesh.parallel.weights import export_hf
from rolemesh.placement.layout import Layout


def build(path: Any, layout: Layout, **kwargs: Any) -> ParallelModel:
    """An fp32 model unless `dtype` says otherwise, with groups of its own."""
    return ParallelModel(path, layout, make_groups(layout), **{"dtype": torch.float32, **kwargs})


def replica_rows(model: ParallelModel, batch: Batch) -> list[int]:
    """Rows of this rank's replica, balanced by tokens."""
    lengths = batch.attention_mask.sum(dim=1).tolist()
    return balanced(lengths, model.layout.dp)[model.coords.dp]


def cut(model: ParallelModel, batch: Batch, rows: list[int], **limit: int) -> list[MicroBatch]:
    """Micro-batches of some rows, with the batch's weights as a column."""
    columns = {"weights": weights(batch)[rows]}
    of_rows = batch.take(rows)
    parts = micro_batches(of_rows.input_ids, of_rows.attention_mask, columns, padding=model.padding, **limit)
    return [part.to(model.device) for part in parts]


def logits(model: ParallelModel, hidden: Tensor) -> Tensor:
    """What the last stage's output [1, T, h] means: this rank's part of the logits [1, T, v / tp]."""
    return hidden @ model.output_weight.T


def response_log_probs(model: ParallelModel, batch: Batch) -> Callable[[Tensor, MicroBatch], Tensor]:
    """Function of (hidden states, micro-batch) that gives log-probabilities [m, R] of response tokens."""

    def compute(hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        index = response_index(micro_batch, batch.response_width)

        def score(hidden: Tensor, position: Tensor) -> tuple[Tensor | None, ...]:
            return linear_log_prob_and_entropy(
                hidden,
                model.output_weight,
                micro_batch.tokens[0, position + 1],
                group=model.groups.tp,
                vocab_size=model.shape.vocab,
            )

        return index.scatter(model.at(hidden, micro_batch, index.previous, score)[0])

    return compute


def infer_log_probs(model: ParallelModel, batch: Batch, **limit: int) -> tuple[list[int], Tensor] | None:
    """(rows of this replica, their log-probabilities [rows, R]) on the last stage."""
    compute = response_log_probs(model, batch)
    rows = replica_rows(model, batch)
    parts = cut(model, batch, rows, **limit)
    results = model.infer(parts, lambda output, micro_batch: {"log_prob": compute(output, micro_batch)})
    return None if results is None else (rows, unpack(parts, results)["log_prob"])


def train_policy(
    model: ParallelModel, batch: Batch, rows: list[int] | None = None, **limit: int
) -> TrainResult:
    """One update with the loss of `hf_reference.policy_loss`; `rows` are this replica's."""
    compute = response_log_probs(model, batch)

    def loss(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        value = -(compute(output, micro_batch) * micro_batch.columns["weights"]).sum() / batch.n_tokens
        return value, {"loss": value.detach()}

    rows = replica_rows(model, batch) if rows is None else rows
    return model.train(cut(model, batch, rows, **(limit or {"size": 2})), loss)


def total_loss(result: TrainResult) -> float | None:
    """This replica's part of the loss, None before the last stage."""
    return float(sum(stats["loss"] for stats in result.stats)) if result.stats else None


def exported(model: ParallelModel) -> dict[str, Tensor]:
    """Whole tensors by Hugging Face name, on the ranks that give them out."""
    named = dict(model.named_parameters())
    return dict(export_hf(named, model.shape, model.layout, model.groups, head=model.head))


def save(model: ParallelModel, folder: Path) -> None:
    """A whole save, as the driver of a run leads it."""
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    saving = ShardSave(model, folder)
    saving._thread.join(120)
    if saving._thread.is_alive():
        stack = traceback.format_stack(sys._current_frames()[saving._thread.ident])
        raise AssertionError(f"the write hangs at\n{''.join(stack)}")
    assert saving.progress().done, saving.progress().error
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, saving.progress().results)
    if dist.get_rank() == 0:
        saving.finish(results)
    dist.barrier()
