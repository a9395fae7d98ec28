"""Bytes that a layer keeps for its backward pass.

Counted tensor by tensor, as Korthikanti et al. 2022 (arXiv 2205.05198, section 4) do: a GPT layer with
dropout and fused norms keeps s b h (10 + 24 / t + 5 a s / (h t)), the first term divided by t too under
sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from rolemesh.placement.layout import Layout
from rolemesh.placement.memory.software import Software
from rolemesh.placement.model import ModelShape

Recompute = Literal["none", "selective", "ops", "full"]
Module = Literal["core_attn", "mlp", "moe", "moe_act", "shared_experts", "layernorm", "mla_up_proj"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


@dataclass(frozen=True)
class Pass:
    """One micro-batch on one rank.

    Attributes:
        tokens: of the rank's part of the sequences, after cp.
        seq_len: whole length of a sequence, which attention spans.
        dtype_bytes: of an activation.
        matmul_bytes: of an input that is kept for a matrix product (1 where it is kept in fp8).
    """

    tokens: float
    seq_len: int
    dtype_bytes: int
    matmul_bytes: int

    @classmethod
    def of(cls, layout: Layout, micro_batch: float, seq_len: int, dtype: str) -> Pass:
        """`micro_batch` sequences of `seq_len` tokens; float8 computes products in it, the rest in bf16."""
        size = DTYPE_BYTES[dtype]
        return cls(micro_batch * seq_len / layout.cp, seq_len, max(size, 2), size)


def layer_bytes(shape: ModelShape, layout: Layout, run: Pass, software: Software, *, moe: bool) -> float:
    """What one layer keeps without any recomputation, without attention's scores."""
    return attention_bytes(shape, layout, run, software) + (
        moe_bytes(shape, layout, run, software)
        if moe
        else mlp_bytes(shape, layout, run, software, shape.ffn, norm=True)
    )


def attention_bytes(shape: ModelShape, layout: Layout, run: Pass, software: Software) -> float:
    """Norm, projections, attention without its scores, output projection, and dropout after it."""
    size = run.dtype_bytes
    whole = shape.hidden * (_norm(software, size) + run.matmul_bytes + software.dropout)
    query, key, value = _attention_widths(shape)
    out = shape.n_heads * (shape.latent.v_dim if shape.latent else shape.head_dim)
    kept_kv = max(1.0, layout.tp / shape.n_kv_heads)  # too few KV heads are copied over tp
    cut = size * (query + kept_kv * (key + value)) + size * out * (2 if software.by_sample else 1)
    if software.flash:
        cut += 4 * shape.n_heads  # log of each row's sum, fp32
    if shape.latent:
        cut += software.rope * size * shape.n_heads * shape.latent.nope_dim  # beside the values
    elif software.rope and not shape.learned_positions:
        cut += size * (query + kept_kv * key)
    if shape.qk_norm:
        cut += (_norm(software, size) - size * (software.norm == 0 and software.rope)) * (query + key)
    if shape.latent:
        whole += _norm(software, size) * (shape.latent.kv_rank + (shape.latent.q_rank or 0))
        whole += run.matmul_bytes * (shape.latent.kv_rank + (shape.latent.q_rank or 0))
    # Rotary tables, the same for all rows of a micro-batch unless each token has its own row.
    positions = run.tokens if software.by_sample else run.seq_len / layout.cp
    tables = software.rotary * positions * size * _rotary_dim(shape)
    return run.tokens * (whole / _sequence_parts(layout) + cut / layout.tp) + tables


def score_bytes(shape: ModelShape, layout: Layout, run: Pass, software: Software) -> float:
    """Softmax, its dropout's mask and output: 2 + 1 + 2 bytes per score; nothing with flash attention."""
    if software.flash:
        return 0.0
    per_score = 2 * run.dtype_bytes + software.dropout
    return per_score * shape.n_heads * run.seq_len * run.tokens / layout.tp


def mlp_bytes(
    shape: ModelShape, layout: Layout, run: Pass, software: Software, columns: int, *, norm: bool
) -> float:
    """A feed-forward of `columns`, with the norm before it where `norm`."""
    if not columns:
        return 0.0
    size = run.dtype_bytes
    whole = shape.hidden * (norm * _norm(software, size) + run.matmul_bytes + software.dropout)
    if shape.gated:
        cut = 2 * size + max(software.glu - 1, 0) * size + run.matmul_bytes
    else:
        cut = size + run.matmul_bytes
    return run.tokens * (whole / _sequence_parts(layout) + columns * cut / layout.tp)


