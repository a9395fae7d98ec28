"""Memory of roles that score or generate: weights, one layer's activations, logits, and the KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rolemesh.placement.layout import Layout
from rolemesh.placement.memory.activations import DTYPE_BYTES, Pass
from rolemesh.placement.memory.items import MemoryItems
from rolemesh.placement.memory.parameters import layers_of, rank_params, tile_logits, vocab_rows
from rolemesh.placement.model import ModelShape

PAGE_TOKENS = 16  # vLLM's block size
PREFILL_TOKENS = 8192  # that an engine puts into one pass: vLLM's max_num_batched_tokens for serving


def inference_memory(
    shape: ModelShape,
    layout: Layout,
    *,
    micro_batch: float,
    seq_len: int,
    dtype: str = "bfloat16",
    stages: Sequence[int] | None = None,
) -> MemoryItems:
    """Bytes of the heaviest rank of a role that only scores: forward passes without gradients.

    Of `micro_batch` sequences at a time it holds one layer's activations, and on the last stage a tile of the
    logits; a role with a value head holds none.
    """
    run = Pass.of(layout, micro_batch, seq_len, dtype)
    size = DTYPE_BYTES[dtype]

    def of_stage(stage: int) -> MemoryItems:
        params = rank_params(shape, layout, stage, stages)
        last = stage == layout.pp - 1
        logits = 0.0
        if last and shape.n_labels is None:
            logits = run.dtype_bytes * tile_logits(run.tokens * vocab_rows(shape, layout))
        layer = layer_transient(shape, layout, run) if layers_of(shape, layout, stages)[stage] else 0
        received = run.tokens * shape.hidden * run.dtype_bytes * (layout.pp > 1)
        working = {"activations": max(layer - logits, 0), "logits": logits, "stage transfers": received}
        return MemoryItems({"weights": params.total * size}, working, stage, "forward")

    if shape.moe or stages is not None:
        wanted = range(layout.pp)
    else:  # no stage between has more layers than the first
        wanted = range(0, layout.pp, max(layout.pp - 1, 1))
    return max((of_stage(stage) for stage in wanted), key=lambda items: items.total)


def layer_transient(shape: ModelShape, layout: Layout, run: Pass) -> float:
    """Bytes of one layer at work without gradients: residual, norm, and the widest of its inner tensors."""
    parts = layout.tp if layout.sequence_parallel else 1
    whole = 2 * shape.hidden * run.dtype_bytes
    # Under sequence parallelism the norm's output is gathered for the projections.
    gathered = shape.hidden * run.dtype_bytes * (parts > 1)
    q = shape.n_heads * shape.head_dim
    kv = max(shape.n_kv_heads, layout.tp) * shape.head_dim
    attention = (2 * q + 2 * kv) / layout.tp
    if shape.moe is None:
        inner = (2 + shape.gated) * shape.ffn / layout.tp
    else:
        copies = shape.moe.top_k * layout.etp / layout.tp
        routed = copies * (2 * shape.hidden + (2 + shape.gated) * shape.moe.ffn / layout.etp)
        dense = (2 + shape.gated) * max(shape.moe.shared_ffn, shape.ffn * bool(shape.moe.dense_layers))
        inner = max(routed, dense / layout.tp)
    return run.tokens * (whole / parts + gathered + run.dtype_bytes * max(attention, inner))


def kv_bytes_per_token(shape: ModelShape, layout: Layout, n_layers: int, *, dtype: str = "bfloat16") -> float:
    """Bytes of one token's keys and values in `n_layers` layers on one rank.

    Heads are cut over tp; where there are fewer than tp ranks, each rank keeps a copy of one. Latent
    attention caches one vector per token, whole on every rank (arXiv 2405.04434, section 2.1).
    """
    if shape.latent:
        values = shape.cached_values
    else:
        values = 2 * math.ceil(shape.n_kv_heads / layout.tp) * shape.head_dim
    return values * n_layers * DTYPE_BYTES[dtype]


def kv_bytes(
    shape: ModelShape,
    layout: Layout,
    *,
    n_sequences: float,
    tokens: float,
    dtype: str = "bfloat16",
    page_tokens: int = PAGE_TOKENS,
    stage: int = 0,
) -> float:
    """Bytes of the KV cache of `n_sequences` that have `tokens` each, rounded up to whole pages.

    With a sliding window no more than its tokens are kept.
    """
    kept = min(tokens, shape.window) if shape.window else tokens
    pages = math.ceil(kept / page_tokens)
    layers = layers_of(shape, layout)[stage]
    return n_sequences * pages * page_tokens * kv_bytes_per_token(shape, layout, layers, dtype=dtype)


def generation_memory(
    shape: ModelShape,
    layout: Layout,
    *,
    n_sequences: float,
    tokens: float,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    page_tokens: int = PAGE_TOKENS,
    prefill_tokens: float = PREFILL_TOKENS,
) -> MemoryItems:
    """Bytes of the heaviest rank of a role that generates.

    Args:
        n_sequences: that run at once on a replica.
        tokens: of each at its end, prompt included.
        kv_dtype: of the cache, by default `dtype`.
        page_tokens: tokens of one page of the cache; 1 for an engine without pages.
        prefill_tokens: prompt tokens in one pass at most.
    """
    run = Pass.of(layout, 1, int(min(prefill_tokens, max(n_sequences * tokens, 1))), dtype)
    # Sampling works on fp32 logits of the whole vocabulary, and sorts or scales a copy of them.
    logit_bytes = 2 * 4 * shape.vocab + DTYPE_BYTES[dtype] * vocab_rows(shape, layout)

    def of_stage(stage: int) -> MemoryItems:
        params = rank_params(shape, layout, stage)
        last = stage == layout.pp - 1
        working = {
            "KV cache": kv_bytes(
                shape,
                layout,
                n_sequences=n_sequences,
                tokens=tokens,
                dtype=kv_dtype or dtype,
                page_tokens=page_tokens,
                stage=stage,
            ),
            "activations": layer_transient(shape, layout, run),
            "logits": last * n_sequences * logit_bytes,
        }
        return MemoryItems({"weights": params.total * DTYPE_BYTES[dtype]}, working, stage, "decode")

    return max((of_stage(stage) for stage in range(layout.pp)), key=lambda items: items.total)


def kv_capacity_tokens(
    free: float, shape: ModelShape, layout: Layout, *, dtype: str = "bfloat16", page_tokens: int = PAGE_TOKENS
) -> int:
    """Tokens that `free` bytes of each rank hold, in whole pages; the fullest stage decides."""
    each = kv_bytes_per_token(shape, layout, max(layers_of(shape, layout)), dtype=dtype)
    return max(int(free // (each * page_tokens)), 0) * page_tokens


def transfer_memory(
    shape: ModelShape, *, dtype: str = "bfloat16", bucket_bytes: float | None = None
) -> MemoryItems:
    """Bytes that a rank needs to hand weights to another layout: a whole tensor and its piece of the other.

    Tensors go one at a time (`bucket_bytes` None: the largest, embedding or feed-forward), or in buckets.
    """
    largest = shape.hidden * max(shape.vocab, shape.ffn * (1 + shape.gated)) * DTYPE_BYTES[dtype]
    bucket = largest if bucket_bytes is None else max(bucket_bytes, largest)
    return MemoryItems({}, {"transfer buffers": 2 * bucket}, phase="transfer")
