"""verl's checkpoints as Hugging Face folders: the same numbers, or a refusal that leaves nothing behind."""

import json
import os
import pickle
import shutil
import sys
import types
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from verl_folders import fsdp_folder, megatron_folder

from rolemesh.launch.convert import convert_checkpoint
from rolemesh.launch.verl.pickled import RankFile
from rolemesh.parallel.weights import CheckpointError
from rolemesh.placement.layout import Layout

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def weights(folder):
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def same(one, other):
    one, other = weights(one), weights(other)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    """A tied bf16 model and its checkpoint of step 7 by 3 ranks, which cut its tensors unevenly."""
    root = tmp_path_factory.mktemp("fsdp")
    model = tiny_checkpoint(root / "model", "qwen2", tied=True, vocab=100, dtype=torch.bfloat16)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    fsdp_folder(root / "run" / "global_step_7" / "actor", model, (3,))
    (root / "run" / "latest_checkpointed_iteration.txt").write_text("7")
    (root / "run" / "global_step_7" / "data.pt").write_bytes(b"")
    return root


@pytest.mark.parametrize("given", ["run", "run/global_step_7", "run/global_step_7/actor"])
def test_what_fsdp_ranks_saved_is_the_model_bit_for_bit(fsdp, tmp_path, given):
    said = "\n".join(convert_checkpoint(fsdp / given, tmp_path / "out"))
    assert "verl with FSDP, an lm head, bfloat16" in said
    assert "step 7" in said
    assert "not taken over: place in the data" in said
    same(fsdp / "model", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == [2, 5]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == 2


def test_replicas_of_a_mesh_are_read_once(tmp_path):
    model = tiny_checkpoint(tmp_path / "model")
    fsdp_folder(tmp_path / "actor", model, (2, 2))
    list(convert_checkpoint(tmp_path / "actor", tmp_path / "out"))
    same(model, tmp_path / "out")


def test_a_critics_head_comes_along_and_its_bias_only_when_told_to_drop_it(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", head="score")

    def biased(module):
        module.score.bias.data.fill_(0.25)
        return module

    step = tmp_path / "global_step_3"
    fsdp_folder(step / "critic", model, (2,), head="value", change=biased)
    with pytest.raises(CheckpointError, match=r"score.bias is \[0.25\].*--drop-bias"):
        list(convert_checkpoint(step, tmp_path / "out", "critic"))
    assert sorted(os.listdir(tmp_path)) == ["global_step_3", "model"]
    said = "\n".join(convert_checkpoint(step, tmp_path / "out", "critic", drop_bias=True))
    assert "left out: score.bias = [0.25]" in said
    same(model, tmp_path / "out")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config.num_labels == 1


def refused(folder, tmp_path, match):
    with pytest.raises(CheckpointError, match=match):
        list(convert_checkpoint(folder, tmp_path / "out"))
    assert not [name for name in os.listdir(tmp_path) if "out" in name]


@pytest.fixture
def actor(fsdp, tmp_path):
    """A copy of the checkpoint to spoil."""
    return shutil.copytree(fsdp / "run/global_step_7/actor", tmp_path / "actor")


def test_a_missing_rank_is_named(actor, tmp_path):
    (actor / "model_world_size_3_rank_1.pt").unlink()
    refused(actor, tmp_path, "lacks model_world_size_3_rank_1.pt")


def test_files_of_two_worlds_are_not_mixed(actor, tmp_path):
    shutil.copy(actor / "model_world_size_3_rank_1.pt", actor / "model_world_size_2_rank_1.pt")
    refused(actor, tmp_path, "worlds of 2, 3 ranks")


def test_a_truncated_file_is_named(actor, tmp_path):
    file = actor / "model_world_size_3_rank_2.pt"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    refused(actor, tmp_path, "model_world_size_3_rank_2.pt is truncated or damaged")


def test_two_files_of_one_rank_do_not_make_the_model(actor, tmp_path):
    shutil.copy(actor / "model_world_size_3_rank_1.pt", actor / "model_world_size_3_rank_2.pt")
    refused(actor, tmp_path, "make|missing")


def test_another_models_configuration_is_refused(actor, tmp_path):
    config = json.loads((actor / "huggingface/config.json").read_text())
    (actor / "huggingface/config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    refused(actor, tmp_path, "tensors that this model lacks: model.layers.1")


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_code_in_a_file_is_refused_and_not_run(actor, tmp_path):
    torch.save({"x": Evil(str(tmp_path / "ran"))}, actor / "model_world_size_3_rank_0.pt")
    refused(actor, tmp_path, "holds more than tensors: posix.mkdir")
    assert not (tmp_path / "ran").exists()


def test_a_view_is_read_and_not_what_it_is_a_view_of(tmp_path):
    whole = torch.arange(60.0).view(6, 10)
    torch.save({"part": whole[2:4, 3:5], "turned": whole.t(), "none": whole[:0]}, tmp_path / "x.pt")
    file = RankFile(tmp_path / "x.pt")
    read = {name: file.read(stored) for name, stored in file.tensors.items()}
    assert torch.equal(read["part"], whole[2:4, 3:5])
    assert torch.equal(read["turned"], whole.t())
    assert read["none"].shape == (0, 10)
    assert read["part"].untyped_storage().nbytes() == 4 * 12  # from its first to its last number


def test_adapters_are_added_to_their_weights(tmp_path):
    peft_names = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.default.weight"
    model = tiny_checkpoint(tmp_path / "model", layers=1)
    state = weights(model)
    a, b = torch.randn(4, 64), torch.randn(64, 4)
    stored = {f"base_model.model.{name}": tensor for name, tensor in state.items()}
    q = "model.layers.0.self_attn.q_proj.weight"
    del stored[f"base_model.model.{q}"]
    stored["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"] = state[q]
    stored |= {peft_names.format(0, "A"): a, peft_names.format(0, "B"): b}
    actor = tmp_path / "actor"
    (actor / "huggingface").mkdir(parents=True)
    shutil.copy(model / "config.json", actor / "huggingface")
    torch.save(stored, actor / "model_world_size_1_rank_0.pt")
    refused(actor, tmp_path, "LoRA adapters; .*adapter_config.json")
    (actor / "lora_adapter").mkdir()
    (actor / "lora_adapter/adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    list(convert_checkpoint(actor, tmp_path / "out"))
    made = weights(tmp_path / "out")
    assert torch.equal(made.pop(q), state.pop(q) + 2.0 * (b @ a))
    assert all(torch.equal(made[name], state[name]) for name in state)


def test_descriptions_by_an_older_torch_are_read(fsdp, actor, tmp_path):
    """Distributed tensors had other modules once; files say so, and no such torch is needed."""
    for file in actor.glob("*.pt"):
        entries = {}
        with zipfile.ZipFile(file) as archive:
            entries = {info.filename: archive.read(info) for info in archive.infolist()}
        (name,) = [name for name in entries if name.endswith("data.pkl")]
        told = entries[name]
        old = told.replace(
            b"ctorch.distributed.tensor\nDTensor\n", b"ctorch.distributed._tensor.api\nDTensor\n"
        )
        old = old.replace(b"ctorch.distributed.tensor.", b"ctorch.distributed._tensor.")
        assert old.count(b"_tensor.api")
        assert old.count(b"_tensor.placement_types")
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for entry, content in (entries | {name: old}).items():
                archive.writestr(entry, content)
    list(convert_checkpoint(actor, tmp_path / "out"))
    same(fsdp / "model", tmp_path / "out")


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("qwen2", False),
        pytest.param("llama", True, marks=pytest.mark.slow),
        pytest.param("mixtral", False, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", False, marks=pytest.mark.slow),
    ],
)
def test_what_megatron_ranks_saved_is_the_model_bit_for_bit(tmp_path, family, tied):
    model = tiny_checkpoint(tmp_path / "model", family, tied=tied, vocab=101, layers=3, dtype=torch.bfloat16)
    layout = Layout(tp=2, pp=2, sequence_parallel=family in ("mixtral", "qwen3_moe"))
    megatron_folder(tmp_path / "actor", model, layout)
    assert "verl with Megatron" in "\n".join(convert_checkpoint(tmp_path / "actor", tmp_path / "out"))
    same(model, tmp_path / "out")


def test_a_megatron_critic_and_what_is_wrong_with_its_files(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", head="score")
    critic = megatron_folder(tmp_path / "critic", model, Layout(tp=2), head="value")
    list(convert_checkpoint(critic, tmp_path / "values"))
    same(model, tmp_path / "values")
    _as_before_0_16(critic / "dist_ckpt" / ".metadata")
    list(convert_checkpoint(critic, tmp_path / "values2"))
    same(model, tmp_path / "values2")
    config = critic / "huggingface" / "config.json"
    told = config.read_text()
    config.write_text(json.dumps(json.loads(told) | {"num_hidden_layers": 1}))
    refused(critic, tmp_path, r"is \(2, 64\), the configuration says \(1, 64\)")
    config.write_text(told)
    file = next((critic / "dist_ckpt").glob("__1_*.distcp"))
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    refused(critic, tmp_path, f"truncated files: {file.name}")
    file.unlink()
    refused(critic, tmp_path, f"lacks {file.name}")


def _as_before_0_16(file):
    """Add what older releases of megatron-core told of the optimizer, in a class that is gone."""
    name = "megatron.core.dist_checkpointing.strategies.resharding"
    module = sys.modules[name] = types.ModuleType(name)
    module.TensorReformulationMetadata = type("TensorReformulationMetadata", (), {"__module__": name})
    metadata = pickle.loads(file.read_bytes())
    told = module.TensorReformulationMetadata()
    told.ckpt_orig_global_shape = (3, 4)
    metadata.mcore_data = {"optimizer.state.exp_avg": told}
    file.write_bytes(pickle.dumps(metadata))
    del sys.modules[name]


def test_other_layouts_are_refused_by_name(actor, tmp_path):
    for file in actor.glob("*.pt"):
        file.unlink()
    refused(actor, tmp_path, "model/mp_rank_")
    save_file({"x": torch.zeros(1)}, actor / "huggingface/model.safetensors")
    refused(actor, tmp_path, "has the weights already")


def test_weights_without_a_configuration_are_refused(actor, tmp_path):
    shutil.rmtree(actor / "huggingface")
    refused(actor, tmp_path, "lacks huggingface/config.json")
