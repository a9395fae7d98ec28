"""Saves of a real model that are killed, run out of space or hang; processes of their own, real files."""

import itertools
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from gloo import run_ranks
from local_group import LocalGroup
from tiny import tiny_checkpoint
from worker_runs import batch, worker

from rolemesh.engine.checkpoint.manifest import Manifest
from rolemesh.engine.checkpoint.saver import Checkpoints, TrainedRole
from rolemesh.engine.checkpoint.store import CheckpointStore, newest_good
from rolemesh.engine.workers.actor import ActorWorker, PolicyLoss
from rolemesh.engine.workers.megatron import RoleSpec
from rolemesh.launch.checkpoints import read_checkpoint
from rolemesh.launch.preflight import STATE_BYTES
from rolemesh.parallel.checkpoint import STATES
from rolemesh.parallel.checkpoint_error import CheckpointError
from rolemesh.parallel.durable_files import HashedFile
from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
MOMENTS = 10
N_TENSORS = 60  # of the tiny policy, and boxes that they are cut into
WRITES = 400  # of a shard's thousands, one in so many counts


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("policy")))


def actor(path: str) -> ActorWorker:
    spec = RoleSpec(path, "lm", optim=OptimConfig(lr=1e-3))
    return worker(ActorWorker, 0, Layout(), spec, PolicyLoss())


def checkpoints(made: ActorWorker, folder: Path, said: list[str] | None = None, **keep: int) -> Checkpoints:
    return Checkpoints(
        CheckpointStore(folder, **keep),
        {"actor": LocalGroup(made)},
        {"actor": TrainedRole(made.spec.path, "lm", "float32")},
        plan="pools: {}\n",
        timeout_s=60.0,
        tell=(said if said is not None else []).append,
    )


def log_probs(made: ActorWorker) -> torch.Tensor:
    return made.compute_log_prob(batch()).batch["old_log_probs"]


def each_moment(folder: Path, do) -> None:
    """Call `do` before each file or folder in `folder` is made, renamed or removed, and within shards."""
    write = HashedFile.write

    def watch(event: str, args: tuple) -> None:
        changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir")
        if event == "open" and isinstance(args[2], int):
            changes = bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if changes and str(args[0]).startswith(str(folder)):
            do()

    n_writes = itertools.count(1)

    def counted(self, data):
        if next(n_writes) % WRITES == 0:
            do()
        return write(self, data)

    HashedFile.write = counted
    sys.addaudithook(watch)


def hold_writer() -> threading.Event:
    """Shards are not written until the event is set."""
    go, write = threading.Event(), HashedFile.write

    def held(self, data):
        assert threading.current_thread().name != "checkpoint" or go.wait(60)
        return write(self, data)

    HashedFile.write = held
    return go


def two_saves(path: str, folder: Path, kill_at: int | None) -> int:
    """Save after the first and the second update, which removes the first; dies before change `kill_at`."""
    made = actor(path)
    saves = checkpoints(made, folder, keep_last=1)
    made.update_actor(batch())
    saves.save(1, {"kl": 0.1, "data": None})
    saves.settle()
    made.update_actor(batch())
    changes = 0

    def change() -> None:
        nonlocal changes
        changes += 1
        if changes == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    each_moment(folder, change)
    saves.save(2, {"kl": 0.2, "data": None})
    saves.settle()
    return changes


def test_killed_at_any_moment_of_a_save_the_run_goes_on_from_a_good_one(policy, tmp_path):
    """Ten moments from the first to the last change on disk: step 1 or step 2 is whole, and loads."""
    (changes,) = run_ranks(lambda rank, world: two_saves(policy, tmp_path / "whole", None), 1)
    assert changes > 2 * MOMENTS
    truth = run_ranks(lambda rank, world: [log_probs(m) for m in updated(policy, 2)], 1)[0]
    found = []
    for moment in range(MOMENTS):
        folder = tmp_path / f"moment {moment}"
        kill_at = 1 + moment * (changes - 1) // (MOMENTS - 1)
        with pytest.raises(RuntimeError, match="died with exit code -9"):
            run_ranks(lambda rank, world, f=folder, k=kill_at: two_saves(policy, f, k), 1)
        good = newest_good(folder).path
        assert good is not None, os.listdir(folder)

        def resumed(rank, world, folder=folder, good=good):
            made = actor(policy)
            saves = checkpoints(made, folder, keep_last=1)
            state = saves.load(good)
            loaded = log_probs(made)
            saves.save(3, state)
            saves.settle()
            return state["step"], state["kl"], loaded, sorted(os.listdir(folder))

        step, kl, loaded, left = run_ranks(resumed, 1)[0]
        assert kl == step / 10
        assert torch.equal(loaded, truth[step - 1])
        assert left == ["run_id", "step_3"], kill_at
        found.append(step)
    assert found == sorted(found)
    assert set(found) == {1, 2}


def updated(path: str, n: int):
    """The actor after each of `n` updates."""
    made = actor(path)
    for _ in range(n):
        made.update_actor(batch())
        yield made


