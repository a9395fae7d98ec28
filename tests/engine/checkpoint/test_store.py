"""Which checkpoints stay, which one a run goes on from: files on disk, no models."""

import json
import os

import pytest

from rolemesh.engine.checkpoint.manifest import MANIFEST, Manifest
from rolemesh.engine.checkpoint.store import RUN_ID, CheckpointStore, newest_good
from rolemesh.parallel.checkpoint_error import CheckpointError
from rolemesh.parallel.durable_files import read_record, write_file


def save(store: CheckpointStore, step: int, score: float | None = None):
    partial = store.begin(step)
    (partial / "actor").mkdir()
    files = {RUN_ID: read_record(partial / RUN_ID)}
    files["actor/weights"] = write_file(partial / "actor" / "weights", f"weights of {step}".encode() * 100)
    return store.commit(partial, Manifest(step, store.run_id, score, files))


def names(path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.name != RUN_ID)


def test_the_newest_are_kept_and_counted_again_after_a_restart(tmp_path):
    for step in (1, 2, 3):
        save(CheckpointStore(tmp_path, keep_last=2), step)
    assert names(tmp_path) == ["step_2", "step_3"]
    save(CheckpointStore(tmp_path, keep_last=2), 10)
    assert names(tmp_path) == ["step_10", "step_3"]


def test_without_a_number_every_checkpoint_is_kept(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        save(store, step)
    assert names(tmp_path) == ["step_1", "step_2", "step_3"]


def test_the_best_by_score_stays_beside_the_last(tmp_path):
    for step, score in ((1, 0.1), (2, 0.5), (3, 0.3)):
        store = CheckpointStore(tmp_path, keep_last=1, keep_best=1)
        save(store, step, score)
    assert names(tmp_path) == ["step_2", "step_3"]
    assert store.best() == (2, 0.5)
    save(store, 4, float("nan"))
    save(store, 5, None)
    assert names(tmp_path) == ["step_2", "step_5"]


def test_what_the_run_did_not_write_is_never_removed(tmp_path):
    theirs = save(CheckpointStore(tmp_path), 1)
    other = json.loads((theirs / MANIFEST).read_text()) | {"run_id": "of another run"}
    (theirs / MANIFEST).write_text(json.dumps(other))
    (tmp_path / "step_2").mkdir()
    (tmp_path / "step_2" / "notes.txt").write_text("mine")
    (tmp_path / "best model").mkdir()
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 3)
    (tmp_path / "step_3" / "notes.txt").write_text("mine")
    save(store, 4)
    assert names(tmp_path) == ["best model", "step_1", "step_2", "step_3", "step_4"]
    assert names(tmp_path / "step_3") == ["notes.txt"]
    assert (theirs / "actor" / "weights").exists()


def test_a_folder_in_the_way_is_set_aside_unless_it_is_this_runs(tmp_path):
    store = CheckpointStore(tmp_path)
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "notes.txt").write_text("mine")
    save(store, 1)
    save(store, 1)
    assert names(tmp_path) == ["step_1", "step_1.aside"]
    assert names(tmp_path / "step_1.aside") == ["notes.txt"]
    Manifest.read(tmp_path / "step_1").check(tmp_path / "step_1")


def cut(path):
    os.truncate(path / "actor" / "weights", 100)


def change(path):
    content = bytearray((path / "actor" / "weights").read_bytes())
    content[50] ^= 1
    (path / "actor" / "weights").write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, r"wrong size of actor/weights \(100 bytes instead of 1200\)"),
        (change, "actor/weights changed since it was written"),
        (lambda path: (path / "actor" / "weights").unlink(), "lacks actor/weights"),
        (lambda path: (path / MANIFEST).unlink(), f"no {MANIFEST}: it was not finished"),
        (lambda path: os.truncate(path / MANIFEST, 40), f"{MANIFEST} is damaged"),
        (lambda path: (path / MANIFEST).write_text('{"rolemesh_checkpoint": 99}'), "format 99"),
    ],
)
def test_the_newest_good_one_is_found_and_the_others_are_named(tmp_path, damage, reason):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    damage(save(store, 2))
    store.begin(3)
    found = newest_good(tmp_path)
    assert found.path == tmp_path / "step_1"
    unfinished, damaged = found.skipped
    assert unfinished == ".step_3.partial: a save that was not finished"
    with pytest.raises(CheckpointError, match=reason):
        raise CheckpointError(damaged)


def test_a_damaged_checkpoint_does_not_push_out_a_good_one(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (1, 2):
        save(store, step)
    cut(tmp_path / "step_2")
    save(store, 3)
    assert names(tmp_path) == ["step_1", "step_2", "step_3"]
    save(store, 4)
    assert names(tmp_path) == ["step_3", "step_4"]


def test_a_removal_that_was_cut_off_is_finished_later(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (1, 2):
        save(store, step)
    (tmp_path / "step_1" / "actor" / "weights").unlink()
    save(store, 3)
    assert names(tmp_path) == ["step_2", "step_3"]


def test_a_new_process_clears_its_runs_unfinished_saves_and_no_others(tmp_path):
    store = CheckpointStore(tmp_path)
    store.begin(5)
    foreign = tmp_path / ".step_6.partial"
    foreign.mkdir()
    (tmp_path / "step_3").mkdir()  # a removal that was cut off at its very end
    CheckpointStore(tmp_path)
    assert names(tmp_path) == [foreign.name]


def test_going_back_sets_later_checkpoints_aside(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    for step in (1, 2):
        CheckpointStore(tmp_path)
        save(CheckpointStore(tmp_path), step)
    store.set_aside_after(1)
    save(store, 2)
    assert names(tmp_path) == ["step_2", "step_2.aside"]


def test_nothing_is_found_where_nothing_is(tmp_path):
    assert newest_good(tmp_path / "none").path is None
