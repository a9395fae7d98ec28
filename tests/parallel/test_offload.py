"""States that wait in host memory between operations: nothing is left on the device, nothing changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from hf_reference import random_batch
from parallel_runs import build, exported, infer_log_probs, save, train_policy
from tiny import tiny_checkpoint

from rolemesh.parallel.checkpoint import load_shards
from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout

pytestmark = pytest.mark.full

BATCH = random_batch(5)
OPTIM = OptimConfig(lr=1e-3)


def device_bytes(model: Any) -> int:
    """Bytes of weights, gradients and optimizer state."""
    tensors = [x for held in model._held().values() for x in held]
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def turns(path: Path, layout: Layout, dtype: torch.dtype, offload: bool, folder: Path) -> list[Any]:
    """What a model gives over several turns, and the bytes that it has on its device in between."""
    model = build(path, layout, optim=OPTIM, dtype=dtype, offload=offload)
    held = [device_bytes(model)]
    found: list[Any] = [infer_log_probs(model, BATCH, size=2)]
    held.append(device_bytes(model))
    found.append(train_policy(model, BATCH).grad_norm)
    held.append(device_bytes(model))
    save(model, folder)
    with model.use("training"):
        found += [train_policy(model, BATCH).grad_norm for _ in range(2)]
    held.append(device_bytes(model))
    with model.use("weights"):
        found.append(exported(model))
    load_shards(model, folder)
    held.append(device_bytes(model))
    found += [train_policy(model, BATCH).grad_norm, infer_log_probs(model, BATCH, size=2)]
    assert all((n == 0) == offload for n in held), held
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_turns_give_the_same_bits_and_leave_nothing_on_the_device(tmp_path: Path, dtype: torch.dtype):
    path = tiny_checkpoint(tmp_path / "m", "llama", layers=2)

    def both(rank: int, world: int) -> None:
        cases = [(layout, offload) for layout in (Layout(dp=2), Layout(pp=2)) for offload in (False, True)]
        found = []
        for i, (layout, offload) in enumerate(cases):
            found.append(turns(path, layout, dtype, offload, tmp_path / str(i)))
            dist.barrier()
        for plain, offloaded in (found[:2], found[2:]):
            torch.testing.assert_close(offloaded, plain, rtol=0, atol=0)

    run_ranks(both, 2)


def test_a_role_that_only_scores_rests_too(tmp_path: Path):
    path = tiny_checkpoint(tmp_path, "qwen2", tied=True)

    def score(rank: int, world: int) -> None:
        plain, model = build(path, Layout(tp=2)), build(path, Layout(tp=2), offload=True)
        for _ in range(2):
            assert device_bytes(model) == 0
            found, wanted = infer_log_probs(model, BATCH, size=2), infer_log_probs(plain, BATCH, size=2)
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)

    run_ranks(score, 2)
