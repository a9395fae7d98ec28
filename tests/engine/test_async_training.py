"""Generation ahead of training by the real trainer: all roles on one rank of this machine, without Ray."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from local_trainer import STEPS, exported, learnt, make_assets, trainer

from rolemesh.engine.algorithms import Correction
from rolemesh.engine.async_steps import StepsInFlight
from rolemesh.engine.checkpoint.store import newest_good
from rolemesh.engine.workers.advantage import AdvantageSpec

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
CORRECTED = AdvantageSpec("gae", kl_kind="k1", lam=0.95, correction=Correction("token"))
AGES = {0: [0, 0, 0, 0, 0], 1: [0, 1, 1, 1, 1], 2: [0, 1, 2, 1, 2]}  # updates that each step's samples lack


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    return make_assets(tmp_path_factory.mktemp("assets"))


def fit(assets: Path, run: Path, staleness: int, resume: Path | None = None, **options: Any) -> int:
    """Train with `staleness`; the steps that are done."""

    def on_rank(rank: int, world: int) -> int:
        spec = {"staleness": staleness, "advantage": CORRECTED}
        made = trainer(assets, run, spec=spec, **options)
        if resume is not None:
            assert made.checkpoints is not None
            made.resume(made.checkpoints.load(resume))
        return made.fit()

    return run_ranks(on_rank, 1)[0]


@pytest.fixture(scope="module")
def unbroken(assets) -> dict[int, Path]:
    """Whole runs, by staleness."""
    runs = {staleness: assets / f"staleness {staleness}" for staleness in AGES}
    for staleness, run in runs.items():
        assert fit(assets, run, staleness) == STEPS
    return runs


def same(one: Path, other: Path, steps: range) -> None:
    """Both runs learnt the same in `steps`, and ended with the same weights, bit for bit."""
    metrics = learnt(one), learnt(other)
    for step in steps:
        assert metrics[0][step] == metrics[1][step], step
    weights = exported(one), exported(other)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_without_staleness_steps_in_flight_are_the_synchronous_run_bit_for_bit(assets, unbroken, tmp_path):
    def in_flight(rank: int, world: int) -> int:
        made = trainer(assets, tmp_path, spec={"advantage": CORRECTED})
        made.flight = StepsInFlight(made.graph, 0)
        return made.fit()

    assert run_ranks(in_flight, 1) == [STEPS]
    same(unbroken[0], tmp_path, range(1, STEPS + 1))


@pytest.mark.parametrize("staleness", AGES)
def test_metrics_tell_how_old_the_weights_were_and_how_far_the_policies_are_apart(unbroken, staleness: int):
    rows = learnt(unbroken[staleness])
    for step, age in enumerate(AGES[staleness], start=1):
        row = rows[step]
        assert [row[f"training/staleness/{what}"] for what in ("min", "mean", "max")] == [age] * 3
        assert (abs(row["rollout_corr/k3_kl"]) > 1e-6) == (age > 0), (step, row["rollout_corr/k3_kl"])
        assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.2 if age else 1e-4)


@pytest.mark.parametrize(
    ("staleness", "step", "ahead"),
    [(1, 3, {4}), (2, 3, {4, 5}), pytest.param(2, 2, {3}, marks=pytest.mark.slow)],
)
def test_resumed_with_samples_in_flight_a_run_is_the_unbroken_one_bit_for_bit(
    assets, unbroken, tmp_path, staleness: int, step: int, ahead: set[int]
):
    checkpoint = unbroken[staleness] / "checkpoints" / f"step_{step}"
    assert set(torch.load(checkpoint / "ahead.pt", weights_only=True)) == ahead
    assert fit(assets, tmp_path, staleness, checkpoint) == STEPS
    same(unbroken[staleness], tmp_path, range(step + 1, STEPS + 1))


def test_asked_to_stop_it_saves_what_is_in_flight_too(assets, unbroken, tmp_path):
    assert fit(assets, tmp_path, 1, stopping=lambda: True) == 1
    saved = newest_good(tmp_path / "checkpoints").path
    assert saved is not None
    assert fit(assets, tmp_path, 1, saved) == STEPS
    same(unbroken[1], tmp_path, range(1, STEPS + 1))


def test_samples_older_than_a_resumed_run_allows_are_generated_again(assets, unbroken, tmp_path):
    checkpoint = unbroken[2] / "checkpoints" / "step_3"  # step 5 is there, made by the weights after step 2
    assert fit(assets, tmp_path, 1, checkpoint) == STEPS
    assert [learnt(tmp_path)[step]["training/staleness/max"] for step in (4, 5)] == [1, 1]
    assert fit(assets, tmp_path / "in turn", 0, checkpoint) == STEPS
    assert [learnt(tmp_path / "in turn")[step]["training/staleness/max"] for step in (4, 5)] == [0, 0]
