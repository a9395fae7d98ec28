"""A role that verl trained with megatron-core: `dist_ckpt/`, as its dist_checkpointing wrote it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from rolemesh.parallel.checkpoint_error import CheckpointError, listed
from rolemesh.parallel.checkpoint_metadata import check_metadata
from rolemesh.parallel.weights.pieces import Buffer
from rolemesh.parallel.weights.plan import Head, ParameterPlan, stage_plan
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape

FOLDER = "dist_ckpt"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.*)")
_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}  # names of norms that Transformer Engine fuses into the layer after them
_OF_THE_MODEL = ("embedding.", "decoder.", "output_layer.")
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_HEAD_BIAS = "output_layer.bias"


def is_megatron(folder: Path) -> bool:
    """Whether a role's folder has a sharded checkpoint of megatron-core."""
    return (folder / FOLDER / ".metadata").is_file()


@dataclass(frozen=True)
class _Place:
    """Where a parameter is: a saved tensor, and its index along the first dimensions (layer, expert), which
    are of these sizes.
    """

    key: str
    index: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


class MegatronTensors:
    """The tensors of a role by Hugging Face name. Held in memory are the saved tensors' descriptions, and
    while a tensor is read, the parameter of one layer that it is a part of: query, key and value, say.

    Raises CheckpointError for files that are missing or truncated, and names parameters that are not saved in
    a way that is known here.
    """

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        self._folder = folder / FOLDER
        metadata: Metadata = check_metadata(self._folder)
        saved = metadata.state_dict_metadata
        self._saved = {k: x for k, x in saved.items() if isinstance(x, TensorStorageMetadata)}
        self._data: Mapping[MetadataIndex, Any] = metadata.storage_data
        self._chunks: dict[str, list[MetadataIndex]] = {}
        for index in self._data:
            self._chunks.setdefault(index.fqn, []).append(index)
        self._sizes = {
            (key, tuple(chunk.offsets)): tuple(chunk.sizes)
            for key, tensor in self._saved.items()
            for chunk in tensor.chunks
        }
        self._within: dict[tuple[str, int], dict[tuple[int, ...], list[MetadataIndex]]] = {}
        self._check_files()
        size = self._saved[_HEAD].size if _HEAD in self._saved else None
        self.head: Head = "value" if size is not None and size[0] == 1 != shape.vocab else "lm"
        plans = stage_plan(shape, Layout(), 0, self.head)
        self._plans = {tensor.name: plan for plan in plans for tensor in plan.tensors}
        self._places = {plan.name: self._find(plan, shape) for plan in plans}
        used = {place.key for place in self._places.values()} | {_HEAD_BIAS}
        if unknown := {key for key in self._saved.keys() - used if key.startswith(_OF_THE_MODEL)}:
            raise CheckpointError(f"{self._folder} has parameters that this model lacks: {listed(unknown)}")
        whole = {tensor.name: tensor.shape for plan in plans for tensor in plan.tensors}
        self.shapes: dict[str, tuple[int, ...]] = dict(whole)
        self.dtypes = {name: self._dtype(plan) for name, plan in self._plans.items()}
        if _HEAD_BIAS in self._saved:
            self.shapes["score.bias"], self.dtypes["score.bias"] = (1,), self._of(_HEAD_BIAS).properties.dtype
        self._last: tuple[str, Tensor] | None = None

    def read(self, name: str) -> Tensor:
        """A whole tensor, in the dtype that it was saved in."""
        if name == "score.bias":
            return self._read(_Place(_HEAD_BIAS))
        plan = self._plans[name]
        if self._last is None or self._last[0] != plan.name:  # its other tensors are asked for next
            self._last = None
            self._last = (plan.name, self._read(self._places[plan.name]))
        parameter = self._last[1]
        made = torch.empty(self.shapes[name], dtype=parameter.dtype)
        for piece in plan.cuts[0].pieces:
            if piece.tensor == name:
                made[piece.source].copy_(parameter[piece.target])
        return made

    def _find(self, plan: ParameterPlan, shape: ModelShape) -> _Place:
        """Where a parameter is saved. Raises CheckpointError when it is not, or with another shape."""
        size, tried = plan.cuts[0].shape, []
        for place in _places(plan.name, shape):
            tried.append(place.key)
            if place.key not in self._saved:
                continue
            found, wanted = tuple(self._of(place.key).size), (*place.sizes, *size)
            padded = plan.name in (_EMBEDDING, _HEAD) and found[:1] > wanted[:1]
            if found == wanted or (padded and found[1:] == wanted[1:]):
                return place
            raise CheckpointError(f"{self._folder}: {place.key} is {found}, the configuration says {wanted}")
        raise CheckpointError(
            f"{self._folder} lacks {plan.name}: it would be {' or '.join(dict.fromkeys(tried))}; it has "
            f"{listed(key for key in self._saved if key.startswith(_OF_THE_MODEL))}"
        )

    def _read(self, place: _Place) -> Tensor:
        """One layer's (and expert's) part of a saved tensor, from the pieces that make it."""
        of, n = self._of(place.key), len(place.index)
        made = torch.empty(tuple(of.size)[n:], dtype=of.properties.dtype)
        filled = 0
        for index in self._pieces(place.key, n).get(place.index, ()):
            piece = self._piece(index)[(0,) * n]
            part = (slice(at, at + size) for at, size in zip(_offset(index)[n:], piece.shape, strict=False))
            made[tuple(part)].copy_(piece)
            filled += piece.numel()
        if filled != made.numel():
            raise CheckpointError(f"{self._folder}: parts of {place.key} {list(place.index)} are missing")
        return made

    def _pieces(self, key: str, n: int) -> dict[tuple[int, ...], list[MetadataIndex]]:
        """The saved pieces of a tensor by their place along the first `n` dimensions, where each is 1."""
        if (key, n) not in self._within:
            found: dict[tuple[int, ...], list[MetadataIndex]] = {}
            for index in self._chunks.get(key, ()):
                if self._size(index)[:n] != (1,) * n:
                    raise CheckpointError(f"{self._folder}: {key} has several layers or experts in one piece")
                found.setdefault(_offset(index)[:n], []).append(index)
            self._within[key, n] = found
        return self._within[key, n]

    def _piece(self, index: MetadataIndex) -> Tensor:
        info = self._data[index]
        path = self._folder / info.relative_path
        with path.open("rb") as file:
            file.seek(info.offset)
            data = io.BytesIO(file.read(info.length))
        try:
            tensor: Tensor = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{path} is damaged at {info.offset}: {error}") from error
        if tuple(tensor.shape) != self._size(index):
            raise CheckpointError(
                f"{path} has {tuple(tensor.shape)} for {index.fqn}, not {self._size(index)}"
            )
        return tensor

    def _size(self, index: MetadataIndex) -> tuple[int, ...]:
        whole = tuple(self._of(index.fqn).size)
        return whole if index.offset is None else self._sizes[index.fqn, _offset(index)]

    def _dtype(self, plan: ParameterPlan) -> torch.dtype:
        found = self._of(self._places[plan.name].key).properties.dtype
        return torch.float32 if isinstance(plan.rule, Buffer) else found

    def _of(self, key: str) -> TensorStorageMetadata:
        return self._saved[key]

    def _check_files(self) -> None:
        """Raise CheckpointError naming files that are missing, or shorter than what they hold."""
        ends: dict[str, int] = {}
        for info in self._data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        if missing := [name for name in ends if not (self._folder / name).is_file()]:
            raise CheckpointError(f"{self._folder} lacks {listed(missing)}")
        if cut := [name for name, end in ends.items() if (self._folder / name).stat().st_size < end]:
            raise CheckpointError(f"{self._folder} has truncated files: {listed(cut)}")


def _offset(index: MetadataIndex) -> tuple[int, ...]:
    return tuple(index.offset or ())


def _places(name: str, shape: ModelShape) -> Iterator[_Place]:
    """Where megatron-core saves a parameter: layers stacked in one tensor, or (where they differ) each alone;
    norms under their own name or under that of the layer they are fused into.
    """
    layer = _LAYER.fullmatch(name)
    if layer is None:
        yield _Place(name)
        return
    n, inside = int(layer[1]), layer[2]
    index: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    if expert := _EXPERT.fullmatch(inside):
        inside, index = f"mlp.experts.experts.{expert[2]}", (int(expert[1]),)
        sizes = (shape.moe.n,) if shape.moe else ()
    for said in filter(None, (inside, _FUSED.get(inside))):
        yield _Place(f"decoder.layers.{said}", (n, *index), (shape.n_layers, *sizes))
        yield _Place(f"decoder.layers.{n}.{said}", index, sizes)
