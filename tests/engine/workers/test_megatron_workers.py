"""The Megatron roles on real gloo ranks, against single-process Hugging Face models."""

import numpy as np
import pytest
import torch
from gloo import run_ranks
from tiny import tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from worker_runs import batch, worker

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.workers.actor import ActorWorker, PolicyLoss
from rolemesh.engine.workers.advantage import AdvantageSpec
from rolemesh.engine.workers.critic import CriticWorker, ValueLoss
from rolemesh.engine.workers.megatron import RoleSpec
from rolemesh.engine.workers.mini_batches import plan_mini_batches
from rolemesh.engine.workers.reference import RefWorker
from rolemesh.engine.workers.reward import RewardWorker
from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout

pytestmark = pytest.mark.full
LAYOUTS = [Layout(), Layout(tp=2), Layout(dp=2), Layout(pp=2), Layout(tp=2, dp=2, sequence_parallel=True)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("policy"), "llama"))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("scorer"), "llama", head="score"))


def shard(data: DataProto, plan, dp_rank: int) -> DataProto:
    return data.select_idxs(list(plan.rows[dp_rank]))


def on_ranks(layout: Layout, call):
    """`call(rank)` on every rank of the layout; what the collect ranks returned, by replica."""
    results = run_ranks(lambda rank, world: call(rank), layout.world)
    return [results[layout.collect_rank(dp)] for dp in range(layout.dp)]


def gathered(layout: Layout, cls, spec: RoleSpec, data: DataProto, method: str, *args) -> DataProto:
    """The method's result over the whole batch, cut over dp in order."""

    def call(rank):
        part = data.chunk(layout.dp)[layout.coords(rank).dp]
        return getattr(worker(cls, rank, layout, spec, *args), method)(part)

    return DataProto.concat([part for part in on_ranks(layout, call) if part is not None])


def hf_log_probs(path: str, data: DataProto, temperature: float) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    out = torch.zeros(data.batch["responses"].shape)
    width = out.shape[1]
    for i, (ids, mask) in enumerate(zip(data.batch["input_ids"], data.batch["attention_mask"], strict=True)):
        row, n = ids[mask.bool()], int(mask[-width:].sum())
        logits = model(row[None]).logits[0].detach() / temperature
        log_probs = logits.log_softmax(-1)[torch.arange(len(row) - 1), row[1:]]
        out[i, :n] = log_probs[-n:]
    return out


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_actor_and_reference_score_responses_as_hugging_face_does(policy, layout):
    data = batch()
    truth = hf_log_probs(policy, data, temperature=0.7)
    spec = RoleSpec(policy, "lm", micro_batch_tokens=24, temperature=0.7)
    actor = gathered(layout, ActorWorker, spec, data, "compute_log_prob", PolicyLoss())
    reference = gathered(layout, RefWorker, spec, data, "compute_ref_log_prob")
    assert (actor.batch["old_log_probs"] - truth).abs().max() < 1e-4
    assert (reference.batch["ref_log_prob"] - truth).abs().max() < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_reward_model_scores_the_last_token_as_hugging_face_does(scorer, layout):
    """The score is put on the last token that the model wrote, also where it has read one more."""
    data = batch()
    mask, lengths = data.batch["response_mask"], data.batch["response_mask"].sum(-1)
    longer = lengths >= 2
    assert longer.any()
    mask[longer, lengths[longer] - 1] = 0
    model = AutoModelForSequenceClassification.from_pretrained(scorer, dtype=torch.float32)
    spec = RoleSpec(scorer, "value", micro_batch_tokens=24)
    scores = gathered(layout, RewardWorker, spec, data, "compute_rm_score").batch["rm_scores"]
    for i, (ids, mask) in enumerate(zip(data.batch["input_ids"], data.batch["attention_mask"], strict=True)):
        truth = model(ids[mask.bool()][None]).logits.item()
        last = int(data.batch["response_mask"][i].sum()) - 1
        assert scores[i, last].item() == pytest.approx(truth, abs=1e-4)
        assert scores[i].sum().item() == pytest.approx(truth, abs=1e-4)


def test_a_row_without_a_response_gets_no_score(scorer):
    data = batch(2)
    data.batch["attention_mask"][0, 6:] = 0
    spec = RoleSpec(scorer, "value")
    scores = gathered(Layout(), RewardWorker, spec, data, "compute_rm_score").batch["rm_scores"]
    assert (scores[0] == 0).all()
    assert (scores[1] != 0).any()


