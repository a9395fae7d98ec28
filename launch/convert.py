"""`rolemesh convert`: a trained role of a checkpoint, ours or verl's, as a Hugging Face folder, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from rolemesh.engine.checkpoint.manifest import MANIFEST, Manifest
from rolemesh.engine.checkpoint.saver import HF, read_state
from rolemesh.engine.checkpoint.store import FOLDER, newest_good
from rolemesh.launch.verl import convert_verl, find_role
from rolemesh.parallel.weights import CheckpointError, Head, convert
from rolemesh.parallel.weights.shard import HF as SETTINGS
from rolemesh.parallel.weights.shard import shard
from rolemesh.placement.model import ModelShape


def convert_checkpoint(
    checkpoint: Path, out: Path, role: str = "actor", *, drop_bias: bool = False
) -> Iterator[str]:
    """Write `role` of a checkpoint into the new folder `out`; yields lines about it, first which one it is.

    `checkpoint` is a checkpoint, or a run folder, whose newest good one is taken. Every file is verified
    first. What verl has written is taken too, with `drop_bias` without the bias of a critic's head. A Hugging
    Face folder goes the other way: `out` is then its sharded form, which in turn goes back.

    Raises CheckpointError for one that is damaged, not finished, or without the role.
    """
    path = checkpoint
    if (of_verl := find_role(path, role)) is not None:
        yield from convert_verl(of_verl, out, drop_bias=drop_bias)
        return
    if (path / "config.json").is_file():
        head = _head_of(path)
        yield f"{path}: a Hugging Face folder, with {'a value' if head == 'value' else 'an lm'} head"
        shard(path, out, head=head)
        yield f"sharded checkpoint, before any update: {out}"
        return
    if (path / SETTINGS / "config.json").is_file():  # a run's checkpoint has a folder per role there
        source = path / SETTINGS
        dtype = json.loads((source / "config.json").read_text()).get("dtype", "float32")
        yield f"{path}: a sharded checkpoint, {dtype}"
        convert(path, source, out, head=_head_of(source), dtype=getattr(torch, dtype))
        yield f"Hugging Face folder: {out}"
        return
    if not (path / MANIFEST).exists() and (path / FOLDER).is_dir():
        found = newest_good(path / FOLDER)
        yield from (f"skipped {reason}" for reason in found.skipped)
        if found.path is None:
            raise CheckpointError(f"{path / FOLDER} has no good checkpoint")
        path = found.path
    else:
        Manifest.read(path).check(path)
    state = read_state(path)
    if role not in state["roles"]:
        raise CheckpointError(f"{path} has no role {role}; it has {', '.join(sorted(state['roles']))}")
    saved = state["roles"][role]
    yield f"{role} after step {state['step']}, {saved['dtype']}: {path}"
    dtype = getattr(torch, saved["dtype"])
    convert(path / role, path / HF / role, out, head=saved["head"], dtype=dtype, base=saved["path"])
    yield f"Hugging Face folder: {out}"


def _head_of(folder: Path) -> Head:
    config = json.loads((folder / "config.json").read_text())
    return "lm" if ModelShape.from_config(config).n_labels is None else "value"
