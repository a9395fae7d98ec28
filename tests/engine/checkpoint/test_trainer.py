"""The real trainer, stopped and resumed, with all roles on one rank of this machine and without Ray."""

from pathlib import Path

import pytest
import torch
from gloo import run_ranks
from local_trainer import STEPS, exported, learnt, make_assets, trainer
from small_disk import fill, small_disk

from rolemesh.engine.checkpoint.manifest import Manifest
from rolemesh.engine.checkpoint.store import newest_good
from rolemesh.parallel.checkpoint_error import CheckpointError

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def unbroken(assets) -> Path:
    run = assets / "unbroken"
    assert run_ranks(lambda rank, world: trainer(assets, run).fit(), 1) == [STEPS]
    return run


def test_resumed_after_step_3_it_learns_what_the_unbroken_run_does_bit_for_bit(assets, unbroken, tmp_path):
    def resumed(rank, world):
        going_on = trainer(assets, tmp_path)
        assert going_on.checkpoints is not None
        going_on.resume(going_on.checkpoints.load(unbroken / "checkpoints" / "step_3"))
        before = going_on.kl.value
        return going_on.fit(), before

    ((done, kl),) = run_ranks(resumed, 1)
    assert done == STEPS
    assert kl != 0.05
    one, other = learnt(unbroken), learnt(tmp_path)
    assert sorted(other) == [4, 5]
    assert other == {step: one[step] for step in (4, 5)}
    first, second = exported(unbroken), exported(tmp_path)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_each_step_that_is_due_is_saved_with_its_score(unbroken):
    folder = unbroken / "checkpoints"
    assert newest_good(folder).path == folder / f"step_{STEPS}"
    for step, row in learnt(unbroken).items():
        if step:
            assert Manifest.read(folder / f"step_{step}").score == row["critic/score/mean"]


def test_asked_to_stop_it_saves_the_step_it_is_in_and_exports_nothing(assets, unbroken, tmp_path):
    """Also where no checkpoints were asked for; the run that goes on is the unbroken one."""
    asked: list[int] = []

    def on_rank(rank, world):
        stopped = trainer(assets, tmp_path, spec={"save_every": 0}, stopping=lambda: bool(asked))
        stopped.on_step = lambda step, metrics: asked.append(step) if step == 1 else None
        return stopped.fit()

    assert run_ranks(on_rank, 1) == [2]
    assert newest_good(tmp_path / "checkpoints").path == tmp_path / "checkpoints" / "step_2"
    assert not (tmp_path / "export").exists()
    assert learnt(tmp_path)[2] == learnt(unbroken)[2]


def test_a_last_save_that_fails_is_an_error(assets, tmp_path):
    def on_rank(rank, world):
        stopped = trainer(assets, tmp_path, spec={"save_every": 0}, stopping=lambda: True)
        assert stopped.checkpoints is not None
        stopped.checkpoints.plan = None  # type: ignore[assignment]  # cannot be written
        with pytest.raises(CheckpointError, match="the last checkpoint, of step 1, was not saved"):
            stopped.fit()

    run_ranks(on_rank, 1)


def test_a_disk_that_is_full_for_a_step_costs_its_checkpoint_and_its_lines(assets, unbroken, tmp_path):
    def on_rank(rank, world):
        kept: list[str] = []

        def on_step(step, metrics):
            assert running.checkpoints is not None
            failed = running.checkpoints.settle()
            assert failed == (step == 3)
            kept.append(newest_good(disk / "checkpoints").path.name if step else "none")
            if step == 2:
                fill(disk)
            elif step == 3:
                (disk / "filler").unlink()

        running = trainer(assets, disk, on_step=on_step)
        return running.fit(), kept

    with small_disk(tmp_path / "disk", 64 << 20) as disk:
        ((done, kept),) = run_ranks(on_rank, 1)
        logged, first, second = sorted(learnt(disk)), exported(unbroken), exported(disk)
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert done == STEPS
    assert kept == ["none", "step_1", "step_2", "step_2", "step_4", "step_5"]
    assert [step for step in logged if step != 3] == [0, 1, 2, 4, 5]  # a short line may find room
