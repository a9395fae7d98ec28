"""A training step's memory, one hand-computed instance per item."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rolemesh.kernels import linear
from rolemesh.placement.layout import Layout, LayoutError
from rolemesh.placement.memory import (
    MemoryItems,
    RankParams,
    SoftwareError,
    parameters,
    rank_params,
    software,
    state_memory,
    training_memory,
)
from rolemesh.placement.model import Experts, ModelShape

LLAMA_8B = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 8192)
SMALL = ModelShape("llama", 8, 512, 1376, 8, 2, 64, 4096, 4096)
LAYER = 512 * (512 + 2 * 128) + 512 * 512 + 3 * 512 * 1376 + 2 * 512  # 2,769,920 parameters


def step(shape: ModelShape = SMALL, layout: Layout | None = None, **more: object) -> MemoryItems:
    arguments = {"micro_batch": 1, "seq_len": 256, "n_micro_batches": 8, "by": software("nemo"), **more}
    return training_memory(shape, layout or Layout(), **arguments)  # type: ignore[arg-type]


def test_distributed_optimizer_of_llama_8b_is_7_and_a_half_bytes_per_parameter() -> None:
    # NVIDIA's own log line for 8 data-parallel ranks: 57,438.81 MiB of weights, gradients and optimizer.
    items = state_memory(rank_params(LLAMA_8B, Layout(dp=8), 0), Layout(dp=8), software("megatron"))
    assert sum(items.values()) / 2**20 == pytest.approx(57_438.81, rel=1e-4)


def test_states_by_sharding() -> None:
    params, layout = RankParams(dense=800, experts=0, layer=0, ends=0, largest=0), Layout(dp=4)
    by_level = {
        level: sum(state_memory(params, layout, replace(software("megatron"), sharding=level)).values()) / 800
        for level in ("none", "optimizer", "gradients", "parameters")
    }
    # weights 2, gradients 4, master and Adam 12 bytes (Rajbhandari et al. 2020, figure 1, fp32 gradients)
    assert by_level == {"none": 18, "optimizer": 6 + 3, "gradients": 2 + 4, "parameters": 4.5}


def test_fp32_training_needs_no_master_copy() -> None:
    params = RankParams(dense=1000, experts=0, layer=0, ends=0, largest=0)
    states = state_memory(params, Layout(dp=2), software("megatron-cpu"), dtype_bytes=4)
    assert states == {"weights": 4000, "gradients": 4000, "optimizer": 4000}


def test_expert_state_is_shared_by_expert_data_parallel_ranks() -> None:
    # 8 ranks, ep 4: the 8 experts are there twice, so two ranks share an expert's optimizer state.
    shape = replace(SMALL, family="qwen3_moe", moe=Experts(n=8, top_k=2, ffn=256))
    layout = Layout(dp=8, ep=4)
    params = rank_params(shape, layout, 0)
    assert params.experts == 8 * 2 * 3 * 512 * 256
    states = state_memory(params, layout, software("megatron"))
    assert states["optimizer"] == 12 * (params.dense / 8 + params.experts / 2)


def test_first_stage_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    def in_flight(n_micro_batches: int, stage: int) -> float:
        items = step(layout=Layout(pp=4), n_micro_batches=n_micro_batches, stage=stage)
        return items["activations"] / one

    one = step(layout=Layout(pp=4), n_micro_batches=1, stage=0)["activations"]
    assert (in_flight(2, 0), in_flight(4, 0), in_flight(64, 0)) == (2, 4, 4)
    assert (in_flight(64, 1), in_flight(64, 3)) == (3, 1)


def test_interleaving_keeps_more_by_the_papers_factor() -> None:
    plain = step(layout=Layout(pp=4), n_micro_batches=64, stage=0)["activations"]
    interleaved = step(layout=Layout(pp=4, vpp=2), n_micro_batches=64, stage=0)["activations"]
    assert interleaved / plain == pytest.approx(1 + 3 / (4 * 2))  # 1 + (p - 1) / (p v)


def test_gpipe_keeps_every_micro_batch() -> None:
    by = replace(software("nemo"), schedule="gpipe")
    one = step(layout=Layout(pp=2), n_micro_batches=1, by=by, stage=1)["activations"]
    assert step(layout=Layout(pp=2), n_micro_batches=6, by=by, stage=1)["activations"] == 6 * one


def test_full_recompute_keeps_layer_inputs_and_one_layer_at_work() -> None:
    # A long enough sequence that the last layer outweighs the logits of 256 rows.
    shape = replace(SMALL, vocab=256)
    items = step(shape, recompute="full")
    none = step(shape)["activations"] / 8
    assert items["activations"] == 8 * 256 * 512 * 2
    assert items["recomputed layer"] == none - 256 * 512 * 2
    # gradients: 3 tensors as wide as the hidden size, and of gate and up
    assert items["activation gradients"] == 256 * 2 * (3 * 512 + 2 * 1376)


def test_selective_recompute_drops_scores_and_needs_one_layers_at_work() -> None:
    by = replace(software("nemo"), flash=False)
    shape = replace(SMALL, vocab=256)
    scores = 4 * 8 * 256 * 256  # softmax and output, bf16, 8 heads
    none, selective = (step(shape, by=by, recompute=r) for r in ("none", "selective"))
    assert none["activations"] - selective["activations"] == 8 * scores
    assert selective["recomputed layer"] == scores


def test_offloaded_activations_leave_two_layers() -> None:
    kept, offloaded = (step(recompute="full", offload_activations=o)["activations"] for o in (False, True))
    assert offloaded / kept == 2 / 8


def test_materialised_logits_of_the_last_stage() -> None:
    shape = replace(SMALL, vocab=100_000)  # padded to 100,096 rows
    items = step(shape, head="materialised")
    assert (items.phase, items["logits"]) == ("head", 10 * 256 * 100_096)


def test_a_tiled_head_holds_a_32nd_of_the_logits_and_hidden_states_gradient() -> None:
    items = step(replace(SMALL, vocab=2_000_000), Layout(), stage=0)  # padded to 2,000,000 rows
    assert (items.phase, items["logits"]) == ("head", 2 * 256 * 2_000_000 / 32 + 4 * 256 * SMALL.hidden)


def test_tiles_are_those_of_the_kernel() -> None:
    assert (parameters.TILE_SHARE, parameters.SMALL_TILE) == (linear._SHARE, linear._SMALL_TILE)
    assert parameters.LARGE_TILE == linear._GPU_TILE


def test_a_chunked_head_holds_few_logits_and_a_value_head_none() -> None:
    shape = replace(SMALL, vocab=100_000)
    assert step(shape, head="chunked").get("logits", 0) <= 10 * 2**24
    assert step(replace(shape, n_labels=1)).get("logits", 0) <= 12 * 256


def test_zero3_gathers_a_layer_at_a_time() -> None:
    by = replace(software("fsdp2"), ends_stay=False)
    items = step(replace(SMALL, vocab=256), Layout(dp=8), by=by, recompute="full")
    assert items["gathered weights"] == 10 * LAYER
    assert items["weights"] == 4 * (8 * LAYER + 512 + 2 * 256 * 512) / 8


def test_adapters_leave_the_weights_without_gradients() -> None:
    items = step(lora_rank=16)
    # q, k, v, o, gate, up, down: 16 x (inputs + outputs)
    adapters = 8 * 16 * (2 * (512 + 512) + 2 * (512 + 128) + 3 * (512 + 1376))
    assert items["gradients"] == 2 * adapters
    assert items["optimizer"] == 12 * adapters


def test_the_optimizers_step_can_be_the_fullest_moment() -> None:
    by = replace(software("nemo"), step=4)
    items = step(replace(SMALL, vocab=256), by=by, seq_len=8, n_micro_batches=1)
    assert items.phase == "step"
    assert items["optimizer step"] == 4 * (8 * LAYER + 512 + 2 * 256 * 512)


def test_uneven_stages_and_the_heaviest_rank() -> None:
    items = step(layout=Layout(pp=2), stages=[3, 5], n_micro_batches=1)
    assert items.stage == 1
    with pytest.raises(LayoutError, match=r"stages \[3, 4\] must be 2 numbers that add up to 8"):
        step(layout=Layout(pp=2), stages=[3, 4])


def test_faults_name_what_is_wrong() -> None:
    with pytest.raises(SoftwareError, match=r"'megatorn'.*did you mean megatron"):
        software("megatorn")
    with pytest.raises(SoftwareError, match="sharding 'zero9' is none of none, optimizer"):
        replace(software("nemo"), sharding="zero9")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="ep=3 does not divide the 8 experts"):
        rank_params(replace(SMALL, moe=Experts(8, 2, 256)), Layout(dp=3, ep=3), 0)
    with pytest.raises(ValueError, match="head 'tail' is none of tiled"):
        step(head="tail")


def test_items_add_up() -> None:
    items = step()
    assert items.total == sum(items.values()) == items.resident_bytes + items.working_bytes
    assert {"weights", "gradients", "optimizer"} == set(items.resident)
    assert "GiB on stage 0 (weights" in str(items)
