"""Megatron roles on a test's ranks: `from worker_runs import ...`."""

from typing import Any

import torch

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.worker import WorkerContext
from rolemesh.placement.layout import Layout


def batch(n_rows: int = 7, prompt: int = 6, response: int = 5, seed: int = 0) -> DataProto:
    """Rows with left-padded prompts and right-padded responses of all lengths."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 100, (n_rows, prompt + response), generator=g)
    prompts = torch.randint(1, prompt + 1, (n_rows,), generator=g)
    responses = torch.randint(1, response + 1, (n_rows,), generator=g)
    columns = torch.arange(prompt + response)
    mask = (columns >= prompt - prompts[:, None]) & (columns < prompt + responses[:, None])
    ids = torch.where(mask, ids, 0)
    response_mask = mask[:, prompt:].long()
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": mask.long(),
            "responses": ids[:, prompt:],
            "response_mask": response_mask,
            "old_log_probs": -torch.rand(n_rows, response, generator=g) - 4,
            "advantages": torch.randn(n_rows, response, generator=g) * response_mask,
            "returns": torch.randn(n_rows, response, generator=g) * response_mask,
            "values": torch.randn(n_rows, response, generator=g) * response_mask,
        }
    )


def worker(cls: type, rank: int, layout: Layout, *args: Any) -> Any:
    """A worker of this process, with its model; `args` are those of its constructor."""
    made = cls.__new__(cls)
    made.context = WorkerContext(
        "role", "pool", rank, layout.world, rank, "node", "cpu", layout, 60.0, fetch=lambda ref: ref
    )
    made.__init__(*args)
    made.init_model()
    return made
