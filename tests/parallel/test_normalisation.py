"""Losses and gradients do not depend on how rows are cut over ranks and micro-batches."""

from pathlib import Path

import pytest
import torch
from gloo import run_ranks
from hf_reference import Batch, random_batch
from parallel_runs import build, cut, infer_log_probs, replica_rows, total_loss, train_policy
from tiny import tiny_checkpoint
from torch import Tensor

from rolemesh.parallel.micro_batches import MicroBatch, response_index
from rolemesh.parallel.model import TrainResult
from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout

pytestmark = pytest.mark.full

OPTIM = OptimConfig(lr=1e-3, clip_grad=None)
LAYOUTS = {
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "dp2": Layout(dp=2),
    "tp2sp": Layout(tp=2, sequence_parallel=True),
    "pp2dp2": Layout(pp=2, dp=2),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("policy"), "qwen2", tied=True)


@pytest.fixture(scope="module")
def critic_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("critic"), "llama", head="score")


def losses_and_norms(ranks: list[list[TrainResult]]) -> Tensor:
    """[updates, 2]: loss summed over the replicas, gradient norm."""
    rows = []
    for results in zip(*ranks, strict=True):
        losses = [loss for result in results if (loss := total_loss(result)) is not None]
        assert len({result.grad_norm for result in results}) == 1
        rows.append([sum(losses), results[0].grad_norm])
    return torch.tensor(rows)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def policy_updates(rank: int, world: int, path: Path, layout: Layout, batch: Batch, **limit: int):
    model = build(path, layout, optim=OPTIM)
    # tp ranks have the same loss: only the first of them counts it.
    results = [train_policy(model, batch, **limit) for _ in range(2)]
    return results if model.coords.tp == 0 else [TrainResult(r.grad_norm, r.lr, False, []) for r in results]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_policy_loss_and_gradient_are_the_same_for_every_layout_and_micro_batch(path: Path, layout: Layout):
    batch = random_batch(7)
    expected = losses_and_norms(run_ranks(update_by(size=7), 1, path, Layout(), batch))
    for limit in ({"size": 1}, {"size": 3}, {"budget_tokens": 25}):
        same(losses_and_norms(run_ranks(update_by(**limit), layout.world, path, layout, batch)), expected)


def update_by(**limit: int):
    return lambda *args: policy_updates(*args, **limit)


def critic_update(rank: int, world: int, path: Path, layout: Layout, batch: Batch, size: int):
    model = build(path, layout, head="value", optim=OPTIM)

    def loss(values: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        index = response_index(micro_batch, batch.response_width)
        (found,) = model.at(values, micro_batch, index.previous, lambda found, _: (found,))
        error = index.scatter(found) - micro_batch.columns["weights"]
        mask = micro_batch.attention_mask[:, -batch.response_width :]
        value = (error.square() * mask).sum() / batch.n_tokens
        return value, {"loss": value.detach()}

    return [model.train(cut(model, batch, replica_rows(model, batch), size=size), loss)]


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), Layout(pp=2)], ids=str)
def test_critic_loss_does_not_grow_with_the_number_of_micro_batches(critic_path: Path, layout: Layout):
    batch = random_batch(32)
    one = losses_and_norms(run_ranks(critic_update, 1, critic_path, Layout(), batch, 32))
    same(losses_and_norms(run_ranks(critic_update, layout.world, critic_path, layout, batch, 1)), one)


def test_a_replica_without_rows_takes_part_and_changes_nothing(path: Path):
    batch, layout = random_batch(3), Layout(dp=2, pp=2)

    def update(rank: int, world: int) -> list[TrainResult]:
        model = build(path, layout, optim=OPTIM)
        rows = [0, 1, 2] if model.coords.dp == 0 else []
        assert model.coords.dp == 0 or model.infer([], lambda *_: {}) == ([] if model.is_last_stage else None)
        return [train_policy(model, batch, rows, size=2) for _ in range(2)]

    expected = run_ranks(policy_updates, 1, path, Layout(), batch)
    same(losses_and_norms(run_ranks(update, 4)), losses_and_norms(expected))


def test_rows_of_padding_add_nothing_to_loss_and_gradient(path: Path):
    batch = random_batch(12)
    batch.attention_mask[10:] = 0

    def update(rank: int, world: int, n_rows: int) -> list[TrainResult]:
        return [train_policy(build(path, Layout(), optim=OPTIM), batch, list(range(n_rows)), size=4)]

    same(losses_and_norms(run_ranks(update, 1, 12)), losses_and_norms(run_ranks(update, 1, 10)))


def test_146_rows_in_micro_batches_of_4_have_the_log_probs_of_a_single_batch(path: Path):
    batch = random_batch(146)

    def both(rank: int, world: int) -> tuple[Tensor, Tensor]:
        model = build(path, Layout(pp=2))
        parts = [infer_log_probs(model, batch, size=size) for size in (4, 146)]
        return parts if model.is_last_stage else None

    (_, by_four), (_, at_once) = run_ranks(both, 2)[1]
    torch.testing.assert_close(by_four, at_once, rtol=0, atol=1e-5)
