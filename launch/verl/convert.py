"""A role of a verl checkpoint as a Hugging Face folder: checked first, then written a tensor at a time."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rolemesh.launch.verl.fsdp import FsdpTensors, is_fsdp
from rolemesh.launch.verl.megatron import MegatronTensors, is_megatron
from rolemesh.parallel.checkpoint_error import CheckpointError, listed
from rolemesh.parallel.weights.convert import write_safetensors
from rolemesh.parallel.weights.families import family_map
from rolemesh.parallel.weights.load import unknown_names
from rolemesh.parallel.weights.plan import HEAD_NAME, Head, export_plan, hf_tensors
from rolemesh.parallel.weights.save import finish_folder, shard_files, start_folder
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape

SETTINGS = "huggingface"
_STEP = re.compile(r"global_step_(\d+)")
_LATEST = "latest_checkpointed_iteration.txt"
_LEFT = {
    "optim_world_size_*": "optimizer state",
    "extra_state_world_size_*": "learning rate schedule and random states",
}
_HEAD_WEIGHT, _HEAD_BIAS = f"{HEAD_NAME}.weight", f"{HEAD_NAME}.bias"


class _Tensors(Protocol):
    """Whole tensors of a role, by Hugging Face name."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Their shapes."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Their types, as saved."""

    def read(self, name: str) -> Tensor:
        """One of them."""


def find_role(path: Path, role: str) -> Path | None:
    """The folder of `role` in what verl wrote: a role's folder itself, a `global_step_N`, or the folder of a
    run, whose newest step is taken. None for anything else.

    Raises CheckpointError for a step without the role.
    """
    if (path / _LATEST).is_file():
        path = path / f"global_step_{(path / _LATEST).read_text().strip()}"
    if (path / SETTINGS / "config.json").is_file():
        return path
    if is_fsdp(path) or is_megatron(path):
        raise CheckpointError(f"{path} lacks {SETTINGS}/config.json, which verl saves beside the weights")
    if not _STEP.fullmatch(path.resolve().name):
        return None
    if not (path / role / SETTINGS / "config.json").is_file():
        there = sorted(folder.parent.name for folder in path.glob(f"*/{SETTINGS}"))
        raise CheckpointError(f"{path / role} is no checkpoint of verl; {path} has {listed(there) or 'none'}")
    return path / role


def convert_verl(folder: Path, out: Path, *, drop_bias: bool = False) -> Iterator[str]:
    """Write the role in `folder` as the new Hugging Face folder `out`; yields lines about it.

    Numbers and dtype stay as they are. `drop_bias` leaves out the bias of a critic's head, which a critic
    here does not have. What is held in memory: see `FsdpTensors` and `MegatronTensors`.

    Raises FileExistsError when `out` exists, CheckpointError for what is damaged, incomplete, or cannot be
    written exactly; nothing is written then.
    """
    source = folder / SETTINGS
    shape = ModelShape.from_config(json.loads((source / "config.json").read_text()))
    tensors, head, trainer = _open(folder, shape)
    dtype = _check(folder, tensors, shape, head)
    with_head = "a value" if head == "value" else "an lm"
    yield f"{folder}: verl with {trainer}, {with_head} head, {str(dtype).removeprefix('torch.')}"
    yield from _without_bias(folder, tensors, drop_bias) if head == "value" else ()
    _write(tensors, shape, head, dtype, source, out)
    yield from _position(folder)
    yield f"Hugging Face folder: {out}"


def _open(folder: Path, shape: ModelShape) -> tuple[_Tensors, Head, str]:
    """What the folder's trainer has written. Raises CheckpointError for what is not read."""
    if (folder / "adapter_checkpoint").exists():
        raise CheckpointError(f"{folder}/adapter_checkpoint: adapters of Megatron are not merged")
    if is_fsdp(folder):
        either = hf_tensors(shape, "lm") | hf_tensors(shape, "value")
        expected = {name: tensor.shape for name, tensor in either.items()}
        tensors = FsdpTensors(folder, expected)
        return tensors, "value" if _HEAD_WEIGHT in tensors.shapes else "lm", "FSDP"
    if is_megatron(folder):
        found = MegatronTensors(folder, shape)
        return found, found.head, "Megatron"
    if any((folder / SETTINGS).glob("*.safetensors")):
        raise CheckpointError(f"{folder / SETTINGS} has the weights already: it is the path to give")
    raise CheckpointError(
        f"{folder} has neither model_world_size_*_rank_*.pt nor dist_ckpt/.metadata; other layouts of verl, "
        f"such as model/mp_rank_*, are not read. It has {listed(file.name for file in folder.iterdir())}"
    )


