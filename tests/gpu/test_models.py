"""Models on GPUs against transformers on the CPU: scoring, an update, states that wait in host memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from hf_reference import gradients, log_probs, norm, policy_loss, random_batch
from parallel_runs import build, infer_log_probs, train_policy
from tiny import tiny_checkpoint
from transformers import AutoModelForCausalLM

from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout

BATCH = random_batch(5)
OPTIM = OptimConfig(lr=1e-3)


def reference(path: Path) -> tuple[torch.Tensor, float]:
    """Log-probabilities [b, R] and the norm of the policy's gradient, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        scored = log_probs(model, BATCH)
    return scored, norm(gradients(model, policy_loss(model, BATCH)))


def on_gpu(path: Path, layout: Layout, dtype: torch.dtype) -> list[tuple[Any, float]]:
    """Of each rank what it scored, and the norm of the gradient."""

    def both(rank: int, world: int) -> tuple[Any, float]:
        model = build(path, layout, dtype=dtype, device="cuda", optim=OPTIM)
        scored = infer_log_probs(model, BATCH, size=2)
        rows = None if scored is None else (scored[0], scored[1].float().cpu())
        return rows, train_policy(model, BATCH).grad_norm

    return run_ranks(both, layout.world, device="cuda", timeout=300)


@pytest.mark.parametrize(
    ("layout", "dtype", "close", "norm_close"),
    [
        pytest.param(Layout(), torch.float32, 2e-4, 1e-3, id="fp32"),
        pytest.param(Layout(), torch.bfloat16, 5e-2, 5e-2, id="bf16"),
        pytest.param(Layout(tp=2), torch.bfloat16, 5e-2, 5e-2, id="tp2", marks=pytest.mark.gpus(2)),
        pytest.param(Layout(pp=2), torch.bfloat16, 5e-2, 5e-2, id="pp2", marks=pytest.mark.gpus(2)),
        pytest.param(Layout(dp=2), torch.bfloat16, 5e-2, 5e-2, id="dp2", marks=pytest.mark.gpus(2)),
        pytest.param(Layout(cp=2), torch.bfloat16, 5e-2, 5e-2, id="cp2", marks=pytest.mark.gpus(2)),
    ],
)
def test_scores_and_gradients_are_those_of_transformers(tmp_path, layout, dtype, close, norm_close):
    path = tiny_checkpoint(tmp_path, "qwen3", layers=2)
    wanted, wanted_norm = reference(path)
    for rows, grad_norm in on_gpu(path, layout, dtype):
        assert grad_norm == pytest.approx(wanted_norm, rel=norm_close)
        if rows is not None:
            torch.testing.assert_close(rows[1], wanted[rows[0]], atol=close, rtol=0)


def test_states_that_wait_in_host_memory_free_the_device_and_change_nothing(tmp_path):
    path = tiny_checkpoint(tmp_path, "llama", layers=2)

    def turns(rank: int, world: int) -> None:
        found, held = [], []
        for offload in (False, True):
            before = torch.cuda.memory_allocated()
            model = build(path, Layout(), dtype=torch.bfloat16, device="cuda", optim=OPTIM, offload=offload)
            held.append(torch.cuda.memory_allocated() - before)
            norms = [train_policy(model, BATCH).grad_norm for _ in range(3)]
            rows = infer_log_probs(model, BATCH, size=2)
            assert rows is not None
            found.append((norms, rows[1].cpu()))
            if offload:
                assert model._offload is not None
                assert all(copy.is_pinned() for copy in model._offload._host.values())
            del model
        assert held[1] < held[0] / 4
        assert found[0][0] == found[1][0]
        assert torch.equal(found[0][1], found[1][1])

    run_ranks(turns, 1, device="cuda", timeout=300)
