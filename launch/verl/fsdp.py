"""A role that verl trained with FSDP: each rank's file has its parts of every tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from rolemesh.launch.verl.pickled import Part, RankFile, Stored
from rolemesh.parallel.checkpoint_error import CheckpointError, listed

T = TypeVar("T")
_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_ADAPTER = re.compile(r"(.*)\.lora_([AB])\.[^.]+\.weight")


def is_fsdp(folder: Path) -> bool:
    """Whether a role's folder has files of FSDP ranks."""
    return any(_FILE.fullmatch(file.name) for file in folder.glob("model_world_size_*.pt"))


class FsdpTensors:
    """The tensors of a role by Hugging Face name. Held in memory are the files' tables of contents, and while
    a tensor is read, that tensor and its parts.

    `expected` has the model's shapes by name: a plain tensor that is whole on every rank is the same there,
    others are parts along the first dimension.

    Raises CheckpointError where a rank's file is missing, of another world size, or damaged, and where the
    parts of a tensor do not make it whole.
    """

    def __init__(self, folder: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
        self._expected = expected
        self._files = [RankFile(path) for path in _rank_files(folder)]
        first = self._files[0].tensors
        for file in self._files[1:]:
            if differs := file.tensors.keys() ^ first.keys():
                raise CheckpointError(f"{file.path} and {self._files[0].path} differ in {listed(differs)}")
        self._parts = {name: self._in_order(name) for name in first}
        self.shapes = {name: self._shape(name, parts) for name, parts in self._parts.items()}
        self.dtypes = {name: parts[0][1].local.dtype for name, parts in self._parts.items()}
        self._lora = _Adapters(folder, self.shapes) if any(map(_ADAPTER.fullmatch, first)) else None
        if self._lora:
            self.shapes, self.dtypes = self._lora.renamed(self.shapes), self._lora.renamed(self.dtypes)

    def read(self, name: str) -> Tensor:
        """A whole tensor, in the dtype that it was saved in."""
        if self._lora is None:
            return self._whole(name)
        weight = self._whole(self._lora.stored[name])
        if name not in self._lora.pairs:
            return weight
        a, b = (self._whole(stored).float() for stored in self._lora.pairs[name])
        return (weight.float() + self._lora.scale * (b @ a)).to(weight.dtype)

    def _whole(self, name: str) -> Tensor:
        parts = self._parts[name]
        tensors = [file.read(part.local) for file, part in parts]
        return tensors[0] if parts[0][1].dim is None else torch.cat(tensors, parts[0][1].dim)

    def _in_order(self, name: str) -> list[tuple[RankFile, Part]]:
        """The parts that make a tensor, first to last; of several ranks' equal ones, the first rank's."""
        found: dict[int, tuple[RankFile, Part]] = {}
        for rank, file in enumerate(self._files):
            value = file.tensors[name]
            if isinstance(value, Stored):
                whole = len(self._files) == 1 or self._expected.get(_plain(name)) == value.shape
                part = Part(value, (), None, 0) if whole else Part(value, (), 0, rank)
            else:
                part = value
            found.setdefault(part.index, (file, part))
        kinds = {(part.dim, part.shape, part.local.dtype) for _, part in found.values()}
        if len(kinds) > 1:
            raise CheckpointError(f"the ranks' files describe {name} differently: {kinds}")
        if sorted(found) != list(range(len(found))):
            raise CheckpointError(f"parts of {name} are missing: there are {sorted(found)}")
        return [found[index] for index in sorted(found)]

    def _shape(self, name: str, parts: list[tuple[RankFile, Part]]) -> tuple[int, ...]:
        """A tensor's shape, which its parts must make."""
        first, dim = parts[0][1], parts[0][1].dim
        if dim is None:
            made = first.local.shape
        else:
            rows = sum(part.local.shape[dim] for _, part in parts)
            made = (*first.local.shape[:dim], rows, *first.local.shape[dim + 1 :])
        if first.shape and made != first.shape:
            raise CheckpointError(f"the parts of {name} make {made}, not {first.shape}")
        return made


class _Adapters:
    """LoRA's matrices beside the weights that they are added to: plain names, and the scale."""

    def __init__(self, folder: Path, stored: Mapping[str, object]) -> None:
        file = folder / "lora_adapter" / "adapter_config.json"
        if not file.is_file():
            raise CheckpointError(f"{folder} has LoRA adapters; {file}, which says their alpha, is not there")
        config = json.loads(file.read_text())
        if config.get("use_dora") or config.get("rank_pattern") or config.get("alpha_pattern"):
            raise CheckpointError(f"{file}: DoRA and patterns of ranks or alphas are not merged")
        rank = config["r"]
        self.scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
        matched = {name: match for name in stored if (match := _ADAPTER.fullmatch(name))}
        sides: dict[str, dict[str, str]] = {}
        for name, match in matched.items():
            sides.setdefault(f"{_plain(match[1])}.weight", {})[match[2]] = name
        self.stored = {_plain(name): name for name in stored if name not in matched}
        if odd := [name for name, pair in sides.items() if len(pair) < 2 or name not in self.stored]:
            raise CheckpointError(f"{folder} has half an adapter, or one without a weight: {listed(odd)}")
        self.pairs = {name: (pair["A"], pair["B"]) for name, pair in sides.items()}

    def renamed(self, of: Mapping[str, T]) -> dict[str, T]:
        """Something known of each stored tensor, by plain name."""
        return {plain: of[name] for plain, name in self.stored.items()}


def _plain(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _rank_files(folder: Path) -> list[Path]:
    """Every rank's file, in order. Raises CheckpointError naming those that are not there."""
    matches = [match for file in folder.iterdir() if (match := _FILE.fullmatch(file.name))]
    sizes = {int(match[1]) for match in matches}
    if len(sizes) > 1:
        raise CheckpointError(f"{folder} has files of worlds of {listed(map(str, sizes))} ranks: keep one's")
    (size,) = sizes
    config = folder / "fsdp_config.json"
    if config.is_file() and (told := json.loads(config.read_text()).get("world_size", size)) != size:
        raise CheckpointError(f"{config} says {told} ranks, the files are of {size}")
    paths = [folder / f"model_world_size_{size}_rank_{rank}.pt" for rank in range(size)]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise CheckpointError(f"{folder} lacks {listed(missing)}")
    return paths
