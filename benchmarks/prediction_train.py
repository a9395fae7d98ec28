"""Step time of training: the model beside the published rows, constants refitted without each source."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import median

from rolemesh.placement.hardware import HardwareError, hardware
from rolemesh.placement.layout import Layout
from rolemesh.placement.timing.dims import Dims
from rolemesh.placement.timing.efficiency import Efficiency, Machine
from rolemesh.placement.timing.layer import How
from rolemesh.placement.timing.links import Links
from rolemesh.placement.timing.training import Run, TimeItems, training_seconds

TRUTH = Path(__file__).parent / "data" / "truth"
Row = dict[str, str]


class Skip(Exception):
    """Why a row cannot be predicted."""


@dataclass(frozen=True)
class Case:
    """One published measurement as a question to the model."""

    source: str
    kind: str  # megatron16, other16, low (fp8, fp4), lora, fsdp16
    label: str
    dims: Dims
    layout: Layout
    micro_batch: int
    n_micro: int
    seq_len: int
    device: str
    links: Links
    run: Run
    seconds: float
    row: int = -1

    @property
    def family(self) -> Hashable:
        """Cases that agree here differ in layout, micro-batch or recompute alone: their order is a choice."""
        tokens = self.micro_batch * self.n_micro * self.layout.dp * self.seq_len
        how = self.run.how
        batch = round(math.log(tokens) / 0.05)
        return (self.source, self.dims, self.device, self.layout.world, self.seq_len, batch, how)

    @property
    def measured(self) -> float:
        """Seconds of a step."""
        return self.seconds

    @property
    def key(self) -> Hashable:
        """Equal for rows that ask the same."""
        plan = (self.layout, self.micro_batch, self.n_micro, self.seq_len)
        return (self.dims, *plan, self.device, self.links, self.run)

    def value(self, constants: Efficiency | None = None) -> float:
        """The model's seconds."""
        return self.predict(constants).total

    def predict(self, constants: Efficiency | None = None) -> TimeItems:
        """The model's answer."""
        return training_seconds(
            self.dims,
            self.layout,
            micro_batch=self.micro_batch,
            n_micro_batches=self.n_micro,
            seq_len=self.seq_len,
            machine=machine(self.device, constants),
            links=self.links,
            run=self.run,
        )


@cache
def machine(device: str, constants: Efficiency | None = None) -> Machine:
    """The device with the stored constants, or with others."""
    return Machine.of(hardware(device), constants)


def links_of(device: str, source: str) -> Links:
    """Usual links of the device, or what the source says of its cluster."""
    links = Links.of_profile(hardware(device))
    if source.startswith("BigScience 176B"):
        # Jean Zay, BLOOM model card: "8 GPUs per node using NVLink 4 inter-gpu connects, 4 OmniPath links".
        # Four links between a pair is a board of four (inferred); boards meet over PCIe 4 x16, shared by two.
        return replace(links, inter=6.25e9, island=4, island_link=16e9)
    if source.startswith("BigScience GPT-2"):
        return replace(links, per_node=4)  # Jean Zay: four V100 on a node, four 100 Gb/s links
    return links


def device_of(name: str) -> str:
    """Device name of a `gpu_type` cell."""
    try:
        return hardware(name).name
    except HardwareError:
        raise Skip(f"no data sheet for {name}") from None


# model cell starts with: experts, top_k, expert ffn, shared ffn, dense layers, dense ffn, latent attention
MOE = {
    "DeepSeek-V3": (256, 8, 2048, 2048, 3, 18432, True),
    "Kimi-K2": (384, 8, 2048, 2048, 1, 18432, True),
    "Qwen3-235B": (128, 8, 1536, 0, 0, 0, False),
    "Qwen3-30B": (128, 8, 768, 0, 0, 0, False),
    "Moonlight": (64, 6, 1408, 2816, 1, 11264, True),
}
QWEN_HEAD = 128


