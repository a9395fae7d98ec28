"""Seconds of one decoder layer, one embedding and one head on one rank, for one micro-batch.

Counts follow Korthikanti et al. 2022 (bytes of activations), Narayanan et al. 2021 (FLOPs) and Dao 2023
(fused attention does 2.5 times its forward work in the backward pass).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rolemesh.placement.layout import Layout
from rolemesh.placement.model import padded_vocab
from rolemesh.placement.timing.dims import Dims
from rolemesh.placement.timing.efficiency import Machine
from rolemesh.placement.timing.gemm import gemm_seconds


@dataclass(frozen=True)
class How:
    """How the software runs a layer.

    Attributes:
        dtype: of the matrix products; attention and the head stay in 16 bits below that.
        attention: `flash` is the device's own fused kernel, `flash2` and `flash1` are its earlier
            generations; `unfused` scores go through memory.
        fused: element-wise operators are fused (Megatron, torch.compile).
        lora: base matrices are frozen, so they have no weight gradients.
        dropout: scores and residuals pass a dropout.
        graphs: kernels are started from recorded graphs, so their start costs next to nothing.
        inference: nothing is kept for a backward pass; weights are stored in `dtype`.
        fused_routing: tokens are sorted by expert in one kernel; else cut into a piece for each expert and
            joined again (Megatron without `moe_permute_fusion`): tokens and probabilities on their way to the
            experts, tokens on their way back. The host handles each piece in about a kernel's start.
    """

    dtype: str = "bfloat16"
    attention: str = "flash"
    fused: bool = True
    lora: bool = False
    dropout: bool = False
    graphs: bool = False
    inference: bool = False
    fused_routing: bool = True


@dataclass
class Pass:
    """Seconds of a forward and of a backward pass, by kind."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)

    def add(self, kind: str, forward: float, backward: float) -> None:
        """Add seconds of one kind."""
        self.forward[kind] = self.forward.get(kind, 0.0) + forward
        self.backward[kind] = self.backward.get(kind, 0.0) + backward


def wide(dtype: str) -> str:
    """The 16-bit (or wider) type that attention and the head run in."""
    return "bfloat16" if dtype in ("float8", "float4") else dtype


def decoder_layer(
    dims: Dims, layout: Layout, *, sequences: float, seq_len: int, moe: bool, machine: Machine, how: How
) -> Pass:
    """One layer for `sequences` sequences of `seq_len` tokens (of which a rank has 1/cp)."""
    out = Pass()
    tokens = sequences * seq_len / layout.cp
    _matrices(out, dims.attention_weights(), tokens, layout.tp, machine, how)
    if dims.attention_share:
        _attention(out, dims, layout, sequences, seq_len, machine, how)
    if moe:
        _experts(out, dims, layout, tokens, machine, how)
    else:
        _matrices(out, dims.ffn_weights(dims.ffn), tokens, layout.tp, machine, how)
    _elementwise(out, dims, layout, tokens, moe, machine, how)
    eff = machine.efficiency
    start = 0.0 if how.graphs else eff.kernel
    out.add("memory_bound", 20 * start, 34 * start)
    if moe:
        out.add("memory_bound", eff.moe_extra, eff.moe_extra)
    if not how.graphs:
        # The host starts kernels one by one: a layer takes at least as long as that.
        host = eff.moe_host if moe else eff.host
        if moe and not how.fused_routing:
            host += 3 * dims.n_experts * eff.kernel
        host *= eff.host_clock * (0.5 if how.inference else 1.0)
        forward, backward = sum(out.forward.values()), sum(out.backward.values())
        out.add("host", max(0.0, host - forward), max(0.0, 2 * host - backward))
    return out


def _product(tokens: float, k: int, n: int, machine: Machine, how: How, dtype: str) -> tuple[float, float]:
    """Seconds of x W forward, and of both gradients."""
    return _grouped(tokens, k, n, machine, how, dtype, 1)


