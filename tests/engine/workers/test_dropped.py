"""Rows that a reward leaves out count in no advantage, statistic, loss or mini-batch."""

import numpy as np
import pytest
import torch
from gloo import run_ranks
from tiny import tiny_checkpoint
from worker_runs import batch, worker

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.workers.actor import ActorWorker, PolicyLoss
from rolemesh.engine.workers.advantage import AdvantageSpec
from rolemesh.engine.workers.critic import CriticWorker, ValueLoss
from rolemesh.engine.workers.megatron import RoleSpec
from rolemesh.engine.workers.mini_batches import plan_mini_batches
from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout

KEPT = [0, 1, 4, 5, 6, 7]  # of 8 rows, two per prompt; those of prompt "b" are left out
LAYOUTS = [Layout(), Layout(dp=2)]


def scored() -> DataProto:
    data = batch(8)
    data.non_tensor_batch["uid"] = np.array(list("aabbccdd"), dtype=object)
    data.batch["rm_scores"] = torch.zeros(8, 5)
    last = data.batch["response_mask"].sum(-1) - 1
    data.batch["rm_scores"][torch.arange(8), last] = torch.tensor([1.0, 3.0, 50.0, -70.0, 2, 2, 5, 1])
    data.batch["ref_log_prob"] = data.batch["old_log_probs"] - 0.1 * torch.arange(8)[:, None]
    return data


def test_mini_batches_are_cut_from_the_rows_that_are_left():
    plan = plan_mini_batches([1] * 8, 4, 2, KEPT)
    assert plan.sizes == ((2, 1), (2, 1))
    assert sorted(row for rows in plan.rows for row in rows[:2]) == [0, 1, 4, 5]
    assert sorted(row for rows in plan.rows for row in rows[2:]) == [6, 7]


def test_of_no_rows_there_is_no_mini_batch():
    plan = plan_mini_batches([1] * 8, 4, 2, [])
    assert plan.rows == plan.sizes == ((), ())
    assert plan.n_mini_batches == 0


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("scorer"), "llama", head="score"))


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("policy"), "llama"))


def advantages(scorer: str, layout: Layout, data: DataProto, spec: AdvantageSpec, dropped) -> list[DataProto]:
    def call(rank):
        made = worker(CriticWorker, rank, layout, RoleSpec(scorer, "value"), ValueLoss())
        return made.compute_advantage(data.chunk(layout.dp)[rank], spec, kl_coef=0.1, dropped=dropped)

    return run_ranks(lambda rank, world: call(rank), layout.world)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("estimator", "kl_kind"), [("gae", "k1"), ("grpo", None)])
def test_advantages_and_statistics_are_those_of_the_rows_that_are_left(scorer, estimator, kl_kind, layout):
    spec, data = AdvantageSpec(estimator, gamma=0.99, lam=0.95, kl_kind=kl_kind), scored()
    (alone,) = advantages(scorer, Layout(), data.select_idxs(KEPT), spec, ())
    parts = advantages(scorer, layout, data, spec, frozenset("b"))
    result = DataProto.concat(parts)
    for name, column in alone.batch.items():
        assert torch.allclose(result.batch[name][KEPT], column, atol=1e-6), name
        assert (result.batch[name][[2, 3]] == 0).all(), name
    for part in parts:
        assert part.meta_info["metrics"] == pytest.approx(alone.meta_info["metrics"], abs=1e-6)
    assert alone.meta_info["metrics"]["critic/score/mean"] == pytest.approx(14 / 6)
    if estimator == "grpo":  # (3 - 2) / std of (1, 3); the others of a prompt agree, or differ by 4
        assert result.batch["advantages"][1, 0].item() == pytest.approx(1 / 2**0.5, abs=1e-5)
        assert alone.meta_info["metrics"]["grpo/groups"] == 3


@pytest.mark.full
@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_of_no_rows_there_are_no_statistics(scorer, estimator):
    spec = AdvantageSpec(estimator, kl_kind="k1")
    for result in advantages(scorer, Layout(dp=2), scored(), spec, frozenset("abcd")):
        assert (result.batch["advantages"] == 0).all()
        assert not any(name.startswith(("critic/", "actor/")) for name in result.meta_info["metrics"])


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_updates_are_those_of_the_rows_that_are_left(policy, scorer, layout):
    data = scored()
    roles = [
        (ActorWorker, RoleSpec(policy, "lm", optim=OptimConfig(lr=1e-3)), PolicyLoss(), "update_actor"),
        (CriticWorker, RoleSpec(scorer, "value", optim=OptimConfig(lr=1e-3)), ValueLoss(), "update_critic"),
    ]

    def updated(layout: Layout, data: DataProto, kept: list[int]) -> list[list[dict[str, float]]]:
        plan = plan_mini_batches(data.batch["attention_mask"].sum(-1).tolist(), 4, layout.dp, kept)

        def call(rank):
            part = data.select_idxs(list(plan.rows[rank]))
            return [
                getattr(worker(cls, rank, layout, spec, loss), method)(part, plan.sizes)
                for cls, spec, loss, method in roles
            ]

        return run_ranks(lambda rank, world: call(rank), layout.world)

    (alone,) = updated(Layout(), data.select_idxs(KEPT), list(range(6)))
    for metrics in updated(layout, data, KEPT):
        for mine, theirs in zip(metrics, alone, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    for actor, critic in updated(layout, data, []):
        assert actor == {"actor/optimizer_steps": 0, "actor/skipped_steps": 0}
        assert critic == {"critic/optimizer_steps": 0, "critic/skipped_steps": 0}
