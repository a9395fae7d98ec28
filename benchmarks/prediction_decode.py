"""Generation throughput: the model beside the published rows, constants refitted without each source."""

from __future__ import annotations

import csv
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache

from prediction_train import TRUTH, Row, Skip, number

from rolemesh.placement.hardware import hardware
from rolemesh.placement.layout import Layout
from rolemesh.placement.timing.decode import Engine, Server
from rolemesh.placement.timing.dims import Dims
from rolemesh.placement.timing.efficiency import Efficiency, Machine
from rolemesh.placement.timing.links import Links

USABLE = 0.9  # of the device's memory that an engine fills with weights and cache
OVERHEAD = 3e9  # bytes of it for context, graphs and activations
LARGEST_BATCH = 2048  # TensorRT-LLM's default `max_batch_size`
ACCEPTED = 0.7  # of one drafted token (multi-token prediction), when nothing is published

# Public config.json of each model; the first ones are in model_arch.csv too. Three of four layers of
# Qwen3.5 have gated linear attention, 16 x 2 x 128 + 64 x 2 x 128 + 128 columns; the others a gate as wide
# as the queries.
SHAPES = {
    "Llama-3.3-70B": Dims(80, 8192, 64, 8, 128, 28672, 128256),
    "Llama-3.1-8B": Dims(32, 4096, 32, 8, 128, 14336, 128256),
    "Llama-3.1-405B": Dims(126, 16384, 128, 8, 128, 53248, 128256),
    "Llama-2-70B": Dims(80, 8192, 64, 8, 128, 28672, 32000),
    "GPT-13B": Dims(40, 5120, 40, 40, 128, 20480, 50257, gated=False, tied=True),
    "Qwen3-235B-A22B": Dims(94, 4096, 64, 4, 128, 1, 151936, n_experts=128, top_k=8, expert_ffn=1536),
    "Qwen3-30B-A3B": Dims(48, 2048, 32, 4, 128, 1, 151936, n_experts=128, top_k=8, expert_ffn=768),
    "MiniMax-M2.5": Dims(62, 3072, 48, 8, 128, 1, 200064, n_experts=256, top_k=8, expert_ffn=1536),
    "GLM-5": Dims(78, 6144, 64, 64, 256, 12288, 154880, n_experts=256, top_k=8, expert_ffn=2048,
                  shared_ffn=2048, n_dense_layers=3, q_rank=2048, kv_rank=512, rope_dim=64, value_dim=256,
                  window=2048, windowed=1.0),
    "Qwen3.5-397B": Dims(60, 4096, 32, 2, 256, 1, 248320, n_experts=512, top_k=10, expert_ffn=1024,
                         shared_ffn=1024, attention_share=0.25, gate_dim=10_592),
}  # fmt: skip
NATIVE = {"MiniMax-M2.5": "float8"}  # weights as released, where the row names no precision


@dataclass(frozen=True)
class Case:
    """One published row: output tokens/s of `replicas` servers, or seconds of a token."""

    source: str
    kind: str  # 16 (bf16, fp16) or low (fp8, fp4)
    label: str
    dims: Dims
    device: str
    tp: int
    engine: Engine
    load: float | None  # sequences at once; None: as many as fit
    prompt: float
    response: float
    measured: float  # output tokens/s of the server
    row: int

    @property
    def key(self) -> Hashable:
        """Equal for rows that ask the same."""
        return (self.dims, self.device, self.tp, self.engine, self.load, self.prompt, self.response)

    def value(self, constants: Efficiency | None = None) -> float:
        """The model's output tokens/s."""
        return self.predict(constants)

    def predict(self, constants: Efficiency | None = None) -> float:
        """Output tokens/s."""
        server = self.server(constants)
        load = self.load
        if load is None:
            load = min(LARGEST_BATCH, server.fits(self.capacity(server), self.prompt, self.response))
        return server.steady_tokens_per_s(load, self.prompt, self.response)

    def server(self, constants: Efficiency | None = None) -> Server:
        """The replica."""
        machine_ = machine(self.device, constants)
        return Server(
            self.dims, Layout(tp=self.tp), machine_, Links.of_profile(hardware(self.device)), self.engine
        )

    def capacity(self, server: Server) -> float:
        """Tokens that the cache holds."""
        size = server.machine.bytes_of(self.engine.weights)
        params = self.dims.dense_params() + self.dims.expert_params()
        weights = (params * size + 2.0 * self.dims.embedding_params()) / self.tp
        free = USABLE * (hardware(self.device).memory_bytes - OVERHEAD - weights)
        if free <= 0:
            raise Skip("weights do not fit")
        return free / server.cache_bytes_of_token()


