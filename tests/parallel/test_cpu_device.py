import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_checkpoint
from transformers import AutoModelForCausalLM

from rolemesh.parallel import cpu_device


def in_a_fresh_process(code: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr


BRIDGE = """
caller = {"__name__": "megatron.core.anything", "x": torch.zeros(1)}
assert layers.torch.empty(2, device="cuda").device.type == "cpu"
assert layers.torch.cuda.current_device() == torch.device("cpu")
assert isinstance(torch.device("cpu"), layers.torch.device)
assert eval("x.cuda()", caller) is caller["x"]
assert eval("x.to('cuda:0')", caller) is caller["x"]
assert eval("x.type()", caller) == "torch.cuda.FloatTensor"

assert jit.jit_fuser is jit.noop_decorator
assert not hasattr(swiglu.swiglu, "_torchdynamo_orig_callable")
assert not hasattr(torch_norm.L2Norm._norm, "_torchdynamo_orig_callable")

assert torch.zeros(1).type() == "torch.FloatTensor"
for to_cuda in (torch.Tensor.cuda, lambda x: x.to("cuda"), lambda x: torch.empty(1, device="cuda")):
    try:
        to_cuda(torch.zeros(1))
    except (AssertionError, RuntimeError):
        continue
    raise SystemExit("torch itself was changed")
"""
INSTALL = "import torch; from rolemesh.parallel import cpu_device; cpu_device.install(); cpu_device.install()"
IMPORT = """
from megatron.core import jit
from megatron.core.fusions import fused_bias_swiglu as swiglu
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import torch_norm
"""


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="here CUDA tensors are real ones")
@pytest.mark.parametrize("steps", [(INSTALL, IMPORT), (IMPORT, INSTALL)], ids=["before", "after"])
def test_installed_before_or_after_megatron_core_it_alone_sees_the_cpu_as_cuda(steps: tuple[str, str]):
    in_a_fresh_process("\n".join([*steps, BRIDGE]))


def test_hugging_face_loading_is_exact_under_the_bridge(tmp_path: Path):
    path = tiny_checkpoint(tmp_path, "llama")
    ids = torch.arange(24).view(2, 12)
    factories = {name: getattr(torch, name) for name in ("empty", "zeros", "arange", "tensor", "device")}
    before = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
    cpu_device.install()
    after = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
    assert torch.equal(before, after)
    assert all(getattr(torch, name) is factory for name, factory in factories.items())


def test_a_process_that_has_used_cuda_is_refused(monkeypatch: pytest.MonkeyPatch):
    others = [finder for finder in sys.meta_path if type(finder).__module__ != cpu_device.__name__]
    monkeypatch.setattr(sys, "meta_path", others)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="already used CUDA"):
        cpu_device.install()
