"""Models of different layouts in one process."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from hf_reference import gradients, norm, policy_loss, random_batch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from parallel_runs import build, exported, train_policy
from tiny import tiny_checkpoint
from transformers import AutoModelForCausalLM

from rolemesh.parallel.model import ParallelModel
from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout

pytestmark = pytest.mark.full

BATCH = random_batch(6)
OPTIM = OptimConfig(lr=1e-3, warmup_steps=2)


def refuse_global_state() -> None:
    """Make every getter of megatron-core's global groups fail, also where it was imported by name."""
    allowed = {"get_global_memory_buffer", "is_initialized"}  # a scratch buffer; whether there is a state
    getters = {
        value
        for name, value in vars(parallel_state).items()
        if name.startswith(("get_", "is_")) and callable(value) and name not in allowed
    }

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("megatron-core's global state was read")

    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron.core"):
            for name, value in list(vars(module).items()):
                if callable(value) and value.__hash__ is not None and value in getters:
                    setattr(module, name, refuse)


def test_three_layouts_in_turn_in_one_process_without_global_state(tmp_path: Path):
    path = tiny_checkpoint(tmp_path, "llama", layers=4)
    layouts = [Layout(tp=2, pp=2), Layout(pp=2, dp=2), Layout(tp=2, dp=2, sequence_parallel=True)]

    def in_turn(rank: int, world: int) -> list[float]:
        refuse_global_state()
        with pytest.raises(AssertionError, match="global state was read"):
            random.get_tensor_model_parallel_rank()
        return [
            train_policy(build(path, layout, optim=OPTIM), BATCH).grad_norm
            for layout in [*layouts, layouts[0]]
        ]

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = norm(gradients(model, policy_loss(model, BATCH)))
    for grad_norms in run_ranks(in_turn, 4):
        assert grad_norms == pytest.approx([expected] * 4, rel=1e-5)


def test_two_colocated_models_train_as_each_does_alone(tmp_path: Path):
    paths = [tiny_checkpoint(tmp_path / family, family) for family in ("llama", "qwen3")]
    layouts = [Layout(tp=2), Layout(dp=2)]

    def train(rank: int, world: int, *which: int) -> dict[int, dict[str, torch.Tensor]]:
        models: dict[int, ParallelModel] = {i: build(paths[i], layouts[i], optim=OPTIM) for i in which}
        for _ in range(5):
            for model in models.values():
                train_policy(model, BATCH)
        return {i: exported(model) for i, model in models.items()}

    together = run_ranks(train, 2, 0, 1)[0]
    for i in (0, 1):
        alone = run_ranks(train, 2, i)[0]
        torch.testing.assert_close(together[i], alone[i], rtol=0, atol=1e-6)