def moe_bytes(shape: ModelShape, layout: Layout, run: Pass, software: Software) -> float:
    """Norm, router, shared experts, and the routed experts' part of the tokens."""
    assert shape.moe is not None
    size = run.dtype_bytes
    # The norm's input and output, and fp32 router scores: logits and probabilities.
    whole = shape.hidden * (_norm(software, size) + run.matmul_bytes) + 8 * shape.moe.n
    shared = mlp_bytes(shape, layout, run, software, shape.moe.shared_ffn, norm=False)
    sent = expert_tokens(shape, layout, run, software)
    columns = ((1 + shape.gated) + max(software.glu - 1, 0)) * size + run.matmul_bytes
    routed = sent * (software.expert_saved * shape.hidden + columns * shape.moe.ffn / layout.etp)
    return run.tokens * whole / _sequence_parts(layout) + shared + routed


def expert_tokens(shape: ModelShape, layout: Layout, run: Pass, software: Software) -> float:
    """Tokens that the fullest rank's experts take: `top_k` copies of each, spread over tp, cp and ep."""
    assert shape.moe is not None
    uneven = software.imbalance if layout.ep > 1 else 1.0
    return run.tokens * shape.moe.top_k * uneven * layout.etp / layout.tp


def module_bytes(
    shape: ModelShape,
    layout: Layout,
    run: Pass,
    software: Software,
    modules: Collection[Module],
    *,
    moe: bool,
) -> float:
    """What a layer need not keep when these modules are recomputed from their inputs."""
    size, parts = run.dtype_bytes, _sequence_parts(layout)
    total = score_bytes(shape, layout, run, software) * ("core_attn" in modules)
    if "layernorm" in modules:  # outputs of both norms, which the products after them keep
        total += 2 * run.tokens * shape.hidden * run.matmul_bytes / parts
    if "mla_up_proj" in modules and shape.latent:
        query, key, value = _attention_widths(shape)
        total += run.tokens * size * (query + key + value) / layout.tp
    if not moe:
        inner = mlp_bytes(shape, layout, run, software, shape.ffn, norm=False)
        return total + ("mlp" in modules) * (inner - run.tokens * shape.hidden * run.matmul_bytes / parts)
    assert shape.moe is not None
    sent = expert_tokens(shape, layout, run, software)
    if "moe" in modules:
        norm = run.tokens * shape.hidden * (_norm(software, size) + size) / parts
        return total + moe_bytes(shape, layout, run, software) - norm
    if "moe_act" in modules:
        total += sent * run.matmul_bytes * shape.moe.ffn / layout.etp
    if "shared_experts" in modules:
        total += mlp_bytes(shape, layout, run, software, shape.moe.shared_ffn, norm=False)
    return total


def layer_input_bytes(shape: ModelShape, layout: Layout, run: Pass) -> float:
    """What stays of a layer that is recomputed: its input."""
    return run.tokens * shape.hidden * run.dtype_bytes / _sequence_parts(layout)


def backward_bytes(shape: ModelShape, layout: Layout, run: Pass, software: Software, *, moe: bool) -> float:
    """Gradients of activations while a feed-forward goes backward: of its hidden columns and input."""
    ends = 3 * shape.hidden * run.dtype_bytes * run.tokens / _sequence_parts(layout)
    if moe:
        assert shape.moe is not None
        sent = expert_tokens(shape, layout, run, software)
        columns = (1 + shape.gated) * shape.moe.ffn * run.dtype_bytes / layout.etp
        return ends + sent * (software.expert_grad * shape.hidden + columns)
    return ends + run.tokens * (1 + shape.gated) * shape.ffn * run.dtype_bytes / layout.tp


def _norm(software: Software, size: int) -> float:
    return software.norm or size


def _sequence_parts(layout: Layout) -> int:
    return layout.tp if layout.sequence_parallel else 1


def _rotary_dim(shape: ModelShape) -> int:
    if shape.learned_positions:
        return 0
    return shape.latent.rope_dim if shape.latent else shape.head_dim


def _attention_widths(shape: ModelShape) -> tuple[int, int, int]:
    """Values per token of query, key and value as attention takes them."""
    if shape.latent:
        heads = shape.n_heads
        return heads * shape.head_dim, heads * shape.head_dim, heads * shape.latent.v_dim
    kv = shape.n_kv_heads * shape.head_dim
    return shape.n_heads * shape.head_dim, kv, kv
