"""Saving and taking up a run's state: the driver's part, which leads all roles' workers through it."""

from __future__ import annotations

import io
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rolemesh.engine.checkpoint.manifest import Manifest
from rolemesh.engine.checkpoint.store import RUN_ID, CheckpointStore
from rolemesh.engine.future import as_completed
from rolemesh.parallel.checkpoint import SaveProgress
from rolemesh.parallel.checkpoint_error import CheckpointError
from rolemesh.parallel.durable_files import FileRecord, read_record, sync_files, write_file
from rolemesh.parallel.weights.save import COPIED

STATE, RANDOM, PLAN, HF, AHEAD = "trainer.json", "random.pt", "plan.yaml", "hf", "ahead.pt"
Ahead = Mapping[Any, Mapping[str, Any]]
"""By step the samples that were generated before the steps in front of it were trained, or those that are
begun.
"""
_POLL_S = 0.2
_FAILED_IN_A_ROW = 3


@dataclass(frozen=True)
class TrainedRole:
    """A role whose state is saved. `path` is the Hugging Face folder whose configuration and tokenizer go
    along.
    """

    path: str
    head: str
    dtype: str


@dataclass
class _Save:
    """One save under way; `error` is set, or `path`, when it is over."""

    step: int
    partial: Path
    thread: threading.Thread | None = None
    path: Path | None = None
    error: str | None = None


