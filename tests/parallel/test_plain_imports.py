import subprocess
import sys

import pytest
import torch

LOADED = """
import sys, torch
before = torch.compile, torch.compiler.allow_in_graph, torch.compiler.disable
import rolemesh.engine.workers.actor
import megatron.core.models.gpt.gpt_model
assert (torch.compile, torch.compiler.allow_in_graph, torch.compiler.disable) == before
assert "tensordict" in sys.modules
print([name for name in ("torch._dynamo", "torch._inductor", "transformers") if name in sys.modules])
"""


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="here megatron-core compiles some of its functions")
def test_a_rank_of_a_model_loads_neither_torchs_compiler_nor_transformers():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADED], capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "[]\n", "")