def _check(folder: Path, tensors: _Tensors, shape: ModelShape, head: Head) -> torch.dtype:
    """The weights' dtype. Raises CheckpointError unless these are the model's tensors, all of one dtype."""
    weights, expected = family_map(shape), hf_tensors(shape, head)
    lm_head, embedding = weights.lm_head.tensors[0].name, weights.embedding.tensors[0].name
    extra = {_HEAD_BIAS} if head == "value" else {lm_head} if shape.tied else set()
    if missing := expected.keys() - tensors.shapes.keys():
        raise CheckpointError(f"{folder} lacks {listed(missing)}")
    if unknown := unknown_names(tensors.shapes.keys() - expected.keys() - extra, weights):
        raise CheckpointError(f"{folder} has tensors that this model lacks: {listed(unknown)}")
    wrong = [
        f"{name} {tensors.shapes[name]} (the configuration says {tensor.shape})"
        for name, tensor in expected.items()
        if tensors.shapes[name] != tensor.shape
    ]
    if wrong:
        raise CheckpointError(f"{folder} has tensors of another shape: {listed(wrong)}")
    dtypes = {tensors.dtypes[name] for name, tensor in expected.items() if not tensor.fp32}
    if len(dtypes) > 1:
        raise CheckpointError(f"{folder} has weights of several dtypes: {listed(map(str, dtypes))}")
    twice = shape.tied and head == "lm" and lm_head in tensors.shapes
    if twice and not tensors.read(lm_head).equal(tensors.read(embedding)):
        raise CheckpointError(f"{folder}: the configuration ties {lm_head} to {embedding}; they differ")
    return dtypes.pop()


def _without_bias(folder: Path, tensors: _Tensors, drop: bool) -> Iterator[str]:
    """Raise CheckpointError for a head's bias that is not 0 unless it is to be dropped, which is told."""
    if _HEAD_BIAS not in tensors.shapes or not (bias := tensors.read(_HEAD_BIAS)).any():
        return
    if not drop:
        raise CheckpointError(
            f"{folder}: {_HEAD_BIAS} is {bias.tolist()}, and the head of a critic here has none. With "
            "--drop-bias it is left out: every value is then off by this much until training has made it up"
        )
    yield f"left out: {_HEAD_BIAS} = {bias.tolist()}; values are lower by this"


def _write(
    tensors: _Tensors, shape: ModelShape, head: Head, dtype: torch.dtype, source: Path, out: Path
) -> None:
    expected = hf_tensors(shape, head)
    files = shard_files(export_plan(shape, Layout(), head), dtype.itemsize, 5 * 10**9)
    partial = out.with_name(f".{out.name}.partial")
    start_folder(out, partial)
    try:
        for file in dict.fromkeys(files.values()):
            inside = [expected[name] for name in files if files[name] == file]
            write_safetensors(partial / file, inside, dtype, (tensors.read(x.name) for x in inside))
        finish_folder(shape, head, dtype, files, source, partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _position(folder: Path) -> Iterator[str]:
    """Where training was, and what of it a Hugging Face folder has no place for."""
    if step := _STEP.fullmatch(folder.resolve().parent.name):
        yield f"step {step[1]} of its run; a run here begins at its first step"
    megatron = ["optimizer state, learning rate schedule and random states"] if is_megatron(folder) else []
    left = megatron + [said for pattern, said in _LEFT.items() if any(folder.glob(pattern))]
    if (folder.parent / "data.pt").is_file():
        left.append("place in the data")
    if left:
        yield f"not taken over: {', '.join(dict.fromkeys(left))}"
