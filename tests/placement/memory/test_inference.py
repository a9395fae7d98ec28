"""Roles that score or generate: hand-computed instances of each item."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rolemesh.placement.layout import Layout
from rolemesh.placement.memory import (
    generation_memory,
    inference_memory,
    kv_bytes,
    kv_bytes_per_token,
    kv_capacity_tokens,
    transfer_memory,
)
from rolemesh.placement.model import Experts, LatentAttention, ModelShape

LLAMA_8B = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 8192)
SMALL = ModelShape("llama", 8, 512, 1376, 8, 2, 64, 4096, 4096)


def test_llama_8b_caches_128_kib_per_token() -> None:
    assert kv_bytes_per_token(LLAMA_8B, Layout(), 32) == 2 * 32 * 8 * 128 * 2 == 128 * 1024
    assert kv_bytes_per_token(LLAMA_8B, Layout(tp=4), 32) == 32 * 1024
    assert kv_bytes_per_token(LLAMA_8B, Layout(), 32, dtype="float8") == 64 * 1024


def test_kv_heads_are_copied_where_tp_is_larger() -> None:
    assert kv_bytes_per_token(LLAMA_8B, Layout(tp=8), 32) == kv_bytes_per_token(LLAMA_8B, Layout(tp=16), 32)


def test_latent_attention_caches_one_vector_that_tp_does_not_cut() -> None:
    # DeepSeek-V3: 512 + 64 values in each of 61 layers.
    latent = LatentAttention(kv_rank=512, rope_dim=64, nope_dim=128, v_dim=128, q_rank=1536)
    shape = ModelShape("deepseek_v3", 61, 7168, 18432, 128, 128, 192, 129280, 4096, latent=latent)
    for tp in (1, 8):
        assert kv_bytes_per_token(shape, Layout(tp=tp), 61) == 61 * 576 * 2


def test_pages_round_up_and_a_window_bounds_them() -> None:
    per_token = 2 * 2 * 64 * 8 * 2  # keys and values, 2 heads of 64, 8 layers, bf16
    assert kv_bytes(SMALL, Layout(), n_sequences=3, tokens=17) == 3 * 32 * per_token
    assert kv_bytes(SMALL, Layout(), n_sequences=3, tokens=17, page_tokens=1) == 3 * 17 * per_token
    windowed = replace(SMALL, window=8)
    assert kv_bytes(windowed, Layout(), n_sequences=3, tokens=17) == 3 * 16 * per_token


def test_capacity_is_what_the_free_bytes_hold_in_whole_pages() -> None:
    per_token = 2 * 2 * 64 * 8 * 2
    assert kv_capacity_tokens(40 * per_token, SMALL, Layout()) == 32
    assert kv_capacity_tokens(-1, SMALL, Layout()) == 0


def test_scoring_needs_weights_one_layer_and_a_tile_of_the_logits() -> None:
    items = inference_memory(SMALL, Layout(), micro_batch=2, seq_len=128)
    assert items["weights"] == 2 * SMALL.n_params
    assert items["logits"] == 2 * 2**16  # of 256 x 4096, in bf16
    # A value head makes no logits; the feed-forward's 3 tensors and two of the hidden size remain.
    critic = inference_memory(replace(SMALL, n_labels=1), Layout(), micro_batch=2, seq_len=128)
    assert dict(critic.working) == {"activations": 256 * 2 * (2 * 512 + 3 * 1376)}


def test_a_scoring_mixture_of_experts_holds_copies_of_its_tokens() -> None:
    shape = replace(SMALL, moe=Experts(n=8, top_k=4, ffn=256), n_labels=1)
    items = inference_memory(shape, Layout(), micro_batch=1, seq_len=128)
    assert items["activations"] == 128 * 2 * (2 * 512 + 4 * (2 * 512 + 3 * 256))


def test_generation_counts_cache_logits_and_one_prefill_pass() -> None:
    items = generation_memory(LLAMA_8B, Layout(), n_sequences=64, tokens=2048)
    assert items["KV cache"] == 64 * 2048 * 128 * 1024
    assert items["logits"] == 64 * (8 * 128256 + 2 * 128256)
    assert items["activations"] == 8192 * 2 * (2 * 4096 + 3 * 14336)
    assert items["weights"] == 2 * LLAMA_8B.n_params


def test_the_last_stage_of_a_generating_pipeline_is_the_heaviest() -> None:
    items = generation_memory(LLAMA_8B, Layout(pp=2), n_sequences=64, tokens=2048)
    assert items.stage == 1
    assert items["KV cache"] == 64 * 2048 * 64 * 1024


@pytest.mark.parametrize(("bucket", "expected"), [(None, 128256 * 4096 * 2), (4 * 2**30, 4 * 2**30)])
def test_a_transfer_holds_a_tensor_or_a_bucket_twice(bucket: float | None, expected: float) -> None:
    assert transfer_memory(LLAMA_8B, bucket_bytes=bucket).total == 2 * expected