def update(
    layout: Layout, path: str, data: DataProto, mini_batch: int, micro_batch_tokens: int
) -> dict[str, float]:
    """Metrics of one update_actor, the same on every replica."""
    tokens = data.batch["attention_mask"].sum(-1).tolist()
    plan = plan_mini_batches(tokens, mini_batch, layout.dp)
    spec = RoleSpec(path, "lm", optim=OptimConfig(lr=1e-3), micro_batch_tokens=micro_batch_tokens)
    loss = PolicyLoss(epochs=2, entropy_coef=0.01)

    def call(rank):
        return worker(ActorWorker, rank, layout, spec, loss).update_actor(
            shard(data, plan, layout.coords(rank).dp), plan.sizes
        )

    first, *others = on_ranks(layout, call)
    for other in others:
        assert other == first
    return first


def test_actor_update_is_the_same_for_every_layout_and_micro_batch_size(policy):
    data = batch(7)
    truth = update(Layout(), policy, data, mini_batch=3, micro_batch_tokens=1000)
    assert truth["actor/optimizer_steps"] == 6  # two epochs of mini-batches of 3, 3 and 1 rows
    for layout, tokens in [(Layout(), 8), (Layout(dp=2), 24), (Layout(tp=2), 24), (Layout(pp=2, dp=2), 16)]:
        metrics = update(layout, policy, data, mini_batch=3, micro_batch_tokens=tokens)
        for name, value in truth.items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (layout, name)


def test_critic_update_is_the_same_for_one_micro_batch_and_for_many(scorer):
    """A loss divided per micro-batch would grow with their number."""
    data = batch(8)
    plan = plan_mini_batches([1] * 8, 8, 2)
    spec = {n: RoleSpec(scorer, "value", optim=OptimConfig(lr=1e-3), micro_batch_tokens=n) for n in (1, 4096)}

    def metrics(layout, tokens):
        rows = plan.rows if layout.dp == 2 else [range(8)]

        def call(rank):
            part = data.select_idxs(list(rows[layout.coords(rank).dp]))
            sizes = plan.sizes if layout.dp == 2 else None
            return worker(CriticWorker, rank, layout, spec[tokens], ValueLoss()).update_critic(part, sizes)

        return on_ranks(layout, call)[0]

    truth = metrics(Layout(), 4096)
    for layout, tokens in [(Layout(), 1), (Layout(dp=2), 1), (Layout(tp=2, sequence_parallel=True), 4096)]:
        other = metrics(layout, tokens)
        assert other["critic/vf_loss"] == pytest.approx(truth["critic/vf_loss"], rel=1e-5)
        assert other["critic/grad_norm"] == pytest.approx(truth["critic/grad_norm"], rel=1e-4)


def test_a_replica_without_rows_takes_part_in_the_update(policy):
    data = batch(3)
    truth = update(Layout(), policy, data, mini_batch=1, micro_batch_tokens=100)
    metrics = update(Layout(dp=2), policy, data, mini_batch=1, micro_batch_tokens=100)
    for name, value in truth.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_advantages_and_metrics_do_not_depend_on_the_sharding(scorer):
    data = batch(7)
    data.batch["rm_scores"] = torch.zeros(7, 5)
    last = data.batch["response_mask"].sum(-1) - 1
    data.batch["rm_scores"][torch.arange(7), last] = torch.randn(
        7, generator=torch.Generator().manual_seed(3)
    )
    data.batch["ref_log_prob"] = data.batch["old_log_probs"] - 0.1
    data.batch["rollout_log_probs"] = data.batch["old_log_probs"].clone()
    data.non_tensor_batch["uid"] = np.array(list("aabbbcc"), dtype=object)
    for estimator, kl_kind in (("gae", "k1"), ("grpo", None)):
        spec = AdvantageSpec(estimator, gamma=0.99, lam=0.95, kl_kind=kl_kind)

        def result(layout, spec=spec):
            def call(rank):
                made = worker(CriticWorker, rank, layout, RoleSpec(scorer, "value"), ValueLoss())
                return made.compute_advantage(
                    data.chunk(layout.dp)[layout.coords(rank).dp], spec, kl_coef=0.1
                )

            return DataProto.concat(on_ranks(layout, call))

        one, four = result(Layout()), result(Layout(dp=2, tp=2))
        for column in ("advantages", "returns", "token_level_rewards"):
            assert torch.allclose(one.batch[column], four.batch[column], atol=1e-6), column
        truth = {name: values[0] for name, values in one.meta_info["metrics"].items()}
        for replica in range(2):
            metrics = {name: values[replica] for name, values in four.meta_info["metrics"].items()}
            assert metrics == pytest.approx(truth, abs=1e-6)
