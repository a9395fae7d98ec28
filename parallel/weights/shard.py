"""A Hugging Face folder to a sharded checkpoint: the other way of `convert`, also one tensor at a time."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from rolemesh.parallel.checkpoint_error import CheckpointError, listed
from rolemesh.parallel.weights.checkpoint import Checkpoint
from rolemesh.parallel.weights.plan import Head, hf_tensors
from rolemesh.parallel.weights.save import copy_settings, start_folder
from rolemesh.placement.model import ModelShape

STATES = ("param", "exp_avg", "exp_avg_sq")
HF = "hf"
"""The sub-folder with the model's configuration and tokenizer."""


def shard(source: str | Path, out_dir: str | Path, *, head: Head = "lm") -> None:
    """Write the weights of `source` as a trained model's state before its first update: moments are zero.

    Any layout loads it, as what `parallel.checkpoint` saves. Held in memory is one tensor in fp32.

    Raises FileExistsError when `out_dir` exists, CheckpointError naming tensors that are missing or of
    another shape.
    """
    source, out_dir = Path(source), Path(out_dir)
    shape = ModelShape.from_config(json.loads((source / "config.json").read_text()))
    tensors = hf_tensors(shape, head)
    partial = out_dir.with_name(f".{out_dir.name}.partial")
    with Checkpoint(source) as checkpoint:
        if missing := tensors.keys() - checkpoint.names:
            raise CheckpointError(f"{source} lacks {listed(missing)}")
        wrong = [name for name, tensor in tensors.items() if checkpoint.shape(name) != tensor.shape]
        if wrong:
            raise CheckpointError(f"{source} has tensors of another shape: {listed(wrong)}")
        start_folder(out_dir, partial)
        try:
            state = {
                f"{kind}.{name}": torch.empty(tensor.shape, device="meta")
                for name, tensor in tensors.items()
                for kind in (STATES[:1] if tensor.fp32 else STATES)
            }
            writer = FileSystemWriter(partial)
            dcp.save(state, storage_writer=writer, planner=_Reading(checkpoint), no_dist=True)
            described = {"head": head, **{name: str(value) for name, value in asdict(shape).items()}}
            torch.save({"step_count": 0, "shape": described, "lora": None}, partial / COMMON_STATE_FNAME)
            save_config(CheckpointingConfig("torch_dist", 1), str(partial))
            copy_settings(source, partial / HF)
            partial.rename(out_dir)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


class _Reading(DefaultSavePlanner):
    """Brings a tensor when it is about to be written."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._checkpoint = checkpoint

    def lookup_object(self, index: MetadataIndex) -> Any:
        kind, _, name = index.fqn.partition(".")
        sizes = self._checkpoint.shape(name)
        if kind != "param":
            return torch.zeros(sizes)
        value: Tensor = self._checkpoint.read(name, tuple(slice(None) for _ in sizes))
        return value.float()
