"""A trained role's side of a checkpoint: a copy of its shard, written while it goes on, and its way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.worker import Worker
from rolemesh.parallel.checkpoint import SaveProgress, ShardSave, load_shards
from rolemesh.parallel.durable_files import FileRecord
from rolemesh.parallel.model import ParallelModel


class CheckpointedWorker(Worker):
    """One rank of a role whose `model` has an optimizer. The plain methods are for `RayWorkerGroup.ask`."""

    model: ParallelModel
    _save: ShardSave | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_save(self, folder: str) -> None:
        """Copy this rank's shard to host memory and start to write it into `folder`; the save before ends."""
        if self._save is not None:
            self._save.cancel()
        self._save = ShardSave(self.model, folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Take up what `begin_save` wrote, under any layout."""
        load_shards(self.model, folder)

    def save_progress(self) -> SaveProgress:
        """How far this rank has come with its save."""
        return self._under_way.progress()

    def finish_save(self, results: Sequence[Sequence[Any]]) -> Mapping[str, FileRecord]:
        """On rank 0: write what goes with all ranks' files; the files written."""
        return self._under_way.finish(results)

    def cancel_save(self) -> None:
        """Stop writing: the save has failed on another rank."""
        if self._save is not None:
            self._save.cancel()

    @property
    def _under_way(self) -> ShardSave:
        if self._save is None:
            raise RuntimeError("no save was begun here")
        return self._save
