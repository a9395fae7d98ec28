"""Compile for GPUs, without one, every kernel that a call of the Triton forms launches.

`TRITON_INTERPRET=0 python compile_offline.py [--brief] [sm ...]` calls each function with CPU tensors, takes
the launch instead of making it, and compiles it to machine code with ptxas, from Triton's package. Prints for
each kernel its registers, its spilled bytes and its arguments' types. `--brief`: with one set of types each.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from rolemesh.kernels.triton import advantages, groups, log_prob, losses, masked

Launch = tuple[JITFunction, dict[str, Any]]


def calls() -> Iterator[Callable[[], Any]]:
    """Every function with every dtype and every flag; sizes of 1, which Triton makes constants, with one."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for v in (8192, 33):
            yield from log_prob_calls(dtype, v)
        yield from flat_calls(dtype, 3_000_000)
    for dtype in (torch.float32, torch.float64):
        yield from row_calls(dtype, 2, 2048)
    yield from log_prob_calls(torch.float32, 1)
    yield from flat_calls(torch.float32, 1)
    yield from row_calls(torch.float32, 1, 1)
    for n, n_groups in ((64, 16), (1, 1)):
        scores, group = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.int64)
        yield partial(groups.group_moments, scores, group, n_groups)


def log_prob_calls(dtype: torch.dtype, v: int) -> Iterator[Callable[[], Any]]:
    logits, labels = torch.zeros(2, v, dtype=dtype), torch.zeros(2, dtype=torch.int64)
    numbers = torch.zeros(5, 2, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for entropy in (True, False):
        yield partial(log_prob.log_prob_stats, logits, labels, numbers[:4], 0.5, entropy)
        yield partial(log_prob.log_prob_backward, logits, labels, numbers, 0.5, entropy, logits)


def row_calls(dtype: torch.dtype, n: int, n_steps: int) -> Iterator[Callable[[], Any]]:
    x, mask = torch.zeros(n, n_steps, dtype=dtype), torch.ones(n, n_steps, dtype=torch.bool)
    yield partial(advantages.gae, x, x, mask, 0.9, 0.9)
    yield partial(advantages.discounted_returns, x, mask, 0.9)
    for mode in ("token-mean", "seq-mean-token-mean"):
        yield partial(losses.policy_loss, x, x, x, mask, 0.2, 0.2, 3.0, mode, 2.0, 2.0)
        yield partial(losses.value_loss, x, x, x, mask, 0.5, mode, 2.0, 2.0)


def flat_calls(dtype: torch.dtype, n: int) -> Iterator[Callable[[], Any]]:
    x, mask = torch.zeros(n, dtype=dtype), torch.ones(n, dtype=torch.bool)
    yield partial(masked.masked_moments, x, mask)
    yield partial(masked.masked_normalize, x, mask, torch.zeros(3, dtype=torch.float64))
    for kind in ("k1", "abs", "k2", "k3"):
        yield partial(losses.kl, x, x, kind)
        yield partial(losses.kl_backward, x, x, x, kind)


def launches() -> list[Launch]:
    """What the calls would launch, each kernel with each set of types once."""
    taken: dict[str, Launch] = {}

    def take(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        values = dict(zip(self.arg_names, args, strict=False)) | options
        taken.setdefault(f"{self.__name__} {_specialise(self, values)}", (self, values))

    run, JITFunction.run = JITFunction.run, take
    try:
        for call in calls():
            call()
    finally:
        JITFunction.run = run
    return list(taken.values())


def compile_launch(launch: Launch, sm: int) -> str:
    """Machine code for `sm`; returns a line that describes it. Raises what Triton and ptxas raise."""
    kernel, values = launch
    signature, constants, attributes = _specialise(kernel, values)
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", sm, 32),
        options={"num_warps": values["num_warps"]},
    )
    types = ", ".join(
        f"{name}={constants.get((i,), kind)}" for i, (name, kind) in enumerate(signature.items())
    )
    return f"sm_{sm} {kernel.__name__:18} {_resources(compiled.asm['ptx'], sm)} {types}"


def _specialise(kernel: JITFunction, values: dict[str, Any]) -> tuple[dict, dict, dict]:
    """Types, constants and divisibility by 16 of the arguments, as a launch finds them."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
            continue
        signature[parameter.name] = parameter.annotation_type or mangle_type(value)
        aligned = value.data_ptr() if isinstance(value, Tensor) else value
        if isinstance(aligned, int) and aligned % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _resources(ptx: str, sm: int) -> str:
    """What ptxas says of registers and spills."""
    arch = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(sm).path, "-v", f"--gpu-name={arch}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr
    registers, spills = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    return f"{registers[1]:>3} registers, {spills[1]} bytes spilled;"


if __name__ == "__main__":
    brief = sys.argv[1:2] == ["--brief"]
    targets = [int(argument) for argument in sys.argv[1 + brief :]] or [90]
    chosen = launches()
    if brief:
        chosen = list({launch[0].__name__: launch for launch in reversed(chosen)}.values())
    for launch, sm in product(chosen, targets):
        print(compile_launch(launch, sm), flush=True)
