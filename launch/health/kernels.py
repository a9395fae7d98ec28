"""Kernels that run: ours in each form against plain torch, and those of the optional accelerators on a GPU.

`python -m rolemesh.launch.health.kernels FOLDER RANK WORLD` is the probe.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rolemesh.launch.health.finding import Finding
from rolemesh.launch.health.probes import ProbeError, answer, probe

SECTION = "kernels"
LIMIT_S = 60.0  # Triton compiles; on a CPU it takes seconds
TOLERANCE = 2e-2  # bf16 against fp32; ours are far nearer in fp32
_OURS = 1e-4
Reading = Mapping[str, Any]  # name, value, off (largest relative difference) or error


def kernel_findings() -> list[Finding]:
    """Run the kernels of this machine."""
    try:
        readings = probe("rolemesh.launch.health.kernels", limit_s=LIMIT_S)
    except ProbeError as error:
        fix = "ROLEMESH_KERNELS=reference does without ours; run `python -c 'import rolemesh.kernels'`"
        return [Finding(SECTION, "all", "-", f"the kernels' process failed: {error}", fix, required=True)]
    return [judged(reading) for reading in readings]


def judged(reading: Reading) -> Finding:
    """A reading as a finding: a kernel that fails or computes something else is broken."""
    name, form, error = reading["name"], reading.get("form", ""), reading.get("error", "")
    if reading.get("skipped"):
        return Finding(SECTION, name, reading["skipped"], reading.get("problem", ""), reading.get("fix", ""))
    fix = _FIXES.get(name, "ROLEMESH_KERNELS=reference takes plain torch instead; build the package anew")
    if error:
        return Finding(SECTION, name, "fails", error, fix, required=True)
    off, most = float(reading["off"]), float(reading["tolerance"])
    value = f"runs{f' ({form})' if form else ''}, {off:.1e} from torch"
    if off <= most:
        return Finding(SECTION, name, value)
    return Finding(SECTION, name, value, f"differs from torch by more than {most:g}", fix, required=True)


_FIXES = {
    "flash-attn": "pip uninstall flash-attn, or build it for this torch and CUDA (docs/install.md)",
    "transformer-engine": "pip uninstall transformer-engine, or build it for this torch and CUDA",
    "apex": "build apex anew for this torch and CUDA (docs/install.md), or uninstall it",
    "triton": "install the triton that this torch was made with; ROLEMESH_KERNELS=reference does without",
}


def readings() -> Iterator[Reading]:
    """Run everything that is here, one after the other."""
    import torch

    on_gpu = torch.cuda.is_available()
    yield from _cpp()
    for name, module, run in (
        ("triton", "triton", _triton),
        ("flash-attn", "flash_attn", _flash_attention),
        ("transformer-engine", "transformer_engine", _transformer_engine),
        ("apex", "amp_C", _apex),
    ):
        if find_spec(module) is None:
            continue
        if not on_gpu:
            yield {"name": name, "skipped": "installed; its kernels need a GPU"}
            continue
        yield _tried(name, run, TOLERANCE)


def _tried(name: str, run: Callable[[], tuple[str, float]], tolerance: float) -> Reading:
    try:
        form, off = run()
    except Exception as error:  # whatever a foreign kernel raises is the reading
        return {"name": name, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"name": name, "form": form, "off": off, "tolerance": tolerance}


def _cpp() -> Iterator[Reading]:
    import torch

    from rolemesh.kernels import forms

    if forms._cpu is None:
        yield {
            "name": "C++",
            "skipped": "not built: plain torch instead",
            "problem": "the fused kernels are missing: losses and log-probs are slower on the CPU",
            "fix": "pip install --no-build-isolation --editable . (needs a C++ compiler), or a wheel",
        }
        return
    device = torch.device("cpu")
    yield _tried("C++", lambda: (forms.form_of(device), _against_torch(device)), _OURS)


def _triton() -> tuple[str, float]:
    import torch

    from rolemesh.kernels.forms import form_of

    device = torch.device("cuda")
    return form_of(device), _against_torch(device)


def _against_torch(device: Any) -> float:
    """The largest relative difference between our kernels on `device` and their plain form, gradients too."""
    ours = _results(device)
    before = os.environ.get("ROLEMESH_KERNELS")
    os.environ["ROLEMESH_KERNELS"] = "reference"
    try:
        plain = _results(device)
    finally:
        os.environ.pop("ROLEMESH_KERNELS")
        if before is not None:
            os.environ["ROLEMESH_KERNELS"] = before
    return max(_off(a, b) for a, b in zip(ours, plain, strict=True))


def _results(device: Any) -> Sequence[Any]:
    """Log-probabilities, entropies and gradients of a linear head, KL, and advantages."""
    import torch

    from rolemesh.kernels import gae, kl, linear_log_prob_and_entropy, log_prob_and_entropy

    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 64, generator=made).to(device).requires_grad_()
    weight = torch.randn(333, 64, generator=made).to(device).requires_grad_()
    labels = torch.randint(333, (40,), generator=made).to(device)
    log_prob, entropy = linear_log_prob_and_entropy(hidden, weight, labels)
    assert entropy is not None
    (log_prob.sum() + entropy.sum()).backward()
    logits = (hidden @ weight.T).detach().requires_grad_()
    direct, _ = log_prob_and_entropy(logits, labels)
    direct.sum().backward()
    rewards, values = torch.randn(2, 4, 10, generator=made).to(device)
    mask = torch.ones(4, 10, device=device)
    found = (log_prob, entropy, hidden.grad, weight.grad, direct, logits.grad)
    return [
        *found,
        kl(direct.detach(), log_prob.detach() - 0.1, "k3"),
        *gae(rewards, values, mask, 0.99, 0.95),
    ]


def _flash_attention() -> tuple[str, float]:
    import torch
    from flash_attn import flash_attn_func

    q, k, v = torch.randn(3, 1, 128, 4, 64, device="cuda", dtype=torch.bfloat16)
    heads = [x.transpose(1, 2).float() for x in (q, k, v)]
    plain = torch.nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
    return "bf16", _off(flash_attn_func(q, k, v, causal=True), plain.transpose(1, 2))


def _transformer_engine() -> tuple[str, float]:
    import torch
    import transformer_engine.pytorch as te

    layer = te.Linear(256, 256, bias=False, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    return "bf16", _off(layer(x), x.float() @ layer.weight.float().T)


def _apex() -> tuple[str, float]:
    import torch
    from apex.optimizers import FusedAdam

    weights = [torch.ones(1000, device="cuda", requires_grad=True) for _ in range(2)]
    for weight, kind in zip(weights, (FusedAdam, torch.optim.AdamW), strict=True):
        weight.grad = torch.linspace(-1, 1, 1000, device="cuda")
        kind([weight], lr=0.1, weight_decay=0.01).step()
    return "FusedAdam", _off(*weights)


def _off(found: Any, wanted: Any) -> float:
    """The largest difference, relative to the largest wanted value; infinite where one is not finite."""
    found, wanted = found.detach().double(), wanted.detach().double()
    off = (found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12)
    return float(off) if off.isfinite() else float("inf")


if __name__ == "__main__":
    answer(Path(sys.argv[1]), list(readings()))
