"""Samples in one micro-batch know nothing of each other, however the model is cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from hf_reference import random_batch
from parallel_runs import build, cut, exported, infer_log_probs, response_log_probs, train_policy
from tiny import tiny_checkpoint
from torch import Tensor

from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout

pytestmark = pytest.mark.full

BATCH = random_batch(6)
# One step with these moves a parameter by g / (|g| + 1): the gradient, visible in the weights.
PROBE = OptimConfig(lr=1.0, eps=1.0, weight_decay=0.0, clip_grad=None)
LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "tp2sp": Layout(tp=2, sequence_parallel=True),
    "cp2": Layout(cp=2),
    "tp2spcp2": Layout(tp=2, cp=2, sequence_parallel=True),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", layers=2, vocab=128)


def seen(rank: int, world: int, path: Path, layout: Layout) -> dict[str, Any]:
    """Log-probs and gradients of rows packed together, and of each row alone."""
    model = build(path, layout)
    found: dict[str, Any] = {
        name: infer_log_probs(model, BATCH, size=size) for name, size in (("packed", 6), ("alone", 1))
    }
    for name, size in (("packed gradient", 6), ("alone gradient", 1)):
        probe = build(path, layout, optim=PROBE)
        train_policy(probe, BATCH, size=size)
        found[name] = exported(probe)
    return found


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_log_probs_and_gradients_of_packed_samples_are_those_of_each_alone(path: Path, layout: Layout):
    (truth,) = run_ranks(seen, 1, path, Layout())
    ranks = run_ranks(seen, layout.world, path, layout)
    last = [rank for rank in ranks if rank["packed"] is not None]
    assert len(last) == layout.world // layout.pp
    for rank in last:
        for name in ("packed", "alone"):
            torch.testing.assert_close(rank[name][1], truth["alone"][1], rtol=0, atol=1e-5)
    for kind in ("packed gradient", "alone gradient"):
        weights = {name: tensor for rank in ranks for name, tensor in rank[kind].items()}
        assert weights.keys() == truth["alone gradient"].keys()
        torch.testing.assert_close(weights, truth["alone gradient"], rtol=0, atol=1e-5)


def test_a_samples_log_probs_have_no_gradient_towards_another_samples_tokens(path: Path):
    def gradient(rank: int, world: int) -> Tensor:
        model = build(path, Layout(), optim=PROBE)
        (part,) = cut(model, BATCH, list(range(6)), size=6)
        compute = response_log_probs(model, BATCH)
        embedded: list[Tensor] = []

        def keep(module: torch.nn.Module, args: Any, output: Tensor) -> None:
            output.retain_grad()
            embedded.append(output)

        model.module.embedding.register_forward_hook(keep)
        model.train([part], lambda output, _: (compute(output, part)[2].sum(), {}))
        moved = embedded[0].grad.abs().sum(dim=(1, 2)) > 0
        start = part.bounds[2]
        # the last token predicts nothing
        assert moved[start : start + int(part.lengths[2]) - 1].all()
        moved[start : start + int(part.lengths[2])] = False
        return moved

    assert not run_ranks(gradient, 1)[0].any()
