"""A sharded checkpoint to a Hugging Face folder: one process, a tensor at a time, no process group."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from rolemesh.parallel.checkpoint_error import CheckpointError, listed
from rolemesh.parallel.checkpoint_metadata import check_metadata
from rolemesh.parallel.weights.checkpoint import Checkpoint
from rolemesh.parallel.weights.pieces import HfTensor
from rolemesh.parallel.weights.plan import Head, export_plan, hf_tensors, stage_plan
from rolemesh.parallel.weights.save import finish_folder, shard_files, start_folder
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def convert(
    folder: str | Path,
    source: str | Path,
    out_dir: str | Path,
    *,
    head: Head = "lm",
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = 5 * 10**9,
    base: str | Path | None = None,
) -> None:
    """Write the weights in `folder` (as `parallel.checkpoint` saves them) as the new folder `out_dir`.

    `source` has the model's `config.json` and its tokenizer, which go along. Where only adapters were trained
    `base` (`source` without it) has the weights that they are added to. Held in memory are one tensor in
    fp32 and its copy in `dtype`.

    Raises FileExistsError when `out_dir` exists, CheckpointError naming the tensors that are missing or of
    another shape.
    """
    folder, source, out_dir = Path(folder), Path(source), Path(out_dir)
    shape = ModelShape.from_config(json.loads((source / "config.json").read_text()))
    tensors = hf_tensors(shape, head)
    reader = _Reader(folder)
    adapters = _Adapters.of(folder, Path(base or source), shape, head)
    _check(folder, reader.read_metadata(), adapters.saved(tensors) if adapters else tensors)
    files = shard_files(export_plan(shape, Layout(), head), dtype.itemsize, max_shard_bytes)
    partial = out_dir.with_name(f".{out_dir.name}.partial")
    start_folder(out_dir, partial)
    try:
        for file in dict.fromkeys(files.values()):
            inside = [tensors[name] for name in files if files[name] == file]
            values = (adapters.merged(reader, x) if adapters else _read(reader, x) for x in inside)
            write_safetensors(partial / file, inside, dtype, values)
        finish_folder(shape, head, dtype, files, source, partial, out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_safetensors(
    path: Path, tensors: Sequence[HfTensor], dtype: torch.dtype, values: Iterable[Tensor]
) -> None:
    """Write a safetensors file of `tensors` in `dtype` from `values`, in the same order, one at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        kept = torch.float32 if tensor.fp32 else dtype
        end = at + torch.Size(tensor.shape).numel() * kept.itemsize
        header[tensor.name] = {
            "dtype": _DTYPES[kept],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor, value in zip(tensors, values, strict=True):
            stored = value.to(torch.float32 if tensor.fp32 else dtype).contiguous()
            file.write(stored.view(-1).view(torch.uint8).numpy().data)


@dataclass(frozen=True)
class _Adapters:
    """Adapters of a checkpoint and the weights that they belong to; `pairs`: (A, B) by the weight's name."""

    base: Checkpoint
    scale: float
    pairs: Mapping[str, tuple[HfTensor, HfTensor]]

    @classmethod
    def of(cls, folder: Path, base: Path, shape: ModelShape, head: Head) -> _Adapters | None:
        from rolemesh.parallel.lora import LoraConfig, adapter_plans, stem

        saved = dist_checkpointing.load_common_state_dict(str(folder)).get("lora")
        if saved is None:
            return None
        config = LoraConfig(**saved)
        plans = adapter_plans(stage_plan(shape, Layout(), 0, head), config, 1)
        pairs = {
            f"{stem(b.name).removesuffix('.lora_B')}.weight": (down.tensors[0], b)
            for down, up in zip(plans[0::2], plans[1::2], strict=True)
            for b in up.tensors
        }
        return cls(Checkpoint(base), config.scale, pairs)

    def saved(self, tensors: Mapping[str, HfTensor]) -> dict[str, HfTensor]:
        """What the checkpoint must hold: the adapters, and what `base` lacks."""
        own = {name: tensor for name, tensor in tensors.items() if name not in self.base.names}
        return own | {x.name: x for pair in self.pairs.values() for x in pair}

    def merged(self, reader: FileSystemReader, tensor: HfTensor) -> Tensor:
        """A weight with its adapter in it, or one that was trained whole."""
        if _key(tensor.name) in reader.read_metadata().state_dict_metadata:
            return _read(reader, tensor)
        weight = self.base.read(tensor.name, tuple(slice(None) for _ in tensor.shape)).float()
        if tensor.name in self.pairs:
            a, b = (_read(reader, x) for x in self.pairs[tensor.name])
            weight += self.scale * (b @ a)
        return weight


def _check(folder: Path, metadata: Metadata, tensors: Mapping[str, HfTensor]) -> None:
    held = {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    if missing := [name for name in tensors if _key(name) not in held]:
        raise CheckpointError(f"{folder} is incomplete: it lacks {listed(missing)}")
    wrong = [
        f"{name} {held[_key(name)]} (the configuration says {tensor.shape})"
        for name, tensor in tensors.items()
        if held[_key(name)] != tensor.shape
    ]
    if wrong:
        raise CheckpointError(f"{folder} is of another model: {listed(wrong)}")


def _read(reader: FileSystemReader, tensor: HfTensor) -> Tensor:
    value = torch.empty(tensor.shape)
    dcp.load({_key(tensor.name): value}, storage_reader=reader, no_dist=True)
    return value


def _key(name: str) -> str:
    return f"param.{name}"


class _Reader(FileSystemReader):
    """Reads the metadata once for all tensors."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            check_metadata(self.path)  # type: ignore[arg-type]  # a folder here
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata
