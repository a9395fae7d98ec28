"""Algorithms on Megatron workers: the same update however it is cut, and updates that must change nothing."""

from typing import Any

import numpy as np
import pytest
import torch
from gloo import run_ranks
from tiny import tiny_checkpoint
from worker_runs import batch, worker

from rolemesh.engine.algorithms import Correction, SoftOverlong
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.workers.actor import ActorWorker, PolicyLoss
from rolemesh.engine.workers.advantage import AdvantageSpec
from rolemesh.engine.workers.critic import CriticWorker, ValueLoss
from rolemesh.engine.workers.megatron import RoleSpec
from rolemesh.engine.workers.mini_batches import plan_mini_batches
from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout

pytestmark = pytest.mark.full
LOSSES = (
    PolicyLoss("vanilla", loss_agg="token-mean", kl_coef=0.1, entropy_coef=0.01),
    PolicyLoss("vanilla", loss_agg="seq-mean-token-sum-norm", norm_tokens=5),
    PolicyLoss("gspo", loss_agg="seq-mean-token-mean"),
    PolicyLoss("cispo", loss_agg="seq-mean-token-sum", clip_low=1.0, end_ids=(2,)),
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("policy"), "llama"))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("scorer"), "llama", head="score"))


def rows_of(data: DataProto) -> DataProto:
    """The batch with what rewards and corrections read."""
    n, width = data.batch["responses"].shape
    generator = torch.Generator().manual_seed(5)
    data.batch["rm_scores"] = torch.zeros(n, width)
    last = data.batch["response_mask"].sum(-1) - 1
    data.batch["rm_scores"][torch.arange(n), last] = torch.randn(n, generator=generator)
    data.batch["ref_log_prob"] = data.batch["old_log_probs"] - 0.1
    noise = 0.5 * torch.randn(n, width, generator=generator)
    data.batch["rollout_log_probs"] = data.batch["old_log_probs"] + noise
    data.non_tensor_batch["uid"] = np.array(list("aabbbcc")[:n], dtype=object)
    return data


def updates(rank: int, world: int, path: str, tokens: int, order: list[int]) -> list[dict[str, float]]:
    """Metrics of an update with each of the losses; the rows in `order`, cut over `world` replicas."""
    data = rows_of(batch(7)).select_idxs(order)
    plan = plan_mini_batches(data.batch["attention_mask"].sum(-1).tolist(), 7, world)
    part = data.select_idxs(list(plan.rows[rank]))
    found = []
    for loss in LOSSES:
        spec = RoleSpec(path, "lm", optim=OptimConfig(lr=1e-3), micro_batch_tokens=tokens)
        actor = worker(ActorWorker, rank, Layout(dp=world), spec, loss)
        found.append(actor.update_actor(part, plan.sizes) | {"weights": checksum(actor)})
    return found


def checksum(role: Any) -> float:
    return sum(p.double().abs().sum().item() for _, p in role.model.named_parameters())


def test_an_update_is_the_same_for_dp_1_2_and_3_any_micro_batch_and_any_order(policy):
    (truth,) = run_ranks(updates, 1, policy, 1000, list(range(7)))
    for world, tokens, order in (
        (1, 8, [6, 0, 3, 2, 5, 1, 4]),
        (2, 24, [3, 4, 5, 6, 0, 1, 2]),
        (3, 8, list(range(7))),
    ):
        for rank in run_ranks(updates, world, policy, tokens, order):
            for loss, expected, found in zip(LOSSES, truth, rank, strict=True):
                for name, value in expected.items():
                    what = (world, tokens, loss.name, name)
                    assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), what


