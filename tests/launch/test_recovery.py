"""The loop around a training that loses workers, and where it goes when devices are gone for good."""

import contextlib
import json
from pathlib import Path

import pytest
from small_disk import fill, small_disk
from tiny import tiny_checkpoint

from rolemesh.engine.errors import CallError, WorkerDied
from rolemesh.engine.recovery import Recoveries, WorkersLost, read_recoveries
from rolemesh.launch import recovery
from rolemesh.launch.checkpoints import read_shapes
from rolemesh.launch.config import parse_recipe
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.plan import plan_on_what_is_left
from rolemesh.launch.progress import Progress
from rolemesh.launch.run_folder import drop_rows_after
from rolemesh.launch.schema import Run
from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.pools import PlacementError

RECIPE = """
run: {device: cpu}
data: {train_files: train.jsonl, max_prompt_tokens: 16}
algorithm: grpo
batch: {prompts: 4, samples_per_prompt: 2}
lengths: {max_response_tokens: 100}
actor: {path: policy, layout: {tp: 2}}
reward: reward.py:compute_score
"""
POOLS = """
placement:
  pools:
    train: {roles: [actor], devices: 2}
    rollout: {roles: [rollout], devices: 2}
"""
DEATH = WorkerDied("actor", 0, "a", "update_actor", "killed", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("left")
    tiny_checkpoint(root / "policy")
    (root / "train.jsonl").write_text(json.dumps({"prompt": "a"}))
    (root / "reward.py").write_text("def compute_score(**_):\n    return 0.0\n")
    return root


def left(folder: Path, text: str, *nodes: int):
    recipe = parse_recipe(text, folder)
    cluster = ClusterSpec.uniform(len(nodes), nodes[0], device_kind="cpu")
    return plan_on_what_is_left(recipe, cluster, read_shapes(recipe)[0])


def test_what_is_left_is_planned_as_the_recipe_says_where_that_fits(folder):
    plan = left(folder, RECIPE + "placement: colocate\n", 2)
    assert (plan.strategy, plan.n_devices) == ("colocate", 2)
    assert plan.layout_of("actor").tp == 2


def test_pools_that_fit_no_more_become_what_strategy_auto_finds(folder):
    assert left(folder, RECIPE + POOLS, 2, 2).n_devices == 4
    plan = left(folder, RECIPE + POOLS, 2)
    assert plan.n_devices <= 2
    assert plan.layout_of("actor").tp == 2
    assert left(folder, RECIPE + POOLS, 1).layout_of("actor").tp == 1, "the last resort frees the layouts"


def test_where_nothing_fits_every_attempt_says_why(folder):
    with pytest.raises(PlacementError, match=r"(?s)0 devices that are left:\nas the recipe says: .*\nauto: "):
        left(folder, RECIPE + POOLS, 0)


class Workers:
    """Stands for worker groups; `missing` says how often devices are not there."""

    def __init__(self, missing: int = 0) -> None:
        self.missing, self.started = missing, list[dict]()

    @contextlib.contextmanager
    def start(self, **options: float):
        self.started.append(options)
        if options and self.missing:
            self.missing -= 1
            raise PlacementError("2 devices are missing")
        yield {}


def lost_once(workers: Workers, recoveries: Recoveries, run: Run, replan=None) -> list[Path | None]:
    """The checkpoints from which a run goes on that loses workers in its fourth step, once."""
    tried: list[Path | None] = []

    def attempt(resume: Path | None) -> int:
        tried.append(resume)
        with recovery.workers(workers.start, recoveries, replan):
            if len(tried) == 1:
                raise WorkersLost(DEATH, done=3)
            recoveries.restored(0)
            return 7

    with Progress(7) as progress:
        assert recovery.until_done(run, recoveries, progress, None, attempt) == 7
    return tried


def test_a_run_without_checkpoints_begins_anew_with_what_it_noted_taken_back(tmp_path):
    for name in ("metrics.jsonl", "trained.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps({"step": step}) + "\n" for step in range(4)))
    workers = Workers()
    recoveries = Recoveries(tmp_path, 3, node_wait_s=5.0)
    assert lost_once(workers, recoveries, Run(dir=str(tmp_path))) == [None, None]
    assert workers.started == [{}, {"wait_s": 5.0}]
    assert (tmp_path / "metrics.jsonl").read_text() == (tmp_path / "trained.jsonl").read_text() == ""
    assert [(entry.step, entry.replayed) for entry in read_recoveries(tmp_path)] == [(4, 3)]


def test_devices_that_do_not_come_back_end_the_run_unless_it_is_elastic(tmp_path):
    run = Run(dir=str(tmp_path))
    with pytest.raises(PlacementError, match="2 devices are missing") as caught:
        lost_once(Workers(missing=1), Recoveries(tmp_path, 3), run)
    assert "run.elastic: true goes on" in caught.value.__notes__[0]
    other = Workers()
    recoveries = Recoveries(tmp_path, 3, elastic=True)
    lost_once(Workers(missing=1), recoveries, run, replan=lambda: other.start)
    assert other.started == [{}]


def test_a_node_that_still_seems_alive_is_planned_with_until_it_is_known_to_be_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(recovery, "_PAUSE_S", 0.0)
    told: list[str] = []
    plans = iter([PlacementError("not granted\nNodes: ..."), PlacementError("it left"), None])

    def replan():
        @contextlib.contextmanager
        def start():
            if error := next(plans):
                raise error
            yield {}

        return start

    recoveries = Recoveries(tmp_path, 3, elastic=True, tell=told.append)
    lost_once(Workers(missing=1), recoveries, Run(dir=str(tmp_path)), replan)
    assert next(plans, "none") == "none"
    assert [line for line in told if "planning again" in line] == [
        "recovery: not granted; planning again",
        "recovery: it left; planning again",
    ]

    monkeypatch.setattr(recovery, "_NOTICE_S", 0.0)
    plans = iter([PlacementError("never granted")])
    with pytest.raises(PlacementError, match="never granted"):
        lost_once(Workers(missing=1), Recoveries(tmp_path, 3, elastic=True), Run(dir=str(tmp_path)), replan)


def test_workers_that_die_while_they_start_again_are_another_loss_and_other_errors_are_none(tmp_path):
    recoveries = Recoveries(tmp_path, 3)
    recoveries.lost(WorkersLost(DEATH, done=3))

    @contextlib.contextmanager
    def dying(**options: float):
        raise DEATH
        yield

    with pytest.raises(WorkersLost) as caught, recovery.workers(dying, recoveries):
        pass
    assert caught.value.done == 3

    class Loop:
        done, checkpoints = 2, None

    for error, cause, raised in (
        (CallError("closed"), DEATH, WorkersLost),
        (ValueError("x"), None, ValueError),
    ):
        with pytest.raises(raised), recovery.guarded(Loop(), {}, lambda *_, cause=cause: cause):
            raise error


def test_keys_of_recoveries_are_refused_where_there_are_none(folder):
    with pytest.raises(RecipeError, match=r"run\.elastic would have no effect.*run\.recoveries is 0"):
        parse_recipe(RECIPE, folder, ["run.recoveries=0", "run.elastic=true"])


def test_rows_are_taken_back_on_a_full_disk_too(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 16) as disk:
        rows = [json.dumps({"step": step, "x": "y" * 2000}) for step in range(5)]
        (disk / "metrics.jsonl").write_text("\n".join([*rows, '{"step": 5, "x"']) + "\n")
        fill(disk)
        drop_rows_after(disk, 2)
        assert (disk / "metrics.jsonl").read_text().splitlines() == rows[:3]
