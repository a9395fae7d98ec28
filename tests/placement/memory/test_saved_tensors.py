"""Bytes that autograd really keeps for one layer of RoleMesh's modules, against the counted ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from rolemesh.placement.layout import Layout
from rolemesh.placement.memory import software, training_memory
from rolemesh.placement.memory.activations import Pass, layer_bytes
from rolemesh.placement.model import ModelShape

pytestmark = pytest.mark.full

TOKENS, ROWS = 256, 2
PLAIN: dict[str, Any] = {
    "family": "llama",
    "n_layers": 1,
    "hidden": 512,
    "ffn": 1376,
    "n_heads": 8,
    "n_kv_heads": 8,
    "head_dim": 64,
    "vocab": 1024,
    "max_positions": 1024,
}
GROUPED = {**PLAIN, "n_kv_heads": 2}
NORMED = {**GROUPED, "family": "qwen3", "qk_norm": True, "head_dim": 128}
SP2 = Layout(tp=2, sequence_parallel=True)
CASES: dict[str, tuple[dict[str, Any], Layout, str, bool]] = {
    "bf16": (PLAIN, Layout(), "bfloat16", False),
    "fp32": (PLAIN, Layout(), "float32", False),
    "tp4": (PLAIN, Layout(tp=4), "bfloat16", False),
    "sequence_parallel": (GROUPED, SP2, "bfloat16", False),
    "few_kv_heads": (GROUPED, Layout(), "float32", False),
    "qk_norm": (NORMED, Layout(), "bfloat16", False),
    "recompute": (PLAIN, SP2, "bfloat16", True),
}


def kept(sizes: dict[str, Any], layout: Layout, dtype: str, recompute: bool) -> int:
    """Bytes of all storages but parameters that a forward pass saves."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from rolemesh.parallel.config import transformer_config
    from rolemesh.parallel.context import Packed
    from rolemesh.parallel.groups import make_groups
    from rolemesh.parallel.process_state import prepare_process
    from rolemesh.parallel.stage import build_stage

    dist.init_process_group("fake", rank=0, world_size=layout.world, store=FakeStore())
    device, shape = torch.device("cpu"), ModelShape(**sizes)
    prepare_process(device, 0)
    config = transformer_config(
        shape, layout, 0, dtype=getattr(torch, dtype), recompute="full" if recompute else "none"
    )
    module = build_stage(shape, config, make_groups(layout), layout=layout, head="lm", device=device)
    parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    seen: dict[int, Any] = {}

    def note(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            seen[storage._cdata] = tensor  # kept alive: another tensor must not take its storage's place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        packed = Packed.of([row * TOKENS for row in range(ROWS + 1)], 1, 0, device)
        module(torch.zeros(1, ROWS * TOKENS, dtype=torch.int64), None, None, packed_seq_params=packed)
    dist.destroy_process_group()
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())


@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    """One layer's bytes of every case: those of two layers without those of one, in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_a_layer_keeps_the_counted_bytes(case: str, measured: dict[str, int]) -> None:
    sizes, layout, dtype, recompute = CASES[case]
    by, shape = software("megatron-cpu"), ModelShape(**sizes)
    if recompute:
        items = training_memory(
            shape,
            layout,
            micro_batch=ROWS,
            seq_len=TOKENS,
            n_micro_batches=1,
            recompute="full",
            dtype=dtype,
            by=by,
        )
        counted = items["activations"]
    else:
        counted = layer_bytes(shape, layout, Pass.of(layout, ROWS, TOKENS, dtype), by, moe=False)
    # The norms' one number per row is not counted.
    assert measured[case] == pytest.approx(counted, rel=0.002)


if __name__ == "__main__":
    bytes_of = {
        name: kept({**sizes, "n_layers": 2}, *how) - kept(sizes, *how)
        for name, (sizes, *how) in CASES.items()
    }
    print(json.dumps(bytes_of))