def dims_of(row: Row) -> Dims:
    """The model's matrices: the row's cells, and the public configuration where they hold none."""
    model = row["model"]
    if model.startswith("GPT OSS 120B"):  # openai/gpt-oss-120b config.json
        return Dims(36, 2880, 64, 8, 64, 2880, 201088, n_experts=128, top_k=4, expert_ffn=2880, window=128,
                    windowed=0.5)  # fmt: skip
    if model.startswith("INTELLECT-3"):  # GLM-4.5-Air: model_arch.csv
        return Dims(46, 4096, 96, 8, 128, 10944, 151552, n_experts=128, top_k=8, expert_ffn=1408,
                    shared_ffn=1408, n_dense_layers=1)  # fmt: skip
    if row["source"].startswith("BigScience GPT-2"):
        # Parameters / (12 x hidden^2): the cells hold no shape; hidden sizes are the SC21 ones of that size.
        layers, hidden = {"GPT-18B": (40, 6144), "GPT-39B": (48, 8192), "GPT-52B": (64, 8192)}[model]
        return Dims(
            layers, hidden, hidden // 128, hidden // 128, 128, 4 * hidden, 50304, gated=False, tied=True
        )
    if model.startswith("Qwen3-Next"):
        # Linear attention in three of four layers: 16 x 2 x 128 + 32 x 2 x 128 + 64 columns; else a gate.
        return Dims(48, 2048, 16, 2, 256, 5120, 151936, n_experts=512, top_k=10, expert_ffn=512,
                    shared_ffn=512, attention_share=0.25, gate_dim=6448)  # fmt: skip
    if not row["hidden"]:
        raise Skip("no shape published (hybrid or unnamed model)")
    hidden = int(row["hidden"])
    vocab = int(re.sub(r"\D", "", row["vocab"].replace("k", "000")) or 51200)
    for start, (experts, top, ffn, shared, n_dense, dense_ffn, latent) in MOE.items():
        if not model.startswith(start):
            continue
        heads = int(row["heads"])
        base = Dims(int(row["layers"]), hidden, heads, heads, 192, dense_ffn or 1, vocab, n_experts=experts,
                    top_k=top, expert_ffn=ffn, shared_ffn=shared, n_dense_layers=n_dense)  # fmt: skip
        if not latent:
            return replace(base, head_dim=QWEN_HEAD, n_kv_heads=int(row["kv_heads"]))
        q_rank = 0 if start == "Moonlight" else 1536
        return replace(base, q_rank=q_rank, kv_rank=512, rope_dim=64, value_dim=128)
    ffn = int(float(row["ffn"])) if row["ffn"] else 4 * hidden
    gpt = ffn == 4 * hidden
    heads = int(row["heads"]) if row["heads"] else max(1, hidden // 128)
    layers = row["layers"]
    if not layers:
        layers = str(round((float(row["params_b"]) * 1e9 - vocab * hidden) / (12 * hidden**2)))
    head_dim = 128 if model.startswith("Qwen3") else hidden // heads
    kv = int(row["kv_heads"]) if row["kv_heads"] else heads
    tied = gpt or model.startswith(("Qwen3-0.6B", "Qwen3-4B"))
    return Dims(int(layers), hidden, heads, kv, head_dim, ffn, vocab, gated=not gpt, tied=tied)


def dtype_of(precision: str) -> str:
    """Type of the matrix products."""
    text = precision.lower()
    if "fp4" in text:
        return "float4"
    if "fp8" in text:
        return "float8"
    return "float16" if text == "fp16" else "bfloat16"


def run_of(row: Row, dtype: str) -> Run:
    """What the source's software does, by source."""
    source, notes, recompute = row["source"], row["notes"], recompute_of(row["recompute"])
    old = Run(
        How(dtype, attention="unfused", dropout=True),
        recompute,
        "none",
        False,
        grad_bytes=2.0,
        scatter_pp=True,
    )
    if source.startswith("Megatron-LM"):
        # DeepSpeed's ZeRO-3 of 2021 gathers each of a layer's twelve parameters by itself, when it is needed.
        return replace(old, shard="zero3", gathers=12) if row["shard"] == "ZeRO-3" else old
    if source.startswith(("Korthikanti", "BigScience GPT-2")):
        return old
    if source.startswith("BigScience"):
        # DeepSpeed's pipeline engine sums gradients by all-reduce: twice a reduce-scatter's bytes.
        wide = 8.0 if "fp32" in row["precision"] else 4.0
        return replace(old, shard="none" if row["shard"] == "ZeRO-0" else "zero1", grad_bytes=wide)
    if source.startswith("MosaicML"):
        shard = "zero2" if row["shard"] == "SHARD_GRAD_OP" else "zero3"
        return Run(How(dtype, attention="flash1", fused=False), recompute, shard, grad_bytes=2.0)
    if source.startswith("torchtitan"):
        eager = notes.startswith("FSDP;")
        mode = "selective:half" if recompute == "selective" else recompute
        # Weights stay gathered through a step of a pipeline (`reshard_after_forward: default`).
        shard = "zero1" if number(row["PP"]) > 1 else "zero3"
        return Run(How(dtype, attention="flash2", fused=not eager), mode, shard, overlap_tp="sync" in notes)
    if source.startswith("prime-rl"):
        kernel = "flash2" if "attention_2" in notes else "flash"
        how = How(dtype, attention=kernel, fused=False, lora="LoRA" in notes)
        return Run(how, "full", "zero3" if row["shard"] else "none", chunked_head=notes.startswith("RL"))
    if source.startswith(("NVIDIA", "Megatron-")):
        dense = not any(row["model"].startswith(name) for name in (*MOE, "GPT OSS", "Qwen3-Next"))
        # Bridge's recipes record the kernels of expert layers on Grace hosts.
        device = device_of(row["gpu_type"])
        how = How(dtype, lora="LoRA" in row["model"], graphs=device.startswith("gb") and not dense)
        shard = "zero3" if "FSDP" in row["shard"] else "zero1"
        # Bridge's recipes overlap dispatch and combine where experts span nodes.
        spans = number(row["EP"]) * number(row["TP"]) > hardware(device).link_devices
        overlap = "1F1B comm overlap" in notes or (source.startswith("NVIDIA") and spans)
        return Run(how, recompute, shard, overlap_tp=dense, overlap_ep=overlap, grad_bytes=2.0)
    return Run(How(dtype), recompute)


def recompute_of(cell: str) -> str:
    """The model's word for a `recompute` cell."""
    if cell.startswith("full") or "offload" in cell:
        return "full"
    if cell == "selective":
        return "selective"
    if cell.startswith("selective"):
        names = {
            "mlp": "mlp",
            "core_attn": "attn",
            "moe": "moe",
            "layernorm": "norm",
            "norm": "norm",
            "act": "act",
        }
        names |= {"moe_act": "act", "mla_up_proj": "up_proj", "shared_expert": "mlp"}
        return "selective:" + ",".join(names[word] for word in re.findall(r"\w+", cell)[1:])
    return "none"


def number(cell: str, default: int = 1) -> int:
    """A whole number of a cell."""
    return int(float(cell)) if cell else default


def layout_of(row: Row, dims: Dims) -> Layout:
    """The row's layout; dp fills the devices."""
    tp, pp, cp, ep = (number(row[name]) for name in ("TP", "PP", "CP", "EP"))
    world = number(row["n_gpus"])
    dp = max(1, world // (tp * pp * cp))
    vpp = min(
        number(row["VPP"], 2 if row["notes"].startswith("Interleaved") else 1), max(1, dims.n_layers // pp)
    )
    sp = tp > 1 and row["SP"] != "no" and not row["source"].startswith("Megatron-LM")
    if not dims.n_experts or (row["shard"] == "FSDP8" and row["source"].startswith("prime")):
        ep = 1
    return Layout(tp=tp, cp=cp, dp=dp, pp=pp, vpp=vpp, ep=ep, sequence_parallel=sp)


def sc21_seconds(row: Row, dims: Dims) -> float:
    """SC21 equation 3, with the full recomputation it counts (96); the model's FLOPs without it are 72."""
    h, s, batch = dims.hidden, number(row["seq_len"]), number(row["global_batch"])
    flops = 96 * batch * s * dims.n_layers * h**2 * (1 + s / (6 * h) + dims.vocab / (16 * dims.n_layers * h))
    return flops / (float(row["tflops_per_gpu"]) * 1e12 * number(row["n_gpus"]))


def model_flops(dims: Dims, seq: int, causal: bool, lora: bool = False) -> float:
    """Forward and backward FLOPs of one token, as Megatron-Bridge counts them."""
    active = dims.dense_params() + dims.n_moe_layers * dims.top_k * dims.ffn_params(dims.expert_ffn)
    matrices = 2.0 * (active + dims.vocab * dims.hidden)
    attention = 2.0 * dims.n_layers * seq * (dims.q_dim + dims.v_dim) * (0.5 if causal else 1.0)
    return (2 if lora else 3) * matrices + 3 * attention


def seconds_of(row: Row, dims: Dims) -> float:
    """Measured seconds of a step, whatever the source prints."""
    source, world = row["source"], number(row["n_gpus"])
    if row["step_seconds"]:
        return float(row["step_seconds"])
    tokens = number(row["global_batch"], 0) * number(row["seq_len"], 0)
    if row["tokens_per_s_per_gpu"] and tokens:
        return tokens / float(row["tokens_per_s_per_gpu"]) / world
    if row["tflops_per_gpu"] and tokens:
        if "SC21" in source:
            return sc21_seconds(row, dims)
        if source.startswith("Megatron-"):
            return (
                tokens
                * model_flops(dims, number(row["seq_len"]), True)
                / float(row["tflops_per_gpu"])
                / 1e12
                / world
            )
    raise Skip("neither step time nor a rate with its batch published")


def case_of(row: Row, index: int) -> Case:
    """The row as a question; raises Skip with the reason."""
    source = row["source"]
    if source.startswith("Metis"):
        raise Skip("hidden size, heads and sequence length not published")
    if source.startswith("AReaL"):
        raise Skip("batch, sequence lengths and layout not published")
    if source.startswith("MegaScale"):
        raise Skip("global batch not published")
    if not row["TP"]:
        raise Skip("layout not published")
    if not row["seq_len"]:
        raise Skip("sequence length not published")
    device, dims, dtype = device_of(row["gpu_type"]), dims_of(row), dtype_of(row["precision"])
    if source.startswith("torchtitan") and not row["global_batch"]:
        row = {**row, "global_batch": str(_titan_batch(row))}
    layout, run, seq = layout_of(row, dims), run_of(row, dtype), number(row["seq_len"])
    batch = number(row["global_batch"], 0)
    per_replica = max(1, round(batch / layout.dp))
    if row["micro_batch"]:
        micro = min(number(row["micro_batch"]), per_replica)
    else:
        micro = 1 if layout.pp > 1 or seq >= 8192 else min(8, per_replica)
    case = Case(source, _kind(row, dtype, run), f"{row['model']} {layout}", dims, layout, micro,
                max(1, round(per_replica / micro)), seq, device, links_of(device, source), run,
                seconds_of(row, dims), index)  # fmt: skip
    if not math.isfinite(case.seconds) or case.seconds <= 0:
        raise Skip("no time")
    return case


def _titan_batch(row: Row) -> int:
    local = re.search(r"local batch (\d+)", row["notes"])
    dp = number(row["n_gpus"]) // (number(row["TP"]) * number(row["PP"]) * number(row["CP"]))
    return dp * (int(local.group(1)) if local else number(row["micro_batch"]))


def _kind(row: Row, dtype: str, run: Run) -> str:
    if run.how.lora:
        return "lora"
    if dtype in ("float8", "float4"):
        return "low"
    megatron = row["source"].startswith(("Megatron", "Korthikanti", "BigScience", "NVIDIA"))
    return "megatron16" if megatron and run.shard != "zero3" else "fsdp16"


def load() -> tuple[list[Case], list[tuple[str, str]]]:
    """(cases, skipped rows as (source, reason))."""
    cases, skipped = [], []
    with (TRUTH / "train_truth.csv").open(encoding="utf-8") as file:
        for index, row in enumerate(csv.DictReader(file)):
            try:
                cases.append(case_of(row, index))
            except Skip as reason:
                skipped.append((row["source"], str(reason)))
    return cases, skipped


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean, nan of nothing."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else math.nan


KINDS = {
    "megatron16": "Megatron, bf16 and fp16",
    "fsdp16": "FSDP and others, bf16 and fp16",
    "low": "fp8 and fp4",
    "lora": "adapters",
}


@dataclass(frozen=True)
class Ranking:
    """How well a model orders the layouts of one model on the same devices."""

    right: int
    pairs: int
    regrets: tuple[float, ...]

    def __str__(self) -> str:
        worst = max(self.regrets, default=0.0)
        return (
            f"{self.right} of {self.pairs} pairs that differ by over 3% ranked right "
            f"({100 * self.right / max(1, self.pairs):.0f}%); regret of the top choice "
            f"{100 * mean(self.regrets):.1f}% mean, {100 * worst:.0f}% worst, {len(self.regrets)} families"
        )


def rank(cases: Sequence[Case], predicted: Sequence[float]) -> Ranking:
    """Order of the layouts in each family, by seconds a token; rows that ask the same count once (median)."""
    families: dict[Hashable, dict[Hashable, list[tuple[float, float]]]] = {}
    for case, seconds in zip(cases, predicted, strict=True):
        tokens = case.micro_batch * case.n_micro * case.layout.dp * case.seq_len
        questions = families.setdefault(case.family, {})
        questions.setdefault(case.key, []).append((case.seconds / tokens, seconds / tokens))
    right = pairs = 0
    regrets = []
    for questions in families.values():
        if len(questions) < 2:
            continue
        choices = [(median(m for m, _ in rows), rows[0][1]) for rows in questions.values()]
        picked = min(choices, key=lambda choice: choice[1])
        regrets.append(picked[0] / min(choices)[0] - 1)
        for one, other in combinations(choices, 2):
            if max(one[0], other[0]) > 1.03 * min(one[0], other[0]):
                pairs += 1
                right += (one[0] < other[0]) == (one[1] < other[1])
    return Ranking(right, pairs, tuple(regrets))


def main() -> None:
    """Print the errors per source, in total and by kind, and the ranking."""
    from fit_timing import PRIORS, Fit, report, stored

    cases, skipped = load()
    fit = Fit(cases, PRIORS)
    theta = fit.at(stored())
    inside = fit.predict(theta)[fit.index]
    outside = fit.leave_one_source_out(theta, fit.jacobian(theta, fit.predict(theta)))
    print("Training step time: mean absolute relative error, %\n")
    report(fit, inside, outside, {case: KINDS[case.kind] for case in cases}, skipped)
    for name, seconds in (("in sample", inside), ("leave one source out", outside)):
        print(f"\nlayouts of the same model, {name}: {rank(cases, [math.exp(value) for value in seconds])}")


if __name__ == "__main__":
    main()
