import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from parallel_runs import logits
from safetensors.torch import load_file, save_file
from tiny import CONFIGS, tiny_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rolemesh.parallel import cpu_device
from rolemesh.parallel.groups import make_groups
from rolemesh.parallel.micro_batches import pack
from rolemesh.parallel.model import ParallelModel
from rolemesh.parallel.weights import (
    CheckpointError,
    Head,
    export_hf,
    save,
    save_hf,
)
from rolemesh.placement.layout import Layout

pytestmark = pytest.mark.full
cpu_device.install()
LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2)]
TOKENS = torch.arange(4, 28).reshape(2, 12)


def built(path: Path, layout: Layout, head: Head = "lm", dtype: torch.dtype = torch.float32) -> ParallelModel:
    return ParallelModel(path, layout, make_groups(layout), head=head, dtype=dtype)


def saved(model: ParallelModel, source: Path, out_dir: Path, **options: int) -> None:
    at = (model.module, model.shape, model.layout, model.groups)
    save_hf(*at, source, out_dir, head=model.head, **options)


def exported(model: ParallelModel) -> Iterator[tuple[str, Tensor]]:
    return export_hf(model.module, model.shape, model.layout, model.groups, head=model.head)


def outputs(model: ParallelModel) -> Tensor | None:
    """Logits [2, 12, vocab], or values [2, 12]; None before the last stage."""
    rows, width = TOKENS.shape
    batch = pack(TOKENS, torch.ones_like(TOKENS), {}, range(rows))
    results = model.infer([batch], lambda output, _: {"output": output[0].unflatten(0, (rows, width))})
    if results is None or model.head == "value":
        return results and results[0]["output"]
    part = logits(model, results[0]["output"])
    parts = [torch.empty_like(part) for _ in range(model.layout.tp)]
    dist.all_gather(parts, part, group=model.groups.tp)
    return torch.cat(parts, -1)[..., : model.shape.vocab]


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """A checksum of dtype, shape and bytes for each name: small enough to come back from other processes."""
    return {name: checksum(tensor) for name, tensor in tensors}


def checksum(tensor: Tensor) -> str:
    content = tensor.detach().contiguous()
    digest = hashlib.blake2b(f"{content.dtype} {tuple(content.shape)}".encode(), digest_size=16)
    digest.update(content.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_weights(found: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    assert found.keys() == source.keys()
    for name, tensor in source.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].equal(tensor), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_computes_what_hugging_face_does_and_saves_the_bits_it_read(tmp_path, family, layout, tied):
    source = tiny_checkpoint(tmp_path / "source", family, tied=tied, vocab=100, layers=3)

    def there_and_back(rank: int, world: int) -> tuple[Tensor | None, dict[str, str]]:
        model = built(source, layout)
        saved(model, source, tmp_path / "out", max_shard_bytes=80_000)
        return outputs(model), fingerprint(exported(model))

    results = run_ranks(there_and_back, layout.world)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(results[-1][0], reference(TOKENS).logits, atol=1e-4, rtol=0)
    assert_same_weights(weights_of(tmp_path / "out"), weights_of(source))
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert again(TOKENS).logits.equal(reference(TOKENS).logits)
    by_rank = [prints for _, prints in results]
    whole = {name: checksum for prints in by_rank for name, checksum in prints.items()}
    assert whole == fingerprint(weights_of(source).items())
    assert sum(map(len, by_rank)) == len(weights_of(source))  # every tensor comes from one rank


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_kv_heads_fewer_than_tp_serve_every_rank(tmp_path, kv_heads):
    source = tiny_checkpoint(tmp_path / "source", "qwen2", kv_heads=kv_heads)
    layout = Layout(tp=2 * kv_heads)

    def there_and_back(rank: int, world: int) -> Tensor | None:
        model = built(source, layout)
        saved(model, source, tmp_path / "out")
        return outputs(model)

    found = run_ranks(there_and_back, layout.world)[0]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(TOKENS).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert_same_weights(weights_of(tmp_path / "out"), weights_of(source))


def test_seven_layers_over_two_stages_come_back_under_their_own_numbers(tmp_path):
    source = tiny_checkpoint(tmp_path / "source", layers=7)

    def names(rank: int, world: int) -> dict[str, str]:
        return fingerprint(exported(built(source, Layout(pp=2))))

    first, last = run_ranks(names, 2)
    assert {name.split(".")[2] for name in first if ".layers." in name} == set("0123")
    assert {name.split(".")[2] for name in last if ".layers." in name} == set("456")
    assert {**first, **last} == fingerprint(weights_of(source).items())


def test_weights_are_the_same_by_name_through_any_two_layouts(tmp_path):
    source = tiny_checkpoint(tmp_path / "source", "qwen3")

    def reshaped(rank: int, world: int) -> list[dict[str, str]]:
        wide = built(source, Layout(tp=2))
        saved(wide, source, tmp_path / "out")
        deep = built(tmp_path / "out", Layout(pp=2))
        return [fingerprint(exported(model)) for model in (wide, deep)]

    (wide, deep), (_, deep_last) = run_ranks(reshaped, 2)
    assert wide == {**deep, **deep_last}


def test_only_the_first_replica_exports(tmp_path):
    source = tiny_checkpoint(tmp_path / "source")

    def count(rank: int, world: int) -> int:
        model = built(source, Layout(dp=2))
        saved(model, source, tmp_path / "out")
        return len(list(exported(model)))

    assert run_ranks(count, 2) == [len(weights_of(source)), 0]
    assert_same_weights(weights_of(tmp_path / "out"), weights_of(source))


def test_exported_tensors_do_not_follow_later_training(tmp_path):
    source = tiny_checkpoint(tmp_path / "source")

    def unchanged(rank: int, world: int) -> bool:
        model = built(source, Layout())
        tensors = dict(exported(model))
        before = fingerprint(tensors.items())
        for parameter in model.module.parameters():
            parameter.data.zero_()
        return fingerprint(tensors.items()) == before

    assert run_ranks(unchanged, 1) == [True]


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
def test_a_value_model_comes_back_as_a_sequence_classifier_of_one_label(tmp_path, layout):
    source = tiny_checkpoint(tmp_path / "source", head="score")

    def there_and_back(rank: int, world: int) -> Tensor | None:
        model = built(source, layout, "value")
        saved(model, source, tmp_path / "out")
        return outputs(model)

    values = run_ranks(there_and_back, layout.world)[-1]
    assert_same_weights(weights_of(tmp_path / "out"), weights_of(source))
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(values[:, -1:], reloaded(TOKENS).logits, atol=1e-4, rtol=0)


def test_a_critic_that_began_as_a_language_model_is_saved_as_a_classifier(tmp_path):
    source = tiny_checkpoint(tmp_path / "source", "qwen2", tied=True)

    def save_critic(rank: int, world: int) -> None:
        groups = make_groups(Layout())
        model = ParallelModel(source, Layout(), groups, head="value", dtype=torch.bfloat16, new_head=True)
        saved(model, source, tmp_path / "out")

    run_ranks(save_critic, 1)
    reloaded, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert (reloaded.num_labels, reloaded.dtype) == (1, torch.bfloat16)
    assert not reloaded.score.weight.any()


def test_a_saved_folder_holds_tokenizer_settings_and_the_dtype(tmp_path):
    source = tiny_checkpoint(tmp_path / "source")

    def save_bf16(rank: int, world: int) -> None:
        saved(built(source, Layout(), dtype=torch.bfloat16), source, tmp_path / "new" / "out")

    run_ranks(save_bf16, 1)
    out = tmp_path / "new" / "out"
    assert {file.name for file in out.iterdir()} == {file.name for file in source.iterdir()}
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (source, out)]
    assert tokenizers[0]("1+2=").input_ids == tokenizers[1]("1+2=").input_ids
    config = json.loads((out / "config.json").read_text())
    assert config == {**json.loads((source / "config.json").read_text()), "dtype": "bfloat16"}
    assert {tensor.dtype for tensor in weights_of(out).values()} == {torch.bfloat16}


