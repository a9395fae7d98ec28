"""One instance of each cost term worked out by hand: round constants, so that the arithmetic fits in a
comment."""

from __future__ import annotations

import math

import pytest

from rolemesh.placement.layout import Layout
from rolemesh.placement.timing import collectives as net
from rolemesh.placement.timing.dims import Dims
from rolemesh.placement.timing.efficiency import Efficiency, Machine
from rolemesh.placement.timing.gemm import gemm_seconds
from rolemesh.placement.timing.layer import How, attention_flops, decoder_layer, head
from rolemesh.placement.timing.links import Links
from rolemesh.placement.timing.training import Run, stage_layers, training_seconds

# Everything reaches its data sheet, nothing starts slowly, tiles and waves do not matter.
IDEAL = Efficiency(
    gemm16=1.0, gemm8=1.0, tile_start=0.0, wave_weight=0.0, misaligned=1.0, unaligned=1.0,
    flash=1.0, flash_backward=1.0, flash2=1.0, head_half=0.0, memory=1.0, unfused=1.0, kernel=0.0,
    host=0.0, moe_host=0.0, moe_extra=0.0,
    link=1.0, network=1.0, overlap=1.0, step_fixed=0.0, jitter=0.0, imbalance=1.0,
)  # fmt: skip
MACHINE = Machine("ideal", (("bfloat16", 1e12), ("float8", 2e12)), 1e9, 4, IDEAL)  # 1 TFLOP/s, 1 GB/s
FAST = Machine("no traffic", (("bfloat16", 1e12), ("float8", 2e12)), 1e18, 4, IDEAL)
LINKS = Links(per_node=4, intra=1e9, inter=1e8, latency=0.0)
DIMS = Dims(n_layers=4, hidden=1024, n_heads=8, n_kv_heads=8, head_dim=128, ffn=4096, vocab=2048, gated=False)


def test_product_is_its_flops_over_the_rate() -> None:
    # 2 x 1024 x 1024 x 1024 = 2.147e9 FLOP at 1e12 FLOP/s; 16 whole tiles of 256 x 256 over 4 units.
    assert gemm_seconds(1024, 1024, 1024, FAST, "bfloat16") == pytest.approx(2.147484e-3, rel=1e-6)


def test_small_product_waits_for_memory() -> None:
    # One row: 2 bytes x (1024 + 1024 x 1024 + 1024) = 2,101,248 bytes at 1e9 bytes/s; the FLOPs take 2 us.
    assert gemm_seconds(1, 1024, 1024, MACHINE, "bfloat16") == pytest.approx(2.101248e-3)


def test_last_wave_counts_whole() -> None:
    waves = Machine("waves", (("bfloat16", 1e12),), 1e18, 4, IDEAL.with_(wave_weight=1.0))
    # 256 x 640 in tiles of 256 x 128: 5 tiles on 4 units are 2 waves, of 4 x 2 x 256 x 128 x 1024 FLOP each:
    # 0.537 ms. In tiles of 128 x 64 (20, 5 waves, at 0.8 of the rate): 5 x 4 x 2 x 128 x 64 x 1024 / 0.8e12
    # = 0.419 ms. In tiles of 128 x 128 (10, 3 waves, 0.95): 3 x 4 x 2 x 128 x 128 x 1024 / 0.95e12 = 0.424
    # ms.
    assert gemm_seconds(256, 640, 1024, waves, "bfloat16") == pytest.approx(0.4194304e-3, rel=1e-6)


def test_rows_off_alignment_are_slower() -> None:
    machine = Machine("aligned", (("bfloat16", 1e12),), 1e18, 4, IDEAL.with_(misaligned=4.0, unaligned=1.5))
    ideal = gemm_seconds(1024, 1024, 1024, machine, "bfloat16", rows=(1024,))
    # 72 numbers are 144 bytes: a multiple of 16, not of 128. 108 are 216: of 8 only (heads of 13,824 / 128).
    assert gemm_seconds(1024, 1024, 1024, machine, "bfloat16", rows=(72,)) == pytest.approx(1.5 * ideal)
    assert gemm_seconds(1024, 1024, 1024, machine, "bfloat16", rows=(108,)) == pytest.approx(4 * ideal)


