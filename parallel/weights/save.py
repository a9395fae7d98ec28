"""A role's parameters to a Hugging Face folder; each pipeline stage writes its own files."""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rolemesh.parallel.checkpoint_error import CheckpointError, listed
from rolemesh.parallel.weights.checkpoint import INDEX_FILE, SINGLE_FILE
from rolemesh.parallel.weights.export import export_hf
from rolemesh.parallel.weights.plan import Head, Owner, export_plan, hf_tensors
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape

if TYPE_CHECKING:  # who only plans weights need not load megatron-core
    from megatron.core.process_groups_config import ProcessGroupCollection

COPIED = (
    "generation_config.json",
    "tokenizer*",
    "*.tiktoken",
    "*.model",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
)
"""Files beside the weights that go with them as they are: tokenizer and generation settings."""


def save_hf(
    model: nn.Module | Mapping[str, Tensor],
    shape: ModelShape,
    layout: Layout,
    groups: ProcessGroupCollection,
    source: str | Path,
    out_dir: str | Path,
    *,
    head: Head = "lm",
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write the model as the new folder `out_dir` that transformers loads; every rank of the pool calls it.

    `source` is the Hugging Face folder that the model came from: its configuration (with the dtype and head
    as they are now) and its tokenizer go along. Files are written beside `out_dir`, checked, and renamed
    last, so that the folder is complete whenever it exists. A value model is saved as a sequence classifier
    with one label. `out_dir` must be on a disk that the stages' ranks share.

    Raises FileExistsError when `out_dir` exists, CheckpointError naming the tensors that did not arrive; both
    on every rank, whichever rank failed.
    """
    source, out_dir = Path(source), Path(out_dir)
    partial = out_dir.with_name(f".{out_dir.name}.partial")
    first = dist.get_rank() == 0
    dtype = next(iter(_tensors(model))).dtype
    files = shard_files(export_plan(shape, layout, head), dtype.itemsize, max_shard_bytes)
    _together(lambda: start_folder(out_dir, partial) if first else None)
    try:
        _together(lambda: _write_shards(export_hf(model, shape, layout, groups, head=head), files, partial))
        _together(
            lambda: finish_folder(shape, head, dtype, files, source, partial, out_dir) if first else None
        )
    finally:
        if first:
            shutil.rmtree(partial, ignore_errors=True)


def shard_files(owners: Mapping[str, Owner], itemsize: int, max_shard_bytes: int) -> dict[str, str]:
    """File of each tensor, in the owners' order: no file holds two ranks' tensors, nor more than
    `max_shard_bytes` of them unless a single tensor is larger."""
    shard_of: dict[str, int] = {}
    shard, writer, held_bytes = 0, (-1, -1), 0
    for name, owner in owners.items():
        n_bytes = torch.Size(owner.tensor.shape).numel() * itemsize
        if (owner.pp_rank, owner.ep_rank) != writer or held_bytes + n_bytes > max_shard_bytes:
            shard, writer, held_bytes = shard + 1, (owner.pp_rank, owner.ep_rank), 0
        shard_of[name] = shard
        held_bytes += n_bytes
    if shard == 1:
        return dict.fromkeys(shard_of, SINGLE_FILE)
    return {name: f"model-{n:05d}-of-{shard:05d}.safetensors" for name, n in shard_of.items()}


def hf_config(config: Mapping[str, Any], dtype: torch.dtype, head: Head) -> dict[str, Any]:
    """The source's `config.json` with this dtype and head."""
    changed = {**config, "dtype": str(dtype).removeprefix("torch.")}
    if "torch_dtype" in config:
        changed["torch_dtype"] = changed["dtype"]
    if head == "value":
        stem = config["architectures"][0].split("For")[0]
        changed["architectures"] = [f"{stem}ForSequenceClassification"]
        changed["id2label"], changed["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
        changed.pop("num_labels", None)
    return changed


def _tensors(model: nn.Module | Mapping[str, Tensor]) -> Iterable[Tensor]:
    return model.parameters() if isinstance(model, nn.Module) else model.values()


def _together(step: Callable[[], None]) -> None:
    """Run one step on every rank and wait for all; a rank's error is raised on every rank."""
    failure: Exception | None = None
    try:
        step()
    except Exception as error:
        failure = error
    failures: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for rank, failed in enumerate(failures):
        if failed is not None:
            failed.add_note(f"while saving, on rank {rank} of {len(failures)}")
            raise failed


def start_folder(out_dir: Path, partial: Path) -> None:
    """Make the folder `partial` that is to become `out_dir`. Raises FileExistsError when that exists."""
    if out_dir.exists():
        raise FileExistsError(f"{out_dir} exists already: save into a new folder")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write_shards(tensors: Iterator[tuple[str, Tensor]], files: Mapping[str, str], folder: Path) -> None:
    """Write each file when its last tensor has come; tensors come file by file."""
    shard: dict[str, Tensor] = {}
    try:
        for name, tensor in tensors:
            if shard and files[name] != files[next(iter(shard))]:
                _write(shard, files, folder)
            shard[name] = tensor.cpu()
        if shard:
            _write(shard, files, folder)
    finally:
        deque(tensors, maxlen=0)  # a writer that failed still takes part in the other ranks' gathers


def _write(shard: dict[str, Tensor], files: Mapping[str, str], folder: Path) -> None:
    save_file(shard, folder / files[next(iter(shard))], metadata={"format": "pt"})
    shard.clear()


def finish_folder(
    shape: ModelShape,
    head: Head,
    dtype: torch.dtype,
    files: Mapping[str, str],
    source: Path,
    partial: Path,
    out_dir: Path,
) -> None:
    """Check the weights in `partial`, add index, configuration and tokenizer, and rename it to `out_dir`.

    Raises CheckpointError naming the tensors that are missing or of another shape.
    """
    expected = {name: tensor.shape for name, tensor in hf_tensors(shape, head).items()}
    written = _written_shapes(partial)
    if missing := expected.keys() - written.keys():
        raise CheckpointError(f"{out_dir} was not saved: it lacks {listed(missing)}")
    if wrong := [f"{name} {written[name]}" for name in expected if written[name] != expected[name]]:
        raise CheckpointError(f"{out_dir} was not saved: wrong shapes of {listed(wrong)}")
    if len(set(files.values())) > 1:
        n_bytes = dtype.itemsize * sum(torch.Size(size).numel() for size in expected.values())
        index = {"metadata": {"total_size": n_bytes}, "weight_map": dict(files)}
        (partial / INDEX_FILE).write_text(json.dumps(index, indent=2))
    config = json.loads((source / "config.json").read_text())
    (partial / "config.json").write_text(json.dumps(hf_config(config, dtype, head), indent=2))
    _copy_tokenizer(source, partial)
    partial.rename(out_dir)


def copy_settings(source: Path, folder: Path) -> None:
    """Make `folder` with all of a Hugging Face folder but its weights."""
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    _copy_tokenizer(source, folder)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for file in {file for pattern in COPIED for file in source.glob(pattern) if file.is_file()}:
        shutil.copy(file, folder)


def _written_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that the folder's files hold, by their headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes
