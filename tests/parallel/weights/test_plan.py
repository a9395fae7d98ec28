import pytest
import torch
from tiny import CONFIGS, tiny_config, tiny_model

from rolemesh.parallel.weights.plan import canonical_name, export_plan, hf_tensors, stage_plan
from rolemesh.parallel.weights.save import shard_files
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape

LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=4), Layout(pp=2), Layout(tp=2, pp=2)]


def shape_of(family: str = "llama", **sizes: object) -> ModelShape:
    return ModelShape.from_config(tiny_config(family, **sizes).to_dict())


def sources(shape: ModelShape, layout: Layout, pp_rank: int, name: str, tp_rank: int) -> list[tuple]:
    """(tensor, first row, stop row) of the pieces of one parameter."""
    plan = next(plan for plan in stage_plan(shape, layout, pp_rank) if plan.name == name)
    return [
        (piece.tensor.split(".")[-2], piece.source[0].start, piece.source[0].stop)
        for piece in plan.cuts[tp_rank].pieces
    ]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_planned_tensors_are_those_of_the_hugging_face_model(family, tied):
    config = tiny_config(family, tied=tied)
    expected = {name: tuple(p.shape) for name, p in tiny_model(config).named_parameters()}
    planned = hf_tensors(ModelShape.from_config(config.to_dict()))
    assert {name: tensor.shape for name, tensor in planned.items()} == expected


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_the_ranks_together_hold_every_number_once(layout, family):
    shape = shape_of(family, layers=3)
    counts = {name: torch.zeros(tensor.shape) for name, tensor in hf_tensors(shape).items()}
    for pp_rank in range(layout.pp):
        for plan in stage_plan(shape, layout, pp_rank):
            for cut in plan.cuts if plan.gathered else plan.cuts[:1]:
                for piece in cut.pieces:
                    counts[piece.tensor][piece.source] += 1
    assert all((count == 1).all() for count in counts.values())


def test_seven_layers_over_two_stages_keep_their_global_numbers():
    owners = export_plan(shape_of(layers=7), Layout(pp=2))
    stages = {n: owners[f"model.layers.{n}.input_layernorm.weight"].pp_rank for n in range(7)}
    assert stages == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1}
    assert (
        owners["model.layers.4.input_layernorm.weight"].parameter == "decoder.layers.0.input_layernorm.weight"
    )


def test_the_fused_projection_goes_kv_group_by_kv_group():
    shape = shape_of("qwen2", heads=4, kv_heads=2, hidden=64)  # head_dim 16
    for name in (
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_qkv.bias",
    ):
        parts = [sources(shape, Layout(tp=2), 0, name, rank) for rank in range(2)]
        assert parts[0] == [("q_proj", 0, 32), ("k_proj", 0, 16), ("v_proj", 0, 16)]
        assert parts[1] == [("q_proj", 32, 64), ("k_proj", 16, 32), ("v_proj", 16, 32)]


def test_a_single_kv_group_is_cut_over_tp_as_megatron_core_does():
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    shape = shape_of(heads=4, kv_heads=1, hidden=64)
    assert sources(shape, Layout(tp=2), 0, name, 0) == [("q_proj", 0, 48)]
    assert sources(shape, Layout(tp=2), 0, name, 1) == [
        ("q_proj", 48, 64),
        ("k_proj", 0, 16),
        ("v_proj", 0, 16),
    ]


def test_vocabulary_padding_is_cut_once_and_may_fill_a_whole_rank():
    embedding = stage_plan(shape_of(vocab=151936), Layout(tp=2), 0)[0]
    assert [cut.shape[0] for cut in embedding.cuts] == [76032, 76032]  # 151936 to a multiple of 2 x 128
    assert embedding.cuts[1].pieces[0].source[0] == slice(76032, 151936)
    small = stage_plan(shape_of(vocab=5), Layout(tp=4), 0)[0]
    assert [len(cut.pieces) for cut in small.cuts] == [1, 0, 0, 0]


def test_a_tied_matrix_stands_on_both_end_stages_and_is_exported_by_the_first():
    shape = shape_of(tied=True)
    first, last = (stage_plan(shape, Layout(pp=2), pp_rank) for pp_rank in range(2))
    assert first[0].tensors == last[-1].tensors
    owner = export_plan(shape, Layout(pp=2))["model.embed_tokens.weight"]
    assert (owner.pp_rank, owner.parameter) == (0, "embedding.word_embeddings.weight")
    assert "output_layer.weight" not in {plan.name for plan in stage_plan(shape, Layout(), 0)}


def test_a_value_model_has_a_score_in_place_of_the_vocabulary():
    tensors = hf_tensors(shape_of(), "value")
    assert tensors["score.weight"].shape == (1, 64)
    assert "lm_head.weight" not in tensors


def test_files_hold_one_stage_and_at_most_the_limit():
    shape = shape_of("qwen3", layers=3)
    owners = export_plan(shape, Layout(pp=2))
    limit = 100_000
    files = shard_files(owners, 4, limit)
    assert list(files) == list(hf_tensors(shape))
    names = sorted(set(files.values()))
    assert names == [f"model-{n + 1:05d}-of-{len(names):05d}.safetensors" for n in range(len(names))]
    for file in names:
        held = [owners[name] for name in files if files[name] == file]
        assert len({owner.pp_rank for owner in held}) == 1
        assert sum(torch.Size(owner.tensor.shape).numel() * 4 for owner in held) <= limit


def test_a_model_that_fits_one_file_has_no_numbered_files():
    assert set(shard_files(export_plan(shape_of(), Layout()), 4, 10**9).values()) == {"model.safetensors"}


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("module.module.decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
        (
            "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.3.input_layernorm.weight",
        ),
        ("decoder.layers.3.mlp.linear_fc1.layer_norm_weight", "decoder.layers.3.pre_mlp_layernorm.weight"),
        ("decoder.layers.3.mlp.linear_fc1.weight", "decoder.layers.3.mlp.linear_fc1.weight"),
    ],
)
def test_wrapped_and_transformer_engine_names_are_recognised(name, canonical):
    assert canonical_name(name) == canonical
