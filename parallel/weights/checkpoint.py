"""A Hugging Face folder of safetensors, read slice by slice."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rolemesh.parallel.checkpoint_error import CheckpointError, listed

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class Checkpoint:
    """Tensors of the folder `path` by name; a context manager, as it holds files open.

    Raises CheckpointError when the folder has no safetensors or its index names a file that is not there.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = _tensor_files(self.path)
        self._open: dict[Path, Any] = {}
        self._exits = ExitStack()

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from its file's header."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, source: tuple[slice, ...]) -> Tensor:
        """A part of a tensor, in the file's dtype; only the part is read."""
        return self._slice(name)[source]

    def _slice(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = self._exits.enter_context(safe_open(file, framework="pt"))
        try:
            return self._open[file].get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{INDEX_FILE} says that {file} holds {name}: {error}") from error

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()
        self._exits.close()


def _tensor_files(path: Path) -> dict[str, Path]:
    """File of every tensor in the folder."""
    index = path / INDEX_FILE
    if index.is_file():
        files = {name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        if lost := {file.name for file in files.values() if not file.is_file()}:
            raise CheckpointError(f"{index} names files that are not there: {listed(lost)}")
        return files
    single = path / SINGLE_FILE
    if not single.is_file():
        raise CheckpointError(
            f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}: weights must be in safetensors form"
        )
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)