@dataclass
class Checkpoints:
    """Saves of one run: `groups` are all its worker groups, `trained` those with an optimizer, `plan` its
    plan.

    The run goes on while a save's files are written. A save that fails is told (`tell`) and tried again after
    the next step; the third in a row raises. No wait is longer than `timeout_s`.
    """

    store: CheckpointStore
    groups: Mapping[str, Any]
    trained: Mapping[str, TrainedRole]
    plan: str
    timeout_s: float = 1800.0
    tell: Callable[[str], None] = print
    _save: _Save | None = None
    _failed: int = 0

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        score: float | None = None,
        ahead: Ahead = {},  # noqa: B006  # only read
    ) -> None:
        """Begin to save; the workers' state is copied when this returns, the files come later.

        `state` (JSON) is the trainer's own. Waits for the save before, if that still writes. Raises
        CheckpointError when saves fail again and again.
        """
        self.settle()
        save = _Save(step, self.store.path / f".step_{step}.partial")
        try:
            save.partial = self.store.begin(step)
            self._copy_shards(save.partial)
            states = {role: group.random_state() for role, group in self.groups.items()}
        except (OSError, CheckpointError) as error:
            save.error = f"{type(error).__name__}: {error}"
            self._save = save  # told by the next `poll`
            return
        content = {"step": step, "trainer": dict(state), "roles": self._roles()}
        save.thread = threading.Thread(
            target=self._complete,
            args=(save, content, states, score, ahead),
            name=f"save of step {step}",
            daemon=True,
        )
        self._save = save
        save.thread.start()

    def poll(self) -> bool:
        """Tell how the last save ended, if it has; whether it failed, so that the next step should save
        again.

        Raises CheckpointError for the third failure in a row.
        """
        save = self._save
        if save is None or (save.path is None and save.error is None):
            return False
        self._save = None
        if save.error is None:
            self._failed = 0
            self.tell(f"checkpoint of step {save.step}: {save.path}")
            return False
        self._failed += 1
        self.store.discard(save.partial)
        message = f"checkpoint of step {save.step} was not saved: {save.error}"
        if self._failed >= _FAILED_IN_A_ROW:
            raise CheckpointError(f"{message} ({self._failed} saves in a row have failed)")
        self.tell(f"warning: {message}; the run goes on and saves again after the next step")
        return True

    def settle(self) -> bool:
        """Wait until no save is under way; returns whether the last one failed. Raises CheckpointError."""
        save = self._save
        if save is not None and save.thread is not None:
            save.thread.join(self.timeout_s)
            if save.thread.is_alive():
                raise CheckpointError(
                    f"the save of step {save.step} into {save.partial} takes more than {self.timeout_s:g} s: "
                    "the disk is too slow, or hangs"
                )
        return self.poll()

    def abandon(self) -> None:
        """Let a save that is under way end as it may, its workers being gone; what it leaves is removed, or
        is whole. Raises CheckpointError where it still writes after `timeout_s`.
        """
        save, self._save = self._save, None
        if save is None:
            return
        if save.thread is not None:
            save.thread.join(self.timeout_s)
            if save.thread.is_alive():
                raise CheckpointError(
                    f"the save of step {save.step} does not end within {self.timeout_s:g} s"
                )
        if save.path is None:
            self.store.discard(save.partial)

    def end_step(
        self,
        step: int,
        state: Mapping[str, Any],
        score: float | None = None,
        *,
        every: int,
        last: bool,
        stop: bool,
        ahead: Callable[[], Ahead] = dict,
    ) -> float | None:
        """Save `step`, which is done, where that is due: each `every` steps (0: never) and after the last,
        again after a failure, and before a `stop`. Where the run ends, wait for the files. `ahead` is asked
        for where there is a save.

        Returns the seconds that training waited for a save, None where there was none. Raises CheckpointError
        for a save that failed at the end, or again and again.
        """
        start = time.perf_counter()
        failed = self.poll()
        due = failed or stop or (every > 0 and (last or step % every == 0))
        if due:
            self.save(step, state, score, ahead())
        seconds = time.perf_counter() - start if due else None
        if (last or stop) and self.settle():
            raise CheckpointError(f"the last checkpoint, of step {step}, was not saved")
        return seconds

    def load(self, path: Path) -> dict[str, Any]:
        """Bring the workers to the state in the checkpoint `path`, which is verified; returns the trainer's,
        and as `ahead` the samples that were there already, if any.

        Raises CheckpointError where it lacks a role that this run trains.
        """
        content = read_state(path)
        if missing := sorted(self.trained.keys() - content["roles"].keys()):
            raise CheckpointError(f"{path} has no {', '.join(missing)}: it is of a run that trained others")
        loading = [
            self.groups[role].load_checkpoint(str(path / role), blocking=False) for role in self.trained
        ]
        for future in as_completed(loading, timeout=max(future.timeout_s for future in loading)):
            future.get()
        states = torch.load(path / RANDOM, weights_only=True)
        for role, group in self.groups.items():
            if len(states.get(role, ())) == group.world_size:
                group.set_random_state(states[role])
            else:
                self.tell(f"{role}: other ranks than in {path.name}, whose random states are left out")
        state = {"step": content["step"], **content["trainer"]}
        if (path / AHEAD).exists():
            state["ahead"] = torch.load(path / AHEAD, weights_only=True)
        return state

    def _copy_shards(self, partial: Path) -> None:
        for role in self.trained:
            (partial / role).mkdir()
        copying = [self.groups[role].begin_save(str(partial / role), blocking=False) for role in self.trained]
        for future in as_completed(copying, timeout=max(future.timeout_s for future in copying)):
            future.get()

    def _roles(self) -> dict[str, dict[str, str]]:
        return {
            role: {
                "path": spec.path,
                "head": spec.head,
                "dtype": spec.dtype,
                "layout": str(self.groups[role].layout),
            }
            for role, spec in self.trained.items()
        }

    def _complete(
        self, save: _Save, content: Mapping[str, Any], states: Any, score: float | None, ahead: Ahead
    ) -> None:
        """On the save's own thread: wait for the ranks' files, write the rest, make it a checkpoint."""
        try:
            files = self._shard_files(save)
            files |= self._own_files(save.partial, content, states, ahead)
            save.path = self.store.commit(save.partial, Manifest(save.step, self.store.run_id, score, files))
        except BaseException as error:
            self._cancel()
            save.error = f"{type(error).__name__}: {error}"

    def _shard_files(self, save: _Save) -> dict[str, FileRecord]:
        deadline = time.monotonic() + self.timeout_s
        progress: dict[str, dict[int, SaveProgress]] = {role: {} for role in self.trained}
        while late := {
            role: [rank for rank in range(self.groups[role].world_size) if rank not in progress[role]]
            for role in self.trained
            if len(progress[role]) < self.groups[role].world_size
        }:
            for role, ranks in late.items():
                answers = self.groups[role].ask("save_progress", ranks=ranks, timeout_s=self.timeout_s)
                for rank, answer in zip(ranks, answers, strict=True):
                    if answer.error is not None:
                        raise CheckpointError(f"{role} rank {rank}: {answer.error}")
                    if answer.done:
                        progress[role][rank] = answer
            if time.monotonic() > deadline:
                raise CheckpointError(f"not written within {self.timeout_s:g} s by ranks {late}")
            time.sleep(_POLL_S)
        files: dict[str, FileRecord] = {}
        for role, of_ranks in progress.items():
            results = [of_ranks[rank].results for rank in sorted(of_ranks)]
            (last,) = self.groups[role].ask("finish_save", results, ranks=[0], timeout_s=self.timeout_s)
            for written in (last, *(of_rank.files or {} for of_rank in of_ranks.values())):
                files |= {f"{role}/{name}": record for name, record in written.items()}
        return files

    def _own_files(
        self, partial: Path, content: Mapping[str, Any], states: Any, ahead: Ahead
    ) -> dict[str, FileRecord]:
        files = {
            STATE: write_file(partial / STATE, (json.dumps(content, indent=1) + "\n").encode()),
            RANDOM: write_file(partial / RANDOM, _saved(states)),
            PLAN: write_file(partial / PLAN, self.plan.encode()),
            RUN_ID: read_record(partial / RUN_ID),
        }
        if ahead:
            files[AHEAD] = write_file(partial / AHEAD, _saved(ahead))
        for role, spec in self.trained.items():
            folder = partial / HF / role
            folder.mkdir(parents=True)
            for file in carried_files(Path(spec.path)):
                shutil.copyfile(file, folder / file.name)
                sync_files([folder / file.name])
                files[f"{HF}/{role}/{file.name}"] = read_record(folder / file.name)
        return files

    def _cancel(self) -> None:
        """Have every rank stop; one that does not answer is left to the run's own watch."""
        for role in self.trained:
            try:
                self.groups[role].ask("cancel_save", timeout_s=self.timeout_s)
            except RuntimeError as error:
                self.tell(f"warning: {error}")


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def read_state(path: Path) -> dict[str, Any]:
    """What `trainer.json` of a verified checkpoint holds: step, trainer, roles."""
    content: dict[str, Any] = json.loads((path / STATE).read_text())
    return content


def carried_files(source: Path) -> Sequence[Path]:
    """What goes along with a model's weights: configuration, tokenizer, generation settings."""
    found = {file for pattern in ("config.json", *COPIED) for file in source.glob(pattern) if file.is_file()}
    return sorted(found)
