"""The `.metadata` of a sharded checkpoint is a pickle: it is looked through before torch loads it."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from rolemesh.parallel.checkpoint_error import CheckpointError

METADATA = ".metadata"
_CHECKPOINT = "torch.distributed.checkpoint"
_KNOWN = {
    f"{_CHECKPOINT}.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    f"{_CHECKPOINT}.planner": {
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    },
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip
_GONE = ("megatron.core.dist_checkpointing.strategies.resharding", "TensorReformulationMetadata")


class _Gone:
    """What megatron-core before 0.16 told of its optimizer's flat tensors; nothing here reads it."""


class _Looking(pickle.Unpickler):
    """Loads what a checkpoint's description is made of, and nothing that could do anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == _GONE:
            return _Gone
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name}")


def check_metadata(folder: str | Path) -> Any:
    """A checkpoint's description, torch's `Metadata`. Raises CheckpointError unless it is plain data; runs
    nothing that is in it.
    """
    path = Path(folder) / METADATA
    try:
        return _Looking(io.BytesIO(path.read_bytes())).load()
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is no description of a checkpoint: it would run or make {error}; it was not loaded"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # whatever damaged bytes make of the classes above
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
