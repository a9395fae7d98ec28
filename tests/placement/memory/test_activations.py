"""What a layer keeps: the published formulas, and tensors counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rolemesh.placement.layout import Layout
from rolemesh.placement.memory import GIB, software, training_memory
from rolemesh.placement.memory.activations import Pass, layer_bytes, moe_bytes, score_bytes
from rolemesh.placement.model import Experts, ModelShape

PAPER = replace(software("megatron-paper"), flash=False)
# Korthikanti et al. 2022, table 3: layers, heads, hidden, micro batch, pp, vpp; activations of figure 1, GiB.
PUBLISHED = {
    "22B": (48, 64, 6144, 4, 1, 1, 59.25, 9.5625),
    "175B": (96, 96, 12288, 1, 8, 3, 66.84375, 12.3515625),
    "530B": (105, 128, 20480, 1, 35, 3, 114.0234375, 23.076171875),
    "1T": (128, 160, 25600, 1, 64, 1, 131.25, 26.5625),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_activations_of_the_first_stage_are_the_papers(name: str) -> None:
    layers, heads, hidden, micro_batch, pp, vpp, whole, selective = PUBLISHED[name]
    shape = ModelShape.gpt(layers, hidden, heads, 51200, 2048)
    for sp, recompute, published in ((False, "none", whole), (True, "selective", selective)):
        layout = Layout(tp=8, pp=pp, vpp=vpp, sequence_parallel=sp)
        items = training_memory(
            shape, layout, micro_batch=micro_batch, seq_len=2048, n_micro_batches=512,
            recompute=recompute, dtype="float16", by=PAPER, stage=0,
        )  # fmt: skip
        assert items["activations"] / GIB == pytest.approx(published, rel=1e-12)


def test_a_gpt_layer_keeps_34_bytes_per_value_and_5_per_score() -> None:
    shape = ModelShape.gpt(1, 1024, 16, 51200, 2048)
    run = Pass.of(Layout(), 2, 512, "float16")
    assert layer_bytes(shape, Layout(), run, replace(PAPER, flash=False), moe=False) == 34 * 2 * 512 * 1024
    assert score_bytes(shape, Layout(), run, PAPER) == 5 * 16 * 512 * 512 * 2


# hidden 512, 8 heads of 64, 2 KV heads, feed-forward 1376, 256 tokens: bytes per token that torch's
# saved-tensor hooks see on one layer of megatron-core's modules on a CPU; and, for all tokens of a position,
# cosines and sines for queries and for keys: 4 * 64 values.
#   norms: fp32 input and fp32 normalised, output in the dtype, twice      2 * 512 * (8 + 2)     = 10240
#   projections of q, k, v in one tensor (512 + 2 * 128)                   2 * 768               =  1536
#   rotated queries and keys                                               2 * (512 + 128)       =  1280
#   attention's output, of the sample and of all; log-sum of each row      2 * 2 * 512 + 4 * 8   =  2080
#   gate and up; silu of the gate, a copy of up, the product               2 * (2 + 3) * 1376    = 13760
HOOKED = 10240 + 1536 + 1280 + 2080 + 13760
TABLES = 4 * 64 * 2
GQA = ModelShape("llama", 1, 512, 1376, 8, 2, 64, 4096, 4096)


def test_a_layer_on_a_cpu_keeps_what_saved_tensor_hooks_saw() -> None:
    run = Pass.of(Layout(), 1, 256, "bfloat16")
    assert layer_bytes(GQA, Layout(), run, software("megatron-cpu"), moe=False) == (HOOKED + TABLES) * 256


def test_tp_divides_inner_tensors_and_sequence_parallel_the_norms_too() -> None:
    norms, inner = 10240, HOOKED - 10240
    by, run = software("megatron-cpu"), Pass.of(Layout(tp=2), 1, 256, "bfloat16")
    plain = layer_bytes(GQA, Layout(tp=2), run, by, moe=False)
    parallel = layer_bytes(GQA, Layout(tp=2, sequence_parallel=True), run, by, moe=False)
    tables = 256 * TABLES
    assert (plain - tables, parallel - tables) == (256 * (norms + inner / 2), 256 * (norms + inner) / 2)


def test_cp_divides_everything_but_the_span_of_attention() -> None:
    by, shape = PAPER, ModelShape.gpt(1, 1024, 16, 51200, 4096)
    whole, half = (Pass.of(Layout(cp=cp), 1, 4096, "bfloat16") for cp in (1, 2))
    layers = [layer_bytes(shape, Layout(), run, by, moe=False) for run in (whole, half)]
    scores = [score_bytes(shape, Layout(), run, by) for run in (whole, half)]
    assert layers[0] / layers[1] == scores[0] / scores[1] == 2


def test_fp8_keeps_inputs_of_products_in_one_byte() -> None:
    runs = [Pass.of(Layout(), 1, 256, dtype) for dtype in ("bfloat16", "float8")]
    bf16, fp8 = (layer_bytes(GQA, Layout(), run, software("nemo"), moe=False) for run in runs)
    assert bf16 - fp8 == 256 * (512 + 512 + 1376)  # of qkv, gate and up, down; the output's stays attention's


def test_experts_take_top_k_copies_of_every_token() -> None:
    shape = replace(GQA, family="qwen3_moe", moe=Experts(n=8, top_k=2, ffn=256))
    run = Pass.of(Layout(), 1, 256, "bfloat16")
    # norm input and output 4 * 512, router logits and probabilities 8 * 8; each copy: input and output
    # 4 * 512, gate, up and product 3 * 2 * 256.
    by_hand = 256 * (4 * 512 + 64) + 2 * 256 * (4 * 512 + 6 * 256)
    assert moe_bytes(shape, Layout(), run, software("nemo")) == by_hand
    # ep changes nothing for balanced experts; uneven ones cost the fullest rank.
    uneven = replace(software("nemo"), imbalance=1.5)
    assert moe_bytes(shape, Layout(dp=4, ep=4), run, software("nemo")) == by_hand
    assert moe_bytes(shape, Layout(dp=4, ep=4), run, uneven) == by_hand + 256 * (4 * 512 + 6 * 256)
