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
_HEAD, _HEAD_BIAS = "output_layer.weight", "output_layer.bias"


def is_megatron(folder: Path) -> bool:
    """Whether a role's folder has a sharded checkpoint of megatron-core."""
    return (folder / FOLDER / ".metadata").is_file()


@dataclass(frozen=True)
class _Place:
    """Where a parameter is: a saved tensor, and its index along the first dimensions (layer, expert)."""

    key: str
    index: tuple[int, ...]


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
        self._indices: dict[str, list[MetadataIndex]] = {}
        for index in self._data:
            self._indices.setdefault(index.fqn, []).append(index)
        self._check_files()
        size = self._saved[_HEAD].size if _HEAD in self._saved else None
        self.head: Head = "value" if size is not None and size[0] == 1 != shape.vocab else "lm"
        plans = stage_plan(shape, Layout(), 0, self.head)
        self._plans = {tensor.name: plan for plan in plans for tensor in plan.tensors}
        self._places = dict(self._find(plan) for plan in plans)
        whole = {tensor.name: tensor.shape for plan in plans for tensor in plan.tensors}
        self.shapes: dict[str, tuple[int, ...]] = dict(whole)
        self.dtypes = {name: self._dtype(plan) for name, plan in self._plans.items()}
        if _HEAD_BIAS in self._saved:
            self.shapes["score.bias"], self.dtypes["score.bias"] = (1,), self._of(_HEAD_BIAS).properties.dtype
        self._last: tuple[str, Tensor] | None = None

    def read(self, name: str) -> Tensor:
        """A whole tensor, in the dtype that it was saved in."""
        if name == "score.bias":
            return self._read(_Place(_HEAD_BIAS, ()))
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

    def _find(self, plan: ParameterPlan) -> tuple[str, _Place]:
        """Where a parameter is saved. Raises CheckpointError when it is not, or with another shape."""
        size = plan.cuts[0].shape
        tried = []
        for place in _places(plan.name):
            tried.append(place.key)
            if place.key not in self._saved:
                continue
            found = tuple(self._of(place.key).size)[len(place.index) :]
            padded = plan.name in ("embedding.word_embeddings.weight", _HEAD) and found[:1] > size[:1]
            if found == size or (padded and found[1:] == size[1:]):
                return plan.name, place
            raise CheckpointError(f"{self._folder}: {place.key} is {found}, the configuration says {size}")
        raise CheckpointError(
            f"{self._folder} lacks {plan.name}: it would be {' or '.join(dict.fromkeys(tried))}; it has "
            f"{listed(key for key in self._saved if not key.startswith('optimizer.'))}"
        )

    def _read(self, place: _Place) -> Tensor:
        """One layer's (and expert's) part of a saved tensor, from the pieces that make it."""
        of = self._of(place.key)
        n = len(place.index)
        made = torch.empty(tuple(of.size)[n:], dtype=of.properties.dtype)
        filled = 0
        for index in self._indices.get(place.key, ()):
            piece = self._chunk(index, place.index)
            if piece is not None:
                offset = tuple(index.offset or (0,) * len(of.size))[n:]
                part = tuple(slice(at, at + n) for at, n in zip(offset, piece.shape, strict=True))
                made[part].copy_(piece)
                filled += piece.numel()
        if filled != made.numel():
            raise CheckpointError(f"{self._folder}: parts of {place.key} {list(place.index)} are missing")
        return made

    def _chunk(self, index: MetadataIndex, wanted: tuple[int, ...]) -> Tensor | None:
        """A saved piece, if it has the wanted layer (and expert), without these dimensions."""
        size = self._size(index)
        offset = tuple(index.offset or (0,) * len(size))
        within = tuple(at - low for at, low in zip(wanted, offset, strict=False))
        if any(not 0 <= at < n for at, n in zip(within, size, strict=False)):
            return None
        info = self._data[index]
        path = self._folder / info.relative_path
        with path.open("rb") as file:
            file.seek(info.offset)
            data = io.BytesIO(file.read(info.length))
        try:
            tensor = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{path} is damaged at {info.offset}: {error}") from error
        if tuple(tensor.shape) != size:
            raise CheckpointError(f"{path} has {tuple(tensor.shape)} for {index.fqn}, not {size}")
        return tensor[within]  # type: ignore[no-any-return]

    def _size(self, index: MetadataIndex) -> tuple[int, ...]:
        for chunk in self._of(index.fqn).chunks:
            if index.offset is None or chunk.offsets == index.offset:
                return tuple(chunk.sizes)
        raise CheckpointError(f"{self._folder}: .metadata does not describe a part of {index.fqn}")

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


def _places(name: str) -> Iterator[_Place]:
    """Where megatron-core saves a parameter: layers stacked in one tensor, or (where they differ) each alone;
    norms under their own name or under that of the layer they are fused into.
    """
    layer = _LAYER.fullmatch(name)
    if layer is None:
        yield _Place(name, ())
        return
    n, inside = int(layer[1]), layer[2]
    expert = _EXPERT.fullmatch(inside)
    index: tuple[int, ...] = ()
    if expert:
        inside, index = f"mlp.experts.experts.{expert[2]}", (int(expert[1]),)
    for said in filter(None, (inside, _FUSED.get(inside))):
        yield _Place(f"decoder.layers.{said}", (n, *index))
        yield _Place(f"decoder.layers.{n}.{said}", index)
