"""Generation, transfers and links, each against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.costs import DeviceSet
from rolemesh.placement.hardware import hardware, profiles
from rolemesh.placement.layout import Layout
from rolemesh.placement.lengths import Fixed, Measured, log_normal
from rolemesh.placement.model import ModelShape
from rolemesh.placement.timing.decode import Engine, Server, decode_seconds
from rolemesh.placement.timing.dims import Dims
from rolemesh.placement.timing.efficiency import Efficiency, Machine, efficiency
from rolemesh.placement.timing.links import Links
from rolemesh.placement.timing.training import inference_seconds, training_seconds
from rolemesh.placement.timing.transfer import (
    BUCKET_START,
    TENSOR,
    Remote,
    gathered_seconds,
    n_tensors,
    offload_seconds,
    transfer_seconds,
    weight_bytes,
)

EFF = Efficiency(
    gemm16=1.0, decode_gemm=1.0, decode_memory=1.0, decode_kernel=0.0, serving=0.0, serving_python=0.0,
    serving_sequence=0.0, memory=1.0, flash=1.0, link=1.0, network=1.0, host=0.0, moe_host=0.0, kernel=0.0,
)  # fmt: skip
MACHINE = Machine("round", (("bfloat16", 1e15),), 1e12, 4, EFF)  # 1 PFLOP/s, 1 TB/s
LINKS = Links(per_node=8, intra=1e11, inter=1e10, host=1e10, latency=0.0)
DIMS = Dims(10, 1000, 10, 5, 100, 4000, 1000)  # per layer 1000 x 2000 + 1000 x 1000 + 3 x 1000 x 4000 = 15e6


def _server(tp: int = 1, dims: Dims = DIMS, **engine: object) -> Server:
    return Server(dims, Layout(tp=tp), MACHINE, LINKS, Engine(**engine))  # type: ignore[arg-type]


def test_weights_are_read_once_a_step() -> None:
    # 150e6 parameters and a head of 1e6, 2 B each: 302e6 B at 1e12 B/s.
    assert _server().weight_bytes(1) == 302e6
    assert _server().step_items(1, 1)["weights"][0] == pytest.approx(302e-6)
    assert _server(tp=2).step_items(1, 1)["weights"][0] == pytest.approx(151e-6)


def test_large_batch_is_bound_by_products() -> None:
    # 2 x 151e6 FLOP a token; 10,000 tokens at 1e15 FLOP/s: 3.02 ms, above the 0.302 ms of reading.
    assert _server().step_items(10_000, 1)["weights"][0] == pytest.approx(3.02e-3)


def test_cache_is_read_for_every_sequence() -> None:
    # 10 layers x 2 x 5 heads x 100 x 2 B = 20,000 B a token; 8 sequences of 1000 tokens: 160 MB.
    assert _server().cache_bytes_of_token() == 20_000
    assert _server().step_items(8, 1000)["cache"][0] == pytest.approx(160e-6)
    # More ranks than KV heads: each keeps at least one head.
    assert _server(tp=10).cache_bytes_of_token() == 4_000


def test_latent_cache_is_not_cut() -> None:
    latent = Dims(10, 1000, 10, 10, 192, 4000, 1000, kv_rank=512, rope_dim=64, value_dim=128)
    assert _server(tp=4, dims=latent).cache_bytes_of_token() == 10 * 576 * 2


def test_experts_touched_by_a_batch() -> None:
    dims = Dims(10, 1000, 10, 5, 100, 4000, 1000, n_experts=8, top_k=2, expert_ffn=500)
    server = _server(dims=dims)
    assert server.touched(1) == pytest.approx(2)
    assert server.touched(2) == pytest.approx(8 * (1 - 0.75**2))  # 3.5: both tokens may ask the same
    assert server.touched(1000) == pytest.approx(8)


def test_routed_rows_move_bytes() -> None:
    dims = Dims(10, 1000, 10, 5, 100, 4000, 1000, n_experts=8, top_k=2, expert_ffn=500)
    # 10 layers x 100 rows x 2 experts, each 8 x 1000 + 6 x 500 + 5 x 1500 = 18,500 B, at 1e12 B/s.
    assert _server(dims=dims).step_items(100, 1)["routing"][0] == pytest.approx(2000 * 18_500 / 1e12)


def test_all_responses_of_one_length() -> None:
    seconds = decode_seconds(
        DIMS, Layout(), prompt_tokens=1000, response=Fixed(100), n_sequences=8, capacity_tokens=1e9,
        machine=MACHINE, links=LINKS,
    )  # fmt: skip
    # 100 steps: weights 0.302 ms and cache 8 x (1000 + 50) x 20,000 B = 168 MB, 0.168 ms.
    assert seconds["waves"] == 0
    assert seconds["weights"] + seconds["cache"] == pytest.approx(100 * (0.302e-3 + 0.168e-3))


def test_full_cache_makes_waves() -> None:
    few = decode_seconds(
        DIMS, Layout(), prompt_tokens=1000, response=Fixed(100), n_sequences=8, capacity_tokens=4 * 1050,
        machine=MACHINE, links=LINKS,
    )  # fmt: skip
    # 4 run and 4 wait: one more wave of 100 steps at 0.302 + 4 x 1050 x 20,000 / 1e12 = 0.386 ms.
    assert few["waves"] == pytest.approx(100 * 0.386e-3)


def test_streamed_responses_have_no_tail() -> None:
    seconds = decode_seconds(
        DIMS, Layout(), prompt_tokens=1000, response=Measured((50, 150)), n_sequences=8,
        capacity_tokens=4 * 1050, machine=MACHINE, links=LINKS, streamed=True,
    )  # fmt: skip
    # 8 x 100 tokens, 4 at a time: 200 steps; 1000 + 12,500 / 200 = 1062.5 tokens are held by each on average.
    assert seconds["stream"] == pytest.approx(200 * (0.302e-3 + 4 * 1062.5 * 20_000 / 1e12))
    assert set(seconds) == {"prefill", "stream"}


def test_long_tail_sets_the_end() -> None:
    def total(response: object) -> float:
        return decode_seconds(
            DIMS, Layout(), prompt_tokens=100, response=response, n_sequences=256, capacity_tokens=1e9,  # type: ignore[arg-type]
            machine=MACHINE, links=LINKS,
        ).total  # fmt: skip

    assert total(log_normal(500, 1500, 8000)) > 2 * total(Fixed(500))


def test_steady_load_shares_prefill_and_decode() -> None:
    server = _server(python=False)
    step = float(server.step(8, 1050)[0])
    expected = 8 * 100 / (100 * step + server.prefill(8000, 1000))
    assert server.steady_tokens_per_s(8, 1000, 100) == pytest.approx(expected)


def test_drafted_tokens_shorten_a_response() -> None:
    plain, drafted = _server(), _server(tokens_per_step=1.7, drafted=1)
    assert plain.steady_tokens_per_s(1, 10, 100) < drafted.steady_tokens_per_s(1, 10, 100)


def test_published_latency_of_13b_on_one_a100() -> None:
    # FasterTransformer, GPT-13B fp16, batch 1: 22.0 ms a token (llm-analysis, validation).
    dims = Dims(40, 5120, 40, 40, 128, 20480, 50257, gated=False, tied=True)
    profile = hardware("a100-40")
    server = Server(dims, Layout(), Machine.of(profile), Links.of_profile(profile), Engine(python=False))
    assert float(server.step(1, 517)[0]) == pytest.approx(22.0e-3, rel=0.15)


def test_transfer_in_a_pool_moves_what_is_missing() -> None:
    model = weight_bytes(DIMS)
    assert model == 2 * (150e6 + 2e6)
    same = transfer_seconds(DIMS, Layout(tp=4), Layout(tp=4), links=LINKS, efficiency=EFF, same_pool=True)
    assert same == 0
    wider = transfer_seconds(DIMS, Layout(tp=4), Layout(tp=2), links=LINKS, efficiency=EFF, same_pool=True)
    # A rank has a quarter and needs a half: a quarter of 304 MB at 1e11 B/s.
    assert wider == pytest.approx(BUCKET_START + model / 4 / 1e11)


def test_transfer_between_pools_is_bound_by_the_slower_side() -> None:
    seconds = transfer_seconds(
        DIMS, Layout(tp=2, dp=4), Layout(tp=2), links=LINKS, efficiency=EFF, same_pool=False
    )
    # 8 senders send an eighth each, 2 receivers take a half each, at 1e10 B/s.
    assert seconds == pytest.approx(BUCKET_START + weight_bytes(DIMS) / 2 / 1e10)


def test_gathered_weights_pass_every_rank_tensor_by_tensor() -> None:
    # 10 layers of q, k, v, o, two norms, gate, up, down; embedding, last norm, head.
    assert n_tensors(DIMS) == 10 * 9 + 3
    moe = Dims(10, 1000, 10, 5, 100, 4000, 1000, n_experts=8, top_k=2, expert_ffn=500, n_dense_layers=1)
    assert n_tensors(moe) == 10 * 6 + 3 + 9 * (1 + 3 * 8) + 3
    ways = {"links": LINKS, "efficiency": EFF}
    kept = gathered_seconds(DIMS, Layout(), Layout(), same_pool=True, **ways)
    assert kept == pytest.approx(93 * TENSOR)
    cut = gathered_seconds(DIMS, Layout(tp=4), Layout(tp=4), same_pool=True, **ways)
    assert cut == pytest.approx(93 * TENSOR + 304e6 / 1e11)  # the whole model over the fast link
    apart = gathered_seconds(DIMS, Layout(tp=4), Layout(tp=4), same_pool=False, **ways)
    assert apart == pytest.approx(93 * TENSOR + 304e6 / 1e10)  # the broadcast is the slower way


def test_offload_and_remote() -> None:
    assert offload_seconds(8e9, LINKS) == pytest.approx(1.0)  # 0.8 of 1e10 B/s
    assert Remote(0.5, 10).seconds(100) == pytest.approx(10.5)
    assert Remote(0.5, 10).seconds(0) == 0


def test_links_of_a_cluster() -> None:
    cluster = ClusterSpec.preset("4 x h100x8")
    links = Links.of(DeviceSet("h100-80", (8, 8)), cluster)
    assert (links.per_node, links.intra, links.inter) == (8, 450e9, 50e9)
    assert Links.of(DeviceSet("h100-80", (2, 2)), cluster).per_node == 2


@pytest.mark.parametrize("name", sorted(profiles()))
def test_every_device_has_times(name: str) -> None:
    profile = hardware(name)
    machine, links = Machine.of(profile), Links.of_profile(profile)
    dtype = "bfloat16" if "bfloat16" in profile.dtypes else "float16"
    assert machine.peak(dtype) > 0
    assert efficiency(name).memory > 0
    shape = ModelShape.gpt(2, 256, 4, 1024, 512)
    args = {"micro_batch": 2, "n_micro_batches": 2, "seq_len": 128, "machine": machine, "links": links}
    train = training_seconds(shape, Layout(), **args).total
    assert 0 < inference_seconds(shape, Layout(), **args).total < train < np.inf
    generate = decode_seconds(
        shape, Layout(), prompt_tokens=64, response=Fixed(64), n_sequences=4, capacity_tokens=1e6,
        machine=machine, links=links,
    )  # fmt: skip
    assert 0 < generate.total < np.inf
