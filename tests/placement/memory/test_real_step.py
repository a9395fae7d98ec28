"""A real training step on the CPU, every live byte counted, beside the prediction."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from parallel_runs import build
from tiny import tiny_checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rolemesh.kernels import linear_log_prob_and_entropy
from rolemesh.parallel.micro_batches import MicroBatch, micro_batches
from rolemesh.parallel.model import ParallelModel
from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout
from rolemesh.placement.memory import software, training_memory

pytestmark = pytest.mark.full
ROWS, TOKENS, LAYERS = 2, 256, 3


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made under it held at once; those of `before` are not counted."""

    def __init__(self, before: dict[int, int]) -> None:
        super().__init__()
        self.known, self.now, self.peak = set(before), 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def resident(model: ParallelModel) -> dict[int, int]:
    """Storages of weights, gradients and optimizer state, and their bytes."""
    assert model.optimizer is not None
    state = model.optimizer.megatron.optimizer.state
    tensors = [
        *model.module.parameters(),
        *(buffer.grad_data for buffer in model._trained[0].buffers),
        *state,
    ]
    tensors += [buffer.param_data for buffer in model._trained[0].buffers if buffer.param_data is not None]
    tensors += [value for values in state.values() for value in values.values() if value.ndim]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


def loss_of(model: ParallelModel) -> Any:
    def loss(hidden: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        place = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
        tokens = micro_batch.tokens[0, place[:, 1:].flatten()]
        rows = hidden[0, place[:, :-1].flatten()]
        log_prob, _ = linear_log_prob_and_entropy(
            rows, model.output_weight, tokens, vocab_size=model.shape.vocab
        )
        return -log_prob.mean(), {}

    return loss


def run(rank: int, world: int, path: Path, recompute: Any) -> Any:
    model = build(path, Layout(), optim=OptimConfig(lr=1e-3), recompute=recompute)
    ids = torch.randint(4, 100, (2 * ROWS, TOKENS))
    batches = micro_batches(ids, torch.ones_like(ids), {}, size=ROWS)
    model.train(batches, loss_of(model))  # makes the optimizer's state
    held = resident(model)
    live = LiveBytes(held)
    with live:
        model.train(batches, loss_of(model))
    return model.shape, sum(held.values()), live.peak


@pytest.mark.parametrize(("vocab", "recompute"), [(8192, "none"), (512, "full")])
def test_a_real_step_holds_what_is_predicted(vocab: int, recompute: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, layers=LAYERS, hidden=256, heads=8, vocab=vocab)
    [(shape, states, peak)] = run_ranks(run, 1, path, recompute)
    predicted = training_memory(
        shape, Layout(), micro_batch=ROWS, seq_len=TOKENS, n_micro_batches=2,
        recompute=recompute, dtype="float32", by=software("megatron-cpu"),
    )  # fmt: skip
    assert predicted.resident_bytes == pytest.approx(states, rel=1e-3)
    assert predicted.total == pytest.approx(states + peak, rel=0.05)
