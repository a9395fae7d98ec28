"""Predicted memory beside published measurements: mean error per source, out-of-memory runs caught.

    python benchmarks/prediction_memory.py [--rows] [FILE.csv]

A source says what it measured: what torch had allocated, what `nvidia-smi` showed (that of the process
too), activations alone, or what came on top of the model's states; each is compared with the same quantity.
A source's *software* decides the description used (`placement/data/memory.yaml`); nothing else of it does.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rolemesh.placement.hardware import HardwareError, hardware
from rolemesh.placement.layout import Layout, LayoutError
from rolemesh.placement.memory import GIB, MemoryItems, Software, software, training_memory
from rolemesh.placement.memory.process import default_margin, process_memory
from rolemesh.placement.model import Experts, LatentAttention, ModelError, ModelShape

TRUTH = Path(__file__).parent / "data" / "truth" / "memory_truth.csv"
ARCHITECTURES = TRUTH.with_name("model_arch.csv")
# Galvatron's MB are torch's bytes / 2^20.
UNITS = {"GB": 1e9, "GiB": GIB, "MB": 2**20, "MiB": 2**20, "bytes": 1.0}
Row = Mapping[str, str]


class SkippedError(ValueError):
    """A row that cannot be compared; the message is the reason."""


@dataclass(frozen=True)
class Compared:
    """One row: bytes measured (None: it did not fit) and predicted, and whether a run fits by prediction."""

    source: str
    model: str
    predicted: float
    measured: float | None
    fits: bool | None
    fits_predicted: bool | None
    line: int
    kind: str


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=TRUTH)
    parser.add_argument("--rows", action="store_true", help="print every row")
    options = parser.parse_args(argv)
    compared, skipped = compare(read(options.file))
    if options.rows:
        for row in compared:
            print(_row_line(row))
    print(table(compared))
    print("\nFitted: the allocator's slack alone; a source is predicted with the other sources' fit.")
    print(f"\n{sum(map(len, skipped.values()))} rows are not compared:")
    for reason, lines in skipped.items():
        print(f"  {len(lines):3} {reason} (rows {', '.join(map(str, lines))})")
    return 0


def read(path: Path) -> list[Row]:
    """Rows of a csv file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def compare(rows: Iterable[Row]) -> tuple[list[Compared], dict[str, list[int]]]:
    """Each row's prediction, and the rows left out by reason (rows counted from 0)."""
    compared, skipped = [], defaultdict(list)
    for line, row in enumerate(rows):
        try:
            compared.append(_compare_row(row, line))
        except (SkippedError, LayoutError, ModelError) as reason:
            skipped[str(reason)].append(line)
    return compared, dict(skipped)


def table(compared: Sequence[Compared]) -> str:
    """Mean absolute relative error of rows that fit, and how often the verdict was right, by source."""
    head = f"{'source':40} {'rows':>5} {'mean error':>11} {'bias':>7} {'median':>7}"
    lines = [f"{head} {'OOM caught':>11} {'false alarms':>13}"]
    sources = list(dict.fromkeys(row.source for row in compared))
    lines += [_summary(name, [row for row in compared if row.source == name]) for name in sources]
    lines.append(_summary("all measured", [row for row in compared if row.kind == "measured"]))
    lines.append(_summary("all", compared))
    return "\n".join(lines)


def _summary(name: str, rows: Sequence[Compared]) -> str:
    errors = [row.predicted / row.measured - 1 for row in rows if row.measured]
    size = sorted(map(abs, errors))
    error = f"{'':27}"
    if size:
        bias = sum(errors) / len(errors)
        error = f"{sum(size) / len(size):11.1%} {bias:+7.1%} {size[len(size) // 2]:7.1%}"
    oom = [row for row in rows if row.fits is False]
    fit = [row for row in rows if row.fits and row.fits_predicted is not None]
    caught = f"{sum(not row.fits_predicted for row in oom)} of {len(oom)}"
    alarms = f"{sum(not row.fits_predicted for row in fit)} of {len(fit)}"
    return f"{name[:40]:40} {len(errors):5} {error} {caught:>11} {alarms:>13}"


def _row_line(row: Compared) -> str:
    measured = f"{row.measured / GIB:8.2f}" if row.measured else " " * 8
    error = f"{row.predicted / row.measured - 1:+7.1%}" if row.measured else " " * 7
    verdict = {None: "", True: "fits", False: "OOM"}
    amounts = f"{measured} {row.predicted / GIB:8.2f} {error}"
    return (
        f"{row.line:4} {row.source[:24]:24} {row.model[:30]:30} {amounts} "
        f"{verdict[row.fits]:5} {verdict[row.fits_predicted]}"
    )