def test_attention_flops_are_half_under_the_causal_mask() -> None:
    # Q K^T and P V: 2 x 2 x 2048 x 2048 x 1024 = 1.718e10, half of it under the mask.
    assert attention_flops(DIMS, 1, 2048, 2048, causal=False) == 4 * 2048**2 * 1024
    assert attention_flops(DIMS, 1, 2048, 2048) == 2 * 2048**2 * 1024


def test_window_limits_attention() -> None:
    windowed = Dims(4, 1024, 8, 8, 128, 4096, 2048, window=128, windowed=0.5)
    # Half of the layers see 128 keys: 4 x 8192 x 128 x 1024; the others half of 8192: 2 x 8192^2 x 1024.
    expected = 0.5 * 4 * 8192 * 128 * 1024 + 0.5 * 2 * 8192**2 * 1024
    assert attention_flops(windowed, 1, 8192, 8192) == expected


def test_layer_products_and_their_gradients() -> None:
    work = decoder_layer(DIMS, Layout(), sequences=1, seq_len=1024, moe=False, machine=FAST, how=How())
    # qkv 3, out 1, up 4, down 4: 12 x 1024^2 weights, 2 x 1024 tokens each: 2.577e10 FLOP; twice backward.
    assert work.forward["gemm"] == pytest.approx(12 * 2 * 1024**3 / 1e12)
    assert work.backward["gemm"] == pytest.approx(24 * 2 * 1024**3 / 1e12)
    frozen = decoder_layer(
        DIMS, Layout(), sequences=1, seq_len=1024, moe=False, machine=FAST, how=How(lora=True)
    )
    assert frozen.backward["gemm"] == pytest.approx(12 * 2 * 1024**3 / 1e12)


def test_elementwise_bytes_of_a_layer() -> None:
    machine = Machine("bytes", (("bfloat16", 1e18),), 1e9, 4, IDEAL)
    work = decoder_layer(DIMS, Layout(), sequences=1, seq_len=1024, moe=False, machine=machine, how=How())
    # Norms 2 x 4 + residuals 12 = 20 B x 1024 columns, GELU 4 B x 4096: 36,864 B a token, 1024 tokens.
    assert work.forward["memory_bound"] == pytest.approx(1024 * 36_864 / 1e9)


def test_unfused_attention_moves_its_scores() -> None:
    machine = Machine("bytes", (("bfloat16", 1e18),), 1e9, 4, IDEAL)
    fused = decoder_layer(DIMS, Layout(), sequences=1, seq_len=1024, moe=False, machine=machine, how=How())
    how = How(attention="unfused", dropout=False)
    loose = decoder_layer(DIMS, Layout(), sequences=1, seq_len=1024, moe=False, machine=machine, how=how)
    # 8 heads x 1024 x 1024 scores, 2 B written, 4 by the softmax, 2 read: 8 B each.
    extra = loose.forward["memory_bound"] - fused.forward["memory_bound"]
    assert extra == pytest.approx(8 * 8 * 1024**2 / 1e9)


def test_experts_share_the_routed_tokens() -> None:
    dims = Dims(4, 1024, 8, 8, 128, 4096, 2048, gated=False, n_experts=8, top_k=2, expert_ffn=512)
    work = decoder_layer(
        dims, Layout(dp=4, ep=4), sequences=1, seq_len=1024, moe=True, machine=FAST, how=How()
    )
    # 1024 tokens x 2 experts arrive at each rank's 2 experts: 2048 x 2 matrices x 2 x 1024 x 512 FLOP.
    assert work.forward["experts"] == pytest.approx(2048 * 2 * 2 * 1024 * 512 / 1e12)


def test_head_is_padded_and_cut() -> None:
    work = head(DIMS, Layout(tp=2), tokens=1024, machine=FAST, how=How())
    assert work.forward["gemm"] == pytest.approx(2 * 1024 * 1024 * 1024 / 1e12)  # 2048 / 2 columns
    odd = Dims(4, 1024, 8, 8, 128, 4096, 2000, gated=False)  # padded to 2048
    assert head(odd, Layout(tp=2), tokens=1024, machine=FAST, how=How()).forward == work.forward


def test_all_reduce_rings() -> None:
    # 4 ranks of a node: 2 x 3/4 x 1e9 bytes at 1e9 bytes/s; the protocol's start is 8.4 us.
    assert net.all_reduce(1e9, net.Group(4, 4), LINKS, IDEAL) == pytest.approx(1.5 + 8.4e-6)
    # 8 ranks on 2 nodes, 4 cards a node: 2 x 1/2 x 1e9 / (4 x 1e8) = 2.5 s between, 1.75 s inside.
    assert net.all_reduce(1e9, net.Group(8, 4), LINKS, IDEAL) == pytest.approx(2.5, rel=1e-3)


