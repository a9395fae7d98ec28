"""megatron-core's own modules, built on the meta device for every rank, against the counted parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from rolemesh.placement.layout import Layout
from rolemesh.placement.memory import rank_params
from rolemesh.placement.model import ModelShape

pytestmark = pytest.mark.full

LLAMA_70B: dict[str, Any] = {
    "family": "llama",
    "n_layers": 80,
    "hidden": 8192,
    "ffn": 28672,
    "n_heads": 64,
    "n_kv_heads": 8,
    "head_dim": 128,
    "vocab": 128256,
    "max_positions": 8192,
    "rope_theta": 500_000.0,
}
# 30 layers over 4 stages are 8, 8, 7, 7; a vocabulary that needs padding; more tp ranks than KV heads.
TIED: dict[str, Any] = {
    "family": "qwen3",
    "n_layers": 30,
    "hidden": 1024,
    "ffn": 3072,
    "n_heads": 16,
    "n_kv_heads": 2,
    "head_dim": 128,
    "vocab": 151_669,
    "max_positions": 4096,
    "tied": True,
    "qk_norm": True,
}
BIASED: dict[str, Any] = {**LLAMA_70B, "family": "qwen2", "n_layers": 10, "qkv_bias": True}

CASES = {
    "70b": (LLAMA_70B, Layout(tp=8, pp=4), "lm"),
    "70b_uneven": (LLAMA_70B, Layout(tp=8, pp=3, sequence_parallel=True), "lm"),
    "70b_critic": ({**LLAMA_70B, "n_labels": 1}, Layout(tp=2, pp=2), "value"),
    "tied": (TIED, Layout(tp=4, pp=4), "lm"),
    "tied_one_stage": (TIED, Layout(tp=4), "lm"),
    "biased": (BIASED, Layout(tp=2, pp=2), "lm"),
}


def build_all(sizes: dict[str, Any], layout: Layout, head: Any) -> list[list[int]]:
    """Parameters of the modules of each (pp, tp) rank, all in this process, with fake process groups."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from rolemesh.parallel.config import transformer_config
    from rolemesh.parallel.groups import make_groups
    from rolemesh.parallel.stage import build_stage

    # megatron-core asks for the device of its weights here; rank and world of the fake group are no device's.
    torch.cuda.current_device = lambda: torch.device("meta")
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    shape, counts = ModelShape(**sizes), []
    for stage in range(layout.pp):
        counts.append([])
        for tp_rank in range(layout.tp):
            rank = int(layout.grid[stage, 0, 0, tp_rank])
            dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
            config = transformer_config(shape, layout, stage, dtype=torch.bfloat16)
            config.perform_initialization = False  # it would need a CUDA random state
            module = build_stage(
                shape, config, make_groups(layout), layout=layout, head=head, device=torch.device("meta")
            )
            parameters = list(module.parameters())
            assert all(parameter.is_meta for parameter in parameters)
            counts[-1].append(sum(parameter.numel() for parameter in parameters))
            dist.destroy_process_group()
    return counts


@pytest.fixture(scope="module")
def built() -> dict[str, list[list[int]]]:
    """Counts of every case, from one process of its own: fake groups stay out of this one."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_every_rank_holds_exactly_the_counted_parameters(
    case: str, built: dict[str, list[list[int]]]
) -> None:
    sizes, layout, _ = CASES[case]
    shape = ModelShape(**sizes)
    counted = [[rank_params(shape, layout, stage).total] * layout.tp for stage in range(layout.pp)]
    assert counted == built[case]


def test_70b_stages_add_up_to_the_model(built: dict[str, list[list[int]]]) -> None:
    shape = ModelShape(**LLAMA_70B)
    # Norms are on all 8 tp ranks: 2 x 8192 in each of 80 layers and one at the end, 7 copies too many;
    # the vocabulary is padded from 128,256 to 129,024 rows, in embedding and head.
    copies = 7 * (2 * 80 + 1) * 8192
    assert sum(map(sum, built["70b"])) - copies - 2 * 768 * 8192 == shape.n_params == 70_553_706_496


if __name__ == "__main__":
    print(json.dumps({name: build_all(*case) for name, case in CASES.items()}))