def _grouped(
    tokens: float, k: int, n: int, machine: Machine, how: How, dtype: str, groups: int
) -> tuple[float, float]:
    forward = gemm_seconds(round(tokens), n, k, machine, dtype, groups, (k, n))
    data = gemm_seconds(round(tokens), k, n, machine, dtype, groups, (k, n))
    weights = 0.0 if how.lora else gemm_seconds(k, n, round(tokens), machine, dtype, groups, (k, n))
    return forward, data + weights


def _matrices(
    out: Pass, weights: list[tuple[int, int, str]], tokens: float, tp: int, machine: Machine, how: How
) -> None:
    for k, n, cut in weights:
        k, n = (k // tp if cut == "in" else k), (n // tp if cut == "out" else n)
        out.add("gemm", *_product(tokens, k, n, machine, how, how.dtype))
        _casts(out, tokens, k, n, machine, how)
        if how.lora:
            # The adapter's output is written, read and added to the product's; its input's gradient likewise.
            seconds = (4.0 if how.fused else 8.0 * machine.efficiency.unfused) * tokens / machine.memory_rate
            out.add("memory_bound", seconds * n, seconds * (n + k))


def _casts(out: Pass, tokens: float, k: int, n: int, machine: Machine, how: How) -> None:
    """Below 16 bits inputs, output gradients and weights are read in 16 bits, written both ways up."""
    if how.dtype not in ("float8", "float4"):
        return
    if how.inference:
        out.add("memory_bound", (2 + machine.bytes_of(how.dtype)) * tokens * k / machine.memory_rate, 0.0)
        return
    each = 2 + 2 * machine.bytes_of(how.dtype)
    forward, backward = (
        each * (tokens * k + n * k) / machine.memory_rate,
        each * tokens * n / machine.memory_rate,
    )
    out.add("memory_bound", forward + 2 * machine.efficiency.kernel, backward + machine.efficiency.kernel)


def attention_flops(dims: Dims, sequences: float, queries: float, keys: float, causal: bool = True) -> float:
    """Forward FLOPs of softmax attention in one layer (mean over layers), all heads."""
    share = dims.attention_share
    half = 0.5 if causal else 1.0
    full = 2.0 * sequences * queries * keys * (dims.q_dim + dims.v_dim) * half
    if not dims.window or keys <= dims.window:
        return full * share
    near = 2.0 * sequences * queries * dims.window * (dims.q_dim + dims.v_dim)
    return share * (dims.windowed * min(near, full) + (1 - dims.windowed) * full)


def _attention(
    out: Pass, dims: Dims, layout: Layout, sequences: float, seq_len: int, machine: Machine, how: How
) -> None:
    eff, dtype, queries = machine.efficiency, wide(how.dtype), seq_len / layout.cp
    if how.attention != "unfused":
        flops = attention_flops(dims, sequences, queries, seq_len) / layout.tp
        width = min(dims.head_dim, 128)
        fill = width / (width + eff.head_half) * (128 + eff.head_half) / 128
        # The last, part-filled blocks of a short sequence: work grows by a block of 128 keys on the diagonal.
        flops *= 1 + 128 / seq_len
        rate = (
            machine.peak(dtype)
            * fill
            * {"flash": 1.0, "flash2": eff.flash2, "flash1": eff.flash1}[how.attention]
        )
        forward, backward = flops / (rate * eff.flash), 2.5 * flops / (rate * eff.flash_backward)
        io = 2.0 * sequences * queries * (2 * dims.q_dim + 2 * dims.v_dim) / layout.tp / machine.memory_rate
        out.add("attention", max(forward, io), max(backward, 2 * io))
        return
    batch = max(1, round(sequences * dims.n_heads / layout.tp))
    scores = gemm_seconds(round(queries), seq_len, dims.head_dim, machine, dtype, batch, (dims.head_dim,))
    width = dims.v_dim // dims.n_heads
    values = gemm_seconds(round(queries), width, seq_len, machine, dtype, batch, (width,))
    numbers = batch * queries * seq_len / machine.memory_rate
    # Scores are written, scaled and softmaxed (read, write), dropped (read, write, mask), read.
    drop = 5 if how.dropout else 0
    loose = 1.0 if how.fused else eff.unfused
    out.add("attention", scores + values, 2 * (scores + values))
    out.add("memory_bound", numbers * (2 + loose * (4 + drop) + 2), numbers * (4 + loose * (6 + drop) + 4))


def _experts(out: Pass, dims: Dims, layout: Layout, tokens: float, machine: Machine, how: How) -> None:
    """Grouped products of this rank's experts, and the shared expert on every token."""
    eff = machine.efficiency
    here = max(1, dims.n_experts * layout.etp // (layout.ep * layout.etp))
    routed = tokens / layout.tp * dims.top_k * layout.etp * eff.imbalance
    each = max(1.0, routed / here)
    for k, n, cut in dims.ffn_weights(dims.expert_ffn):
        k, n = (k // layout.etp if cut == "in" else k), (n // layout.etp if cut == "out" else n)
        out.add("experts", *_grouped(each, k, n, machine, how, how.dtype, here))
        _casts(out, routed, k, n, machine, how)
    # Sorting tokens by expert and back: read and write, both ways; unfused with an index and a weight each.
    moved = 2 * (4.0 if how.fused else 12.0) * routed * dims.hidden / machine.memory_rate
    act = (
        _activation_bytes(dims.gated, how.fused) * routed * dims.expert_ffn / layout.etp / machine.memory_rate
    )
    out.add("memory_bound", moved + act, moved + 1.6 * act)
    if dims.shared_ffn:
        _matrices(out, dims.ffn_weights(dims.shared_ffn), tokens, layout.tp, machine, how)


def _activation_bytes(gated: bool, fused: bool) -> float:
    """Read (twice if gated) and write; unfused, the gate's product is another operator."""
    return (6.0 if fused else 10.0) if gated else 4.0


def _norm_bytes(gated: bool, fused: bool) -> float:
    """Read and write; unfused RMSNorm (gated families) is six operators in fp32, LayerNorm one kernel."""
    return 36.0 if gated and not fused else 4.0


def _elementwise(
    out: Pass, dims: Dims, layout: Layout, tokens: float, moe: bool, machine: Machine, how: How
) -> None:
    eff = machine.efficiency
    loose = 1.0 if how.fused else eff.unfused
    whole = tokens / (layout.tp if layout.sequence_parallel else 1)
    # Two norms and two residual additions (two reads, one write, the dropout's mask).
    stream = whole * dims.hidden * (2 * _norm_bytes(dims.gated, how.fused) + 12 + (2 if how.dropout else 0))
    act_width = (dims.shared_ffn if moe else dims.ffn) / layout.tp
    act = tokens * act_width * _activation_bytes(dims.gated, how.fused)
    turned = (dims.q_dim + dims.n_kv_heads * dims.head_dim) / layout.tp if dims.gated else 0
    rotary = tokens * (4 if how.fused else 24) * turned
    seconds = loose / machine.memory_rate
    out.add("memory_bound", seconds * (stream + act + rotary), seconds * (1.2 * stream + 1.6 * act + rotary))


def head(
    dims: Dims, layout: Layout, *, tokens: float, machine: Machine, how: How, chunked: bool = False
) -> Pass:
    """Logits and cross-entropy over this rank's part of the vocabulary; `chunked` makes logits twice."""
    out = Pass()
    columns = dims.head_columns or dims.vocab
    if columns == dims.vocab:
        columns = padded_vocab(dims.vocab, layout.tp) // layout.tp
    forward, backward = _product(tokens, dims.hidden, columns, machine, how, wide(how.dtype))
    out.add("gemm", forward, backward + (forward if chunked else 0.0))
    loose = 1.0 if how.fused else machine.efficiency.unfused
    # Loss in fp32: read 2, write 4, maximum 4, exponential and sum 8; the gradient reads 4 and writes 2.
    numbers = tokens * columns * loose / machine.memory_rate
    out.add("memory_bound", 18 * numbers, 6 * numbers + (18 * numbers if chunked else 0.0))
    return out