@cache
def machine(device: str, constants: Efficiency | None = None) -> Machine:
    """The device with the stored constants, or with others."""
    return Machine.of(hardware(device), constants)


def case_of(row: Row, index: int) -> Case:
    """The row as a question; raises Skip with the reason."""
    source, name = row["source"], next((key for key in SHAPES if row["model"].startswith(key)), "")
    if not row["output_len"] or not row["gpu_type"]:
        raise Skip("lengths, batch or device not published")
    if not name:
        raise Skip(f"no shape of {row['model']}")
    precision = row["precision"].lower()
    weights = {"fp4": "float4", "fp8": "float8"}.get(precision, NATIVE.get(name, "bfloat16"))
    prompt, response = float(row["input_len"]), float(row["output_len"])
    drafted = int("MTP" in row["engine"])
    cache_dtype = "float8" if source.startswith("TensorRT") else "bfloat16"
    name_, tp = row["engine"], number(row["n_gpus"])
    # vLLM of 2023 ran a step on Ray actors, without graphs; TensorRT-LLM admits what will fit to the end.
    engine = Engine(
        weights,
        cache_dtype,
        data_attention="data-parallel attention" in name_,
        reserve="TRT" in name_ or "TensorRT" in name_,
        python="vLLM" in name_,
        eager=name_ == "vLLM",
        chunk=2048 if "vLLM" in name_ else 8192,  # default tokens of a prefill pass
        tokens_per_step=1 + ACCEPTED * drafted,
        drafted=drafted,
    )
    batch = row["batch_or_concurrency"]
    load = float(batch) if batch.replace(".", "").isdigit() else None
    if row["tokens_per_s_total"]:
        measured = float(row["tokens_per_s_total"])
    elif row["latency_s"] and load:
        measured = load * response / float(row["latency_s"])
    else:
        raise Skip("neither throughput nor latency with its batch published")
    kind = "16" if weights == "bfloat16" else "low"
    device = hardware(row["gpu_type"]).name
    label = f"{row['model']} tp={tp} {batch} x {prompt:g}/{response:g}"
    return Case(source, kind, label, SHAPES[name], device, tp,
                engine, load, prompt, response, measured, index)  # fmt: skip


def load() -> tuple[list[Case], list[tuple[str, str]]]:
    """(cases, skipped rows as (source, reason))."""
    cases, skipped = [], []
    with (TRUTH / "decode_truth.csv").open(encoding="utf-8") as file:
        for index, row in enumerate(csv.DictReader(file)):
            try:
                cases.append(case_of(row, index))
            except Skip as reason:
                skipped.append((row["source"], str(reason)))
    return cases, skipped


def main() -> None:
    """Print the errors per source, in total and by kind."""
    from fit_timing import DECODE, Fit, report, stored

    cases, skipped = load()
    fit = Fit(cases, DECODE, stored())
    theta = fit.at(stored())
    inside = fit.predict(theta)[fit.index]
    outside = fit.leave_one_source_out(theta, fit.jacobian(theta, fit.predict(theta)))
    print("Output tokens/s of generation: mean absolute relative error, %\n")
    names = {"16": "bf16 and fp16", "low": "fp8 and fp4"}
    report(fit, inside, outside, {case: names[case.kind] for case in cases}, skipped)


if __name__ == "__main__":
    main()
