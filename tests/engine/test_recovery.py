"""How often a run may lose workers, and what it says of it."""

import json

import pytest

from rolemesh.engine.errors import WorkerDied
from rolemesh.engine.recovery import RECOVERIES_FILE, Recoveries, WorkersLost, read_recoveries


def death(rank: int = 1) -> WorkerDied:
    return WorkerDied("actor", rank, "a", "update_actor", "killed", "last lines of x.log:\noops")


def test_a_recovery_is_a_line_of_the_run_folder_and_of_the_metrics(tmp_path):
    told: list[str] = []
    recoveries = Recoveries(tmp_path, 2, tell=told.append)
    recoveries.restored(0)
    assert recoveries.metrics() == {}
    recoveries.lost(WorkersLost(death(), done=5))
    assert recoveries.under_way
    recoveries.restored(4)
    assert not recoveries.under_way
    (entry,) = read_recoveries(tmp_path)
    assert (entry.step, entry.from_step, entry.replayed) == (6, 4, 1)
    assert entry.lost == "actor rank 1 on node a died in update_actor: killed"
    metrics = recoveries.metrics()
    assert metrics.pop("recovery/seconds") >= 0
    assert metrics == {"recovery/count": 1, "recovery/replayed_steps": 1}
    said = "\n".join(told)
    assert "lost workers in step 6: actor rank 1" in said
    assert "oops" in said, "the last log lines are told"
    assert "recovery 1 of at most 2" in said
    assert "back at the checkpoint of step 4; steps 5 to 6 are trained again" in said


def test_a_second_loss_during_a_recovery_counts_and_too_many_end_the_run(tmp_path):
    recoveries = Recoveries(tmp_path, 2, tell=lambda line: None)
    recoveries.lost(WorkersLost(death(), done=5))
    recoveries.lost(WorkersLost(death(0), done=recoveries.done))
    with pytest.raises(WorkerDied, match="actor rank 2") as caught:
        recoveries.lost(WorkersLost(death(2), done=recoveries.done))
    assert caught.value.__notes__ == ["recovered 2 times before; run.recoveries allows no more"]
    assert [(entry.step, entry.from_step) for entry in read_recoveries(tmp_path)] == [(6, None)] * 2


def test_without_recoveries_the_first_loss_ends_the_run(tmp_path):
    with pytest.raises(WorkerDied) as caught:
        Recoveries(tmp_path, 0, tell=print).lost(WorkersLost(death(), done=0))
    assert "run.recoveries is 0" in caught.value.__notes__[0]


def test_lines_that_a_crash_cut_off_are_left_out(tmp_path):
    recoveries = Recoveries(tmp_path, 1, tell=lambda line: None)
    recoveries.lost(WorkersLost(death(), done=0))
    recoveries.restored(0)
    with (tmp_path / RECOVERIES_FILE).open("a") as file:
        file.write(json.dumps({"step": 3})[:-4])
    assert len(list(read_recoveries(tmp_path))) == 1
    assert list(read_recoveries(tmp_path / "none")) == []