def _compare_row(row: Row, line: int) -> Compared:
    what = row["memory_what"]
    if "context" in what:
        raise SkippedError("the memory of a process alone: it is an input of the model")
    if row["source"].startswith("Metis"):
        raise SkippedError("the same total for every layout and no sizes of the model: no measurement of it")
    if row["memory_value"] and row["memory_unit"] not in UNITS:
        raise SkippedError(f"memory in {row['memory_unit']!r} is not an amount of bytes")
    layout, by = layout_of(row), software_of(row)
    items = training_memory(shape_of(row), layout, by=by, stage=_stage(what, layout), **run_of(row))
    process = process_memory(items, row["gpu_type"], layout, by, without=row["source"])
    fits, fits_predicted = None, None
    if row["kind"] == "measured" and "above" not in what:
        try:
            fits_predicted = process.total <= usable(row["gpu_type"])
            fits = row["outcome"] == "fits"
        except HardwareError:
            pass  # the device is not named
    failed = row["outcome"] == "OOM" or row["outcome"].startswith("OOM by")
    measured = None
    if row["memory_value"] and not failed:
        measured = float(row["memory_value"]) * UNITS[row["memory_unit"]]
    predicted = _quantity(what, items, process)
    return Compared(row["source"], row["model"], predicted, measured, fits, fits_predicted, line, row["kind"])