def test_engines_reduce_in_one_step() -> None:
    # The ring's bytes after one start of 8 us.
    assert net.quick_all_reduce(1e6, net.Group(4, 4), LINKS, IDEAL) == pytest.approx(1.5e-3 + 8e-6)


def test_parts_of_activations_are_sent_and_gathered() -> None:
    whole, parts = _step(Layout(tp=2, pp=2)), _step(Layout(tp=2, pp=2), run=Run(scatter_pp=True))
    # 1024 x 1024 x 2 B from stage to stage inside a node: 2.097 ms and 8.4 us, there and back, 4
    # micro-batches.
    assert whole["pp"] == pytest.approx(4 * 2 * (2.097152e-3 + 8.4e-6))
    # Half of it, then the other half gathered at the receiver.
    assert parts["pp"] == pytest.approx(4 * 2 * (2.097152e-3 + 2 * 8.4e-6))


def test_all_gather_sends_half_of_an_all_reduce() -> None:
    assert net.all_gather(1e9, net.Group(4, 4), LINKS, IDEAL) == pytest.approx(0.75 + 8.4e-6)
    assert net.all_gather(1e9, net.Group(1, 1), LINKS, IDEAL) == 0


def test_islands_of_a_node_meet_over_the_slower_link() -> None:
    boards = Links(per_node=4, intra=1e9, inter=1e8, latency=0.0, island=2, island_link=1e8)
    # 2 boards of 2: 2 x 1/2 x 1e9 bytes cross over 2 links of 1e8: 5 s.
    assert net.all_reduce(1e9, net.Group(4, 4), boards, IDEAL) == pytest.approx(5.0, rel=1e-3)
    assert net.all_reduce(1e9, net.Group(2, 2), boards, IDEAL) == pytest.approx(1.0, rel=1e-3)


def test_small_messages_take_the_latency() -> None:
    # LL protocol, 8 ranks: 6.6 us + 14 steps of 0.6 us = 15 us; published: 13.7 us (NVIDIA, 8 x H100, 8
    # bytes).
    assert net.all_reduce(8, net.Group(8, 8), Links(), Efficiency()) == pytest.approx(15.0e-6, rel=1e-3)


def test_tokens_reach_a_node_once() -> None:
    # Top-1 over 2 nodes of 4: half of 1000 tokens x 1000 B leave the node at 1e8 B/s: 5 ms; 7/8 of them the
    # rank.
    seconds = net.all_to_all(1000, 1000, 1, net.Group(8, 4), LINKS, IDEAL)
    assert seconds == pytest.approx(5e-3 + 8.4e-6)


def test_group_members_on_a_node_follow_the_stride() -> None:
    assert net.Group.of(8, 1, LINKS) == net.Group(8, 4)
    assert net.Group.of(8, 2, LINKS) == net.Group(8, 2)
    assert net.Group.of(8, 8, LINKS).nodes == 8


def _step(layout: Layout, n_micro: int = 4, run: Run = Run(), dims: Dims = DIMS):  # noqa: B008
    return training_seconds(
        dims, layout, micro_batch=1, n_micro_batches=n_micro, seq_len=1024, machine=FAST, links=LINKS, run=run
    )


def test_pipeline_bubble() -> None:
    # Without the head all stages take t; (p - 1) of them are waited for, divided by the virtual stages.
    headless = Dims(8, 1024, 8, 8, 128, 4096, 2048, gated=False, head_columns=1)
    plain, virtual = _step(Layout(pp=4), 8, dims=headless), _step(Layout(pp=4, vpp=2), 8, dims=headless)
    work = plain["gemm"] + plain["attention"] + plain["pp"]
    assert plain["bubble"] / work == pytest.approx(3 / 8, rel=0.02)
    assert virtual["bubble"] / plain["bubble"] == pytest.approx(1 / 2, rel=0.05)


def test_slowest_stage_sets_the_turn() -> None:
    # 4 layers and a head of 2 x 1024 x 2048 on 2 stages: the last stage takes 2 layers and the head.
    step = _step(Layout(pp=2))
    layer, logits = 3 * 12 * 2 * 1024**3 / 1e12, 3 * 2 * 2 * 1024**3 / 1e12
    assert step["gemm"] == pytest.approx(4 * (2 * layer + logits))