def test_a_full_disk_is_told_with_the_next_step_and_the_save_is_made_up_for(policy, tmp_path):
    def run(rank, world):
        said: list[str] = []
        made = actor(policy)
        saves = checkpoints(made, tmp_path, said)
        saves.save(1, {})
        assert not saves.settle()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # a write beyond fails, as on a full disk
        saves.save(2, {})
        made.update_actor(batch())
        saves._save.thread.join(60)
        failed = saves.poll()
        left = sorted(os.listdir(tmp_path))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        saves.save(3, {})
        saves.settle()
        return failed, left, said

    failed, left, said = run_ranks(run, 1)[0]
    assert failed
    assert left == ["run_id", "step_1"]
    assert "checkpoint of step 2 was not saved" in said[1]
    assert "actor rank 0: OSError" in said[1]
    assert said[2] == f"checkpoint of step 3: {tmp_path / 'step_3'}"
    assert newest_good(tmp_path).path == tmp_path / "step_3"


def test_the_third_failure_in_a_row_stops_the_run(policy, tmp_path):
    def run(rank, world):
        said: list[str] = []
        saves = checkpoints(actor(policy), tmp_path / "run", said)
        (tmp_path / "run").rename(tmp_path / "gone")
        for step in (1, 2, 3):
            saves.save(step, {})
        with pytest.raises(CheckpointError, match=r"step 3 was not saved.*3 saves in a row have failed"):
            saves.settle()
        return said

    assert len(run_ranks(run, 1)[0]) == 2


def test_training_goes_on_while_the_files_are_written_and_does_not_change_them(policy, tmp_path):
    """The writer is held up until two more updates are done; the next save waits for it."""

    def run(rank, world):
        made = actor(policy)
        saves = checkpoints(made, tmp_path)
        made.update_actor(batch())
        truth = log_probs(made)
        go = hold_writer()
        saves.save(1, {})
        for _ in range(2):
            made.update_actor(batch())
        assert not saves.poll()
        assert saves._save is not None
        assert newest_good(tmp_path).path is None
        threading.Timer(0.5, go.set).start()
        saves.save(3, {})
        assert newest_good(tmp_path).path == tmp_path / "step_1"
        saves.settle()
        other = actor(policy)
        checkpoints(other, tmp_path).load(tmp_path / "step_1")
        return torch.equal(log_probs(other), truth)

    assert run_ranks(run, 1) == [True]


def test_a_save_that_hangs_is_waited_for_a_limited_time(policy, tmp_path):
    def run(rank, world):
        saves = checkpoints(actor(policy), tmp_path)
        go = hold_writer()
        saves.timeout_s = 1.0
        saves.save(1, {})
        with pytest.raises(CheckpointError, match="takes more than 1 s"):
            saves.save(2, {})
        go.set()

    run_ranks(run, 1)


def test_a_checkpoint_holds_everything_and_the_hugging_face_files(policy, tmp_path):
    def run(rank, world):
        made = actor(policy)
        saves = checkpoints(made, tmp_path)
        saves.save(4, {"kl": 0.5, "data": {"position": 3}}, score=0.25)
        saves.settle()
        torch.manual_seed(77)
        expected = torch.rand(3)
        torch.manual_seed(77)
        saves.save(5, {})
        torch.rand(100)
        saves.settle()
        saves.load(tmp_path / "step_5")
        return torch.equal(torch.rand(3), expected), saves.load(tmp_path / "step_4")

    same_numbers, state = run_ranks(run, 1)[0]
    assert same_numbers
    assert state == {"step": 4, "kl": 0.5, "data": {"position": 3}}
    manifest = Manifest.read(tmp_path / "step_4")
    assert (manifest.step, manifest.score) == (4, 0.25)
    on_disk = {
        str(p.relative_to(tmp_path / "step_4")) for p in (tmp_path / "step_4").rglob("*") if p.is_file()
    }
    assert on_disk == {*manifest.files, "manifest.json"}
    assert {"trainer.json", "random.pt", "plan.yaml", "actor/__0_0.distcp", "actor/.metadata"} <= on_disk
    assert {"hf/actor/config.json", "hf/actor/tokenizer.json"} <= on_disk
    shards = sum(record.n_bytes for name, record in manifest.files.items() if name.endswith(".distcp"))
    stated = STATE_BYTES * read_checkpoint(policy).shape.n_params  # what `check` compares with the disk
    assert stated < shards < stated + 1500 * len(STATES) * N_TENSORS  # each has a head of its own


def test_a_checkpoint_without_a_trained_role_is_refused(policy, tmp_path):
    def run(rank, world):
        saves = checkpoints(actor(policy), tmp_path)
        saves.save(1, {})
        saves.settle()
        saves.trained = {**saves.trained, "critic": saves.trained["actor"]}
        with pytest.raises(CheckpointError, match="has no critic"):
            saves.load(tmp_path / "step_1")

    run_ranks(run, 1)