def idle_updates(rank: int, world: int, policy: str, scorer: str, dtype: str) -> list[tuple[bool, float]]:
    """Whether a learning rate of 0 left every weight as it was, and how far log-probs were from the old ones.

    As in a step: log-probs are scored first, then every row is in one mini-batch.
    """
    data, found = rows_of(batch(7)), []
    part = data.chunk(world)[rank]
    optim = OptimConfig(lr=0.0)
    for cls, path, head, loss in (
        (ActorWorker, policy, "lm", PolicyLoss(epochs=2, kl_coef=0.1)),
        (ActorWorker, policy, "lm", PolicyLoss("gspo", loss_agg="seq-mean-token-mean")),
        (CriticWorker, scorer, "value", ValueLoss(epochs=2)),
    ):
        spec = RoleSpec(path, head, dtype=dtype, optim=optim, micro_batch_tokens=24)
        made = worker(cls, rank, Layout(dp=world), spec, loss)
        before = {name: p.clone() for name, p in made.model.named_parameters()}
        if cls is ActorWorker:
            scored = made.compute_log_prob(part).batch["old_log_probs"]
            mine = DataProto.from_dict({**part.batch, "old_log_probs": scored}, part.non_tensor_batch)
            difference = made.update_actor(mine)["actor/log_prob_diff_max"]
        else:
            difference = made.update_critic(part)["critic/skipped_steps"]
        same = all(torch.equal(p, before[name]) for name, p in made.model.named_parameters())
        found.append((same, difference))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_learning_rate_of_0_changes_nothing_and_the_ratio_is_exactly_1(policy, scorer, world, dtype):
    for rank in run_ranks(idle_updates, world, policy, scorer, dtype):
        assert rank == [(True, 0.0)] * 3


def advantages(
    rank: int, world: int, path: str, spec: AdvantageSpec, keep: list[int] | None = None
) -> tuple[DataProto, dict[str, float]]:
    data = rows_of(batch(7))
    data = data if keep is None else data.select_idxs(keep)
    made = worker(CriticWorker, rank, Layout(dp=world), RoleSpec(path, "value"), ValueLoss())
    result = made.compute_advantage(data.chunk(world)[rank], spec, kl_coef=0.1)
    return result, result.meta_info["metrics"]


def test_rows_that_are_left_out_count_nowhere(scorer):
    """Advantages, metrics and the critic's update equal those of a batch that never had the row."""
    full = torch.nonzero(rows_of(batch(7)).batch["response_mask"].all(dim=1)).flatten().tolist()
    keep = [row for row in range(7) if row not in full]
    assert full
    for estimator in ("gae", "grpo", "reinforce_plus_plus"):
        spec = AdvantageSpec(estimator, gamma=0.9, kl_kind="k1", end_ids=(2,))
        ((with_row, metrics),) = run_ranks(advantages, 1, scorer, spec)
        ((without, truth),) = run_ranks(
            advantages, 1, scorer, AdvantageSpec(estimator, gamma=0.9, kl_kind="k1"), keep
        )
        for name in ("advantages", "returns", "token_level_rewards"):
            assert not with_row.batch[name][full].any(), name
            assert torch.allclose(with_row.batch[name][keep], without.batch[name], atol=1e-6), name
        assert metrics.pop("response_length/excluded_rows") == len(full)
        lengths = [name for name in truth if "length" in name]
        assert {k: v for k, v in metrics.items() if k not in lengths} == pytest.approx(
            {k: v for k, v in truth.items() if k not in lengths}
        )


@pytest.mark.parametrize("world", [1, 3])
def test_penalty_and_weights_reach_rewards_and_advantages(scorer, world):
    plain = AdvantageSpec("grpo")
    spec = AdvantageSpec(
        "grpo", overlong=SoftOverlong(5, 5, 2.0), correction=Correction("token", 1.1, mask=(0.5, 2.0))
    )
    rewards = torch.cat(
        [r.batch["token_level_rewards"] for r, _ in run_ranks(advantages, world, scorer, spec)]
    )
    data = rows_of(batch(7))
    lengths = data.batch["response_mask"].sum(-1)
    expected = data.batch["rm_scores"].sum(-1) - 2.0 * lengths / 5
    assert torch.allclose(rewards.sum(-1), expected, atol=1e-6)
    only = AdvantageSpec("grpo", correction=spec.correction)
    weighted, metrics = zip(*run_ranks(advantages, world, scorer, only), strict=True)
    unweighted = torch.cat([r.batch["advantages"] for r, _ in run_ranks(advantages, world, scorer, plain)])
    ratio = (data.batch["old_log_probs"] - data.batch["rollout_log_probs"]).exp()
    weights = torch.where((ratio >= 0.5) & (ratio <= 2.0), ratio.clamp(max=1.1), 0.0)
    found = torch.cat([part.batch["advantages"] for part in weighted])
    assert torch.allclose(found, unweighted * weights, atol=1e-6)
    kept = data.batch["response_mask"].bool()
    for told in metrics:
        assert told["rollout_corr/rollout_is_mean"] == pytest.approx(weights[kept].mean().item(), rel=1e-5)