def test_a_tensor_that_did_not_arrive_stops_the_save_on_every_rank(tmp_path, monkeypatch):
    source = tiny_checkpoint(tmp_path / "source")
    lost = "model.layers.1.mlp.up_proj.weight"

    def lossy(*args: object, **options: object) -> Iterator[tuple[str, Tensor]]:
        return (item for item in export_hf(*args, **options) if item[0] != lost)

    def failure(rank: int, world: int) -> str:
        with pytest.raises(CheckpointError) as error:
            saved(built(source, Layout(pp=2)), source, tmp_path / "out")
        return str(error.value)

    monkeypatch.setattr(save, "export_hf", lossy)
    messages = run_ranks(failure, 2)
    assert all(message.endswith(f"it lacks {lost}") for message in messages)
    assert [folder.name for folder in tmp_path.iterdir()] == ["source"]


def test_a_writer_that_fails_stops_every_rank_at_once(tmp_path, monkeypatch):
    source = tiny_checkpoint(tmp_path / "source")

    def full_disk(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
        if "00002" in file.name:
            raise OSError(28, "No space left on device")
        save_file(tensors, file, metadata=metadata)

    def failure(rank: int, world: int) -> str:
        with pytest.raises(OSError, match="No space left") as error:
            saved(built(source, Layout(tp=2)), source, tmp_path / "out", max_shard_bytes=50_000)
        return error.value.__notes__[0]

    monkeypatch.setattr(save, "save_file", full_disk)
    assert run_ranks(failure, 2, timeout=30) == ["while saving, on rank 0 of 2"] * 2
    assert [folder.name for folder in tmp_path.iterdir()] == ["source"]


def test_an_existing_folder_is_left_alone(tmp_path):
    source = tiny_checkpoint(tmp_path / "source")
    shutil.copytree(source, tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").write_text("precious")

    def refused(rank: int, world: int) -> None:
        with pytest.raises(FileExistsError, match="exists already"):
            saved(built(source, Layout()), source, tmp_path / "out")

    run_ranks(refused, 1)
    assert (tmp_path / "out" / "model.safetensors").read_text() == "precious"