def test_full_recompute_repeats_the_layers() -> None:
    none, full = _step(Layout()), _step(Layout(), run=Run(recompute="full"))
    # 4 micro-batches x 4 layers x 12 x 2 x 1024^3 FLOP once more.
    assert full["gemm"] - none["gemm"] == pytest.approx(4 * 4 * 12 * 2 * 1024**3 / 1e12)


def test_tensor_parallel_all_reduces() -> None:
    step = _step(Layout(tp=2))
    # 4 a layer of 1024 x 1024 x 2 B: 2 x 1/2 x 2.097e6 / 1e9 = 2.097 ms and 8.4 us; 4 layers, 4
    # micro-batches.
    assert step["tp"] == pytest.approx(4 * 4 * 4 * (2.097152e-3 + 8.4e-6), rel=1e-3)


def test_gradients_are_reduced_and_weights_gathered() -> None:
    run = Run(overlap_dp=False)
    step = _step(Layout(dp=4), run=run)
    # 4 layers x 12 x 1024^2 + 2 x 2048 x 1024 = 54.5e6 parameters: 4 B scattered and 2 B gathered, 3/4 of
    # each.
    params = 4 * 12 * 1024**2 + 2 * 2048 * 1024
    assert step["dp"] == pytest.approx(0.75 * params * 6 / 1e9, rel=1e-3)
    assert _step(Layout(dp=4))["dp"] < step["dp"]  # some of it hides behind the computation


def test_optimizer_moves_34_bytes_a_parameter() -> None:
    params = 4 * 12 * 1024**2 + 2 * 2048 * 1024
    seconds = training_seconds(
        DIMS, Layout(dp=2), micro_batch=1, n_micro_batches=1, seq_len=1024, machine=MACHINE, links=LINKS
    )
    assert seconds["optimizer"] == pytest.approx(34 * params / 2 / 1e9)  # a half on each rank


def test_jitter_grows_with_each_doubling() -> None:
    machine = Machine("jitter", (("bfloat16", 1e12),), 1e18, 4, IDEAL.with_(jitter=0.01))
    step = training_seconds(
        DIMS, Layout(dp=8), micro_batch=1, n_micro_batches=1, seq_len=1024, machine=machine, links=LINKS
    )
    assert step["jitter"] == pytest.approx(0.03 * (step.total - step["jitter"]))


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "expected"),
    [(8, 4, 1, [2, 2, 2, 2]), (7, 2, 1, [4, 3]), (126, 8, 8, [15, 16, 16, 16, 16, 16, 16, 15])],
)
def test_layers_of_stages(layers: int, pp: int, vpp: int, expected: list[int]) -> None:
    # 126 layers, embedding and head are 128 parts of 64 chunks (Llama 3 405B's layout).
    assert stage_layers(layers, pp, vpp) == expected


def test_total_is_the_sum() -> None:
    step = _step(Layout(tp=2, dp=2))
    assert step.total == pytest.approx(math.fsum(step.values()))
    assert "gemm" in str(step)


def test_host_sets_the_pace_of_small_expert_layers() -> None:
    experts = Dims(4, 64, 2, 2, 32, 1, 2048, n_experts=8, top_k=2, expert_ffn=64)

    def host(clock: float = 1.0, fused: bool = True) -> tuple[float, float]:
        eff = IDEAL.with_(moe_host=1.0, kernel=1e-3, host_clock=clock)
        machine = Machine("host", (("bfloat16", 1e15),), 1e18, 4, eff)
        keys = {"sequences": 1, "seq_len": 128, "moe": True, "machine": machine}
        keys["how"] = How(fused_routing=fused)
        work = decoder_layer(experts, Layout(), **keys)  # type: ignore[arg-type]
        return sum(work.forward.values()), sum(work.backward.values())

    assert host() == pytest.approx((1.0, 2.0))  # whatever the device needs, as long as it is less
    assert host(clock=1.5) == pytest.approx((1.5, 3.0))
    # A piece for each of 8 experts, of three tensors, each a kernel's start.
    assert host(fused=False) == pytest.approx((1.024, 2.048))


def test_gates_widen_the_first_attention_matrix() -> None:
    gated = Dims(4, 1024, 8, 8, 128, 4096, 2048, gated=False, gate_dim=1024)
    assert gated.attention_params() == DIMS.attention_params() + 1024 * 1024
