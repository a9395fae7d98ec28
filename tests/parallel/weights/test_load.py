import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint
from torch import Tensor

from rolemesh.parallel.weights import CheckpointError, Head, load_hf, stage_plan
from rolemesh.parallel.weights.checkpoint import Checkpoint
from rolemesh.placement.layout import Coords, Layout
from rolemesh.placement.model import ModelShape


def load(
    path: Path,
    layout: Layout | None = None,
    rank: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> dict[str, Tensor]:
    """One rank's parameters, all 7 before loading."""
    layout = layout or Layout()
    shape = ModelShape.from_config(json.loads((path / "config.json").read_text()))
    coords = layout.coords(rank)
    head: Head = options.get("head", "lm")
    parameters = {
        plan.name: torch.full(plan.cuts[coords.tp].shape, 7, dtype=dtype)
        for plan in stage_plan(shape, layout, coords.pp, head)
    }
    load_hf(parameters, shape, layout, coords, path, **options)
    return parameters


def rewrite(path: Path, change: dict[str, Tensor | None]) -> Path:
    """Put tensors into a single-file checkpoint, or take out those that are None."""
    tensors = {**load_file(path / "model.safetensors"), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("max_shard_size", ["5GB", "60KB"])
def test_a_rank_of_tp2_asks_for_half_of_every_matrix(tmp_path, monkeypatch, max_shard_size):
    path = tiny_checkpoint(tmp_path, vocab=256, max_shard_size=max_shard_size)
    reads: dict[str, list[Tensor]] = defaultdict(list)
    read = Checkpoint.read

    def recorded(checkpoint: Checkpoint, name: str, source: tuple[slice, ...]) -> Tensor:
        reads[name].append(read(checkpoint, name, source))
        return reads[name][-1]

    monkeypatch.setattr(Checkpoint, "read", recorded)
    load(path, Layout(tp=2), rank=1)
    whole = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name, tensor in whole.items():
        share = 2 if tensor.ndim == 2 else 1  # norms are on every rank
        assert sum(part.numel() for part in reads[name]) * share == tensor.numel(), name


def test_numbers_are_cast_to_the_parameters_dtype(tmp_path):
    path = tiny_checkpoint(tmp_path)
    found = load(path, dtype=torch.bfloat16)["decoder.final_layernorm.weight"]
    assert found.equal(load_file(path / "model.safetensors")["model.norm.weight"].bfloat16())


def test_rows_that_pad_the_vocabulary_are_zero(tmp_path):
    path = tiny_checkpoint(tmp_path, vocab=100)
    for rank, n_real in ((0, 100), (1, 0)):
        rows = load(path, Layout(tp=2), rank)["embedding.word_embeddings.weight"]
        assert rows.shape[0] == 128
        assert not rows[n_real:].any()
        assert rows[:n_real].all()


def test_a_tied_matrix_is_read_on_both_end_stages(tmp_path):
    path = tiny_checkpoint(tmp_path, tied=True)
    first, last = (load(path, Layout(pp=2), rank) for rank in range(2))
    assert first["embedding.word_embeddings.weight"].equal(last["output_layer.weight"])


def test_a_second_copy_of_a_tied_matrix_is_accepted_only_if_equal(tmp_path):
    path = tiny_checkpoint(tmp_path, tied=True)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    load(rewrite(path, {"lm_head.weight": embedding.clone()}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load(rewrite(path, {"lm_head.weight": embedding + 1}))


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path):
    path = tiny_checkpoint(tmp_path)
    up = "model.layers.1.mlp.up_proj.weight"
    whole = load_file(path / "model.safetensors")[up]
    with pytest.raises(CheckpointError, match=rf"lacks {up}$"):
        load(rewrite(path, {up: None}))
    with pytest.raises(CheckpointError, match=rf"lacks {up} and has unknown surplus$"):
        load(rewrite(path, {"surplus": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=rf"{up} .* has shape \(127, 64\), the model needs \(128, 64\)"):
        load(rewrite(path, {"surplus": None, up: whole[:127].clone()}))


def test_rotary_tables_of_old_checkpoints_are_passed_over(tmp_path):
    load(rewrite(tiny_checkpoint(tmp_path), {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))


def test_files_that_are_not_there_are_named(tmp_path):
    path = tiny_checkpoint(tmp_path, max_shard_size="60KB")
    lost = sorted(path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        load(path)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(path)


def test_parameters_that_the_plan_does_not_know_or_lacks_are_named(tmp_path):
    path = tiny_checkpoint(tmp_path)
    shape = ModelShape.from_config(json.loads((path / "config.json").read_text()))
    parameters = load(path)
    at = (shape, Layout(), Coords(0, 0, 0, 0), path)
    with pytest.raises(CheckpointError, match=r"no Hugging Face tensor is known for parameter adapter"):
        load_hf({**parameters, "adapter": torch.zeros(1)}, *at)
    with pytest.raises(CheckpointError, match=r"output_layer\.weight .* has shape \(3, 64\)"):
        load_hf({**parameters, "output_layer.weight": torch.zeros(3, 64)}, *at)
    del parameters["output_layer.weight"]
    with pytest.raises(CheckpointError, match=r"has no parameter output_layer\.weight"):
        load_hf(parameters, *at)


def test_transformer_engine_parameters_take_the_norms_under_their_own_names(tmp_path):
    path = tiny_checkpoint(tmp_path)
    shape = ModelShape.from_config(json.loads((path / "config.json").read_text()))
    fused = {
        name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight").replace(
            "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"
        ): torch.zeros_like(parameter)
        for name, parameter in load(path).items()
    }
    load_hf(fused, shape, Layout(), Coords(0, 0, 0, 0), path)
    source = load_file(path / "model.safetensors")
    qkv_norm = fused["decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"]
    mlp_norm = fused["decoder.layers.1.mlp.linear_fc1.layer_norm_weight"]
    assert qkv_norm.equal(source["model.layers.1.input_layernorm.weight"])
    assert mlp_norm.equal(source["model.layers.1.post_attention_layernorm.weight"])


def test_a_value_head_is_read_from_a_sequence_classifier(tmp_path):
    path = tiny_checkpoint(tmp_path, head="score")
    found = load(path, Layout(tp=2), 1, head="value")["output_layer.weight"]
    assert found.equal(load_file(path / "model.safetensors")["score.weight"])


def test_a_reward_model_without_its_head_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no value head score\.weight\. A reward model needs"):
        load(tiny_checkpoint(tmp_path), head="value")


def test_the_heads_name_is_a_setting_and_the_refusal_names_candidates(tmp_path):
    path = tiny_checkpoint(tmp_path, head="score")
    head = load_file(path / "model.safetensors")["score.weight"].clone()
    rewrite(path, {"score.weight": None, "value_head.weight": head})
    with pytest.raises(CheckpointError, match=r"it has value_head\.weight: set head_name"):
        load(path, head="value")
    assert load(path, head="value", head_name="value_head")["output_layer.weight"].equal(head)


def test_a_critic_may_ask_for_a_new_head_of_zeros(tmp_path):
    path = tiny_checkpoint(tmp_path)
    parameters = load(path, head="value", allow_new_head=True)
    assert parameters["output_layer.weight"].shape == (1, 64)
    assert not parameters["output_layer.weight"].any()
    assert parameters["decoder.final_layernorm.weight"].any()


def test_a_head_that_is_there_is_read_though_a_new_one_is_allowed(tmp_path):
    path = tiny_checkpoint(tmp_path, head="score")
    assert load(path, head="value", allow_new_head=True)["output_layer.weight"].all()


def test_a_head_of_two_labels_or_with_a_bias_is_refused(tmp_path):
    path = tiny_checkpoint(tmp_path, head="score")
    load(rewrite(path, {"score.bias": torch.zeros(1)}), head="value")
    with pytest.raises(CheckpointError, match=r"score\.bias .* a head with a bias is not supported"):
        load(rewrite(path, {"score.bias": torch.ones(1)}), head="value")
    rewrite(path, {"score.bias": None, "score.weight": torch.ones(2, 64)})
    with pytest.raises(
        CheckpointError, match=r"score\.weight .* has shape \(2, 64\), the model needs \(1, 64\)"
    ):
        load(path, head="value")
