"""Models copied onto a node's disk: once, whole or not at all."""

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from rolemesh.engine import staging
from rolemesh.engine.staging import StageError, stage, stage_bytes, staged_path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "hub/llama"
    (folder / "original").mkdir(parents=True)
    for name, size in (("config.json", 20), ("model.safetensors", 5000), ("pytorch_model.bin", 5000)):
        (folder / name).write_bytes(os.urandom(size))
    (folder / "original/consolidated.00.pth").write_bytes(bytes(5000))
    return folder


def test_a_copy_is_made_once_and_holds_what_is_read(model, tmp_path):
    path, n_bytes = stage(model, tmp_path / "disk")
    assert (path, n_bytes) == (staged_path(model, tmp_path / "disk"), 5020)
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]
    assert (path / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert stage(model, tmp_path / "disk") == (path, 0)


def test_processes_of_a_node_make_one_copy_together(model, tmp_path):
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: stage(model, tmp_path / "disk"), range(8)))
    assert sorted(n_bytes for _, n_bytes in done) == [0] * 7 + [5020]


def test_another_version_of_the_model_is_another_copy(model, tmp_path):
    old, _ = stage(model, tmp_path / "disk")
    (model / "model.safetensors").write_bytes(b"newer")
    new, n_bytes = stage(model, tmp_path / "disk")
    assert (new != old, n_bytes) == (True, 25)


def test_a_copy_that_broke_off_or_lost_a_file_is_made_again(model, tmp_path):
    path = staged_path(model, tmp_path / "disk")
    partial = path.with_name(f".{path.name}.partial")
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    assert stage(model, tmp_path / "disk") == (path, 5020)
    assert not partial.exists()
    (path / "model.safetensors").write_bytes(b"cut")
    assert stage(model, tmp_path / "disk") == (path, 5020)


def test_a_disk_that_is_too_small_is_told_before_anything_is_copied(model, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(StageError, match=r"disk has 0\.0 GiB free, the model .*llama takes .* free space"):
        stage(model, tmp_path / "disk")
    assert [path.name for path in (tmp_path / "disk").iterdir() if path.suffix != ".lock"] == []


def test_a_disk_that_fills_up_leaves_no_half_copy(model, tmp_path, monkeypatch):
    def full(source: Path, target: Path) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(staging.shutil, "copyfile", full)
    with pytest.raises(StageError, match=r"disk is full .*: free space there, or set run.stage elsewhere"):
        stage(model, tmp_path / "disk")
    assert [path.name for path in (tmp_path / "disk").iterdir() if path.suffix != ".lock"] == []


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StageError, match=r"none cannot be read on \S+: No such file"):
        stage_bytes(tmp_path / "none")