def _stage(what: str, layout: Layout) -> int | None:
    """The pipeline stage that was measured; None: the fullest."""
    if found := re.search(r"rank (\d+)", what):
        return 0 if found[1] == "0" else layout.pp - 1
    # The paper's figure of activations is the first stage's; that of states counts layers alone.
    return {"activations": 0, "weights+gradients+optimizer": layout.pp // 2}.get(what)


def _quantity(what: str, items: MemoryItems, process: MemoryItems) -> float:
    """Predicted bytes of what the row measured."""
    if what == "activations":
        return items["activations"]
    if what == "weights+gradients+optimizer":
        return items.resident_bytes
    if what.startswith("peak above model states"):
        return items.working_bytes
    if "nvidia-smi" in what or what == "rounded up per GPU":
        return process.total + items.cached
    if "reserved" in what:  # the allocator's blocks, without the process
        return items.total + process.get("allocator slack", 0.0) + items.cached
    return items.total


def usable(device: str) -> float:
    """Bytes of a device that a process may take by the verdict's margin."""
    return hardware(device).memory_bytes * (1 - default_margin())


def number(row: Row, key: str, default: int | None = None) -> int:
    """A whole number of the row; SkippedError where it is missing and has no default."""
    if row[key]:
        try:
            return int(float(row[key]))
        except ValueError:
            raise SkippedError(f"{key} is {row[key]!r}, not a number") from None
    if default is None:
        raise SkippedError(f"no {key} given")
    return default


def layout_of(row: Row) -> Layout:
    """The row's layout; dp follows from the number of GPUs."""
    tp, pp, cp = (number(row, key, 1) for key in ("TP", "PP", "CP"))
    gpus = number(row, "n_gpus", number(row, "DP", 0) * tp * pp * cp) or tp * pp * cp
    dp = number(row, "DP", max(gpus // (tp * pp * cp), 1))
    # NVIDIA's recipes cut the sequence wherever they cut tensors.
    sp = row["SP"] == "yes" or (row["SP"] == "" and tp > 1)
    if row["shard"].startswith("FSDP"):
        dp = int(row["shard"][4:])
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        vpp=number(row, "VPP", 1),
        ep=number(row, "EP", 1),
        sequence_parallel=sp and tp > 1,
    )


def software_of(row: Row) -> Software:
    """The description of the software that the source ran."""
    source, precision, shard = row["source"], row["precision"], row["shard"]
    model_parallel = number(row, "TP", 1) * number(row, "PP", 1) > 1
    if source.startswith("Korthikanti"):
        return replace(software("megatron-paper"), flash=False)
    if "Galvatron" in source:
        by = software("galvatron")
        cut = "vtp" in row["notes"].split("flags ")[-1].split("(")[0]
        return by if cut else replace(by, cut_vocab=False)
    if "torchtitan" in row["source_file_or_url"]:
        return software("fsdp2-compiled")
    if shard.startswith("FSDP") or source.startswith("prime-rl"):
        return software("fsdp2")
    if source.startswith("BigScience") or (shard.startswith("ZeRO") and model_parallel):
        bf16 = precision.startswith("bf16 (")
        by = software("megatron-deepspeed-bf16" if bf16 else "megatron-deepspeed-fp16")
        return replace(by, sharding="none") if shard == "ZeRO-0" else by
    if shard.startswith("ZeRO"):
        level = ("none", "optimizer", "gradients", "parameters")[int(shard[5:])]
        return replace(software("deepspeed"), sharding=level)
    if "Megatron-Bridge" in source:
        # Its Moonlight recipe keeps the optimizer's moments in bf16.
        return software("megatron-bridge-lean" if "Moonlight" in row["model"] else "megatron-bridge")
    return software("nemo" if "NVIDIA" in source or "NeMo" in source else "megatron-lm")


def run_of(row: Row) -> dict[str, object]:
    """Keyword arguments of `training_memory` that say how the row was run."""
    notes, told = row["notes"], row["recompute"]
    recompute = "full" if told == "full" or told.startswith("activation") else "none"
    modules = [name.strip() for name in told[10:].strip(" ()").split(",") if name.strip()] or ["core_attn"]
    if told.startswith("selective"):
        recompute = "ops" if "torchtitan" in row["source_file_or_url"] else "selective"
    seq_len, dp = number(row, "seq_len"), number(row, "DP", 1)
    micro_batch: float = number(row, "micro_batch", 0)
    n_micro = 64
    if row["global_batch"] and micro_batch:
        n_micro = max(round(int(row["global_batch"]) / (dp * micro_batch)), 1)
    if not micro_batch:
        if "Galvatron" not in row["source"]:
            raise SkippedError("no micro_batch given")
        n_micro = number(row, "PP")  # its profiler runs as many micro-batches as stages
        micro_batch = int(row["global_batch"]) / (dp * n_micro)
    precision = row["precision"]
    return {
        "micro_batch": micro_batch,
        "seq_len": seq_len,
        "n_micro_batches": n_micro,
        "recompute": recompute,
        "modules": modules,
        "dtype": {"fp8": "float8", "fp32": "float32"}.get(precision, "bfloat16"),
        "head": "chunked" if "RL head" in notes else "materialised",
        "lora_rank": 16 if "LoRA r=16" in notes else 0,
        "offload_activations": told == "activation CPU offload",
        "stages": _stages(row),
    }


def _stages(row: Row) -> list[int] | None:
    """Where layers do not divide, embedding and head each counted as a layer of their stage."""
    pp, layers = number(row, "PP", 1), shape_of(row).n_layers
    if pp == 1 or layers % pp == 0 or (layers + 2) % pp:
        return None
    each = (layers + 2) // pp
    return [each - (i in (0, pp - 1)) for i in range(pp)]


def shape_of(row: Row) -> ModelShape:
    """The row's model; what the csv leaves out is known of the published model or follows from its size."""
    name = row["model"]
    if name.startswith("Nemotron-3"):
        raise SkippedError("Mamba layers are not modelled")
    for key, known in KNOWN.items():
        if name.startswith(key):
            return known
    if not row["hidden"] or "/expert" in row["ffn"]:
        return published_shape(name)
    hidden, heads = number(row, "hidden"), number(row, "heads", 0)
    vocab, ffn = number(row, "vocab", 51200), number(row, "ffn")
    if row["layers"]:
        layers = int(row["layers"])
    else:  # from the number of parameters: 12 h^2 of a layer, and the embedding
        layers = round((float(row["params_b"]) * 1e9 - vocab * hidden) / (12 * hidden**2))
    if name.startswith("GPT"):
        return ModelShape.gpt(layers, hidden, heads or hidden // 128, vocab, 2048, ffn=ffn)
    kv_heads, qwen = number(row, "kv_heads", heads), name.lower().startswith("qwen3")
    head_dim, tied = 128 if qwen else hidden // heads, qwen and hidden <= 2560
    return ModelShape(
        "llama", layers, hidden, ffn, heads, kv_heads, head_dim, vocab, 8192, tied=tied, qk_norm=qwen
    )


def published_shape(name: str) -> ModelShape:
    """A model of model_arch.csv whose name the row's begins with; SkippedError where there is none."""
    plain = name.lower()
    known = [arch for arch in read(ARCHITECTURES) if plain.startswith(arch["model"].lower())]
    if not known:
        raise SkippedError("sizes of the model are not given")
    arch = max(known, key=lambda arch: len(arch["model"]))
    hidden, heads = int(arch["hidden"]), int(arch["heads"])
    moe = None
    if arch["experts"]:
        dense = range(int(arch["dense_layers"] or 0))
        sizes = [int(arch[key] or 0) for key in ("experts", "top_k", "expert_ffn", "shared_expert_ffn")]
        moe = Experts(*sizes, dense_layers=tuple(dense))
    return ModelShape(
        plain.split("-")[0],
        int(arch["layers"]),
        hidden,
        int(arch["ffn"]),
        heads,
        int(arch["kv_heads"] or heads),
        int(arch["head_dim"] or hidden // heads),
        int(arch["vocab"]),
        8192,
        tied=arch["tied_embeddings"] == "yes",
        qkv_bias=plain.startswith(("qwen2", "glm")),
        qk_norm=plain.startswith("qwen3"),
        moe=moe,
    )


KNOWN = {
    "INTELLECT-3": published_shape("glm4.5-106B-A12B"),  # trained from GLM-4.5-Air
    "Moonlight-16B-A3B": ModelShape(
        "deepseek_v3", 27, 2048, 11264, 16, 16, 192, 163840, 8192,
        moe=Experts(64, 6, 1408, 2816, dense_layers=(0,)), latent=LatentAttention(512, 64, 128, 128),
    ),
    "Nemotron4-15B": ModelShape(
        "nemotron", 32, 6144, 24576, 48, 8, 128, 256000, 4096, gated=False, norm_bias=True
    ),
    "GPT-52B": ModelShape.gpt(64, 8192, 32, 50257, 1024),  # experiments/gpt2-meg of the same repository
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
