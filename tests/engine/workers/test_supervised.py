"""Supervised workers on real gloo ranks: loss, gradient and held-out figures are those of transformers."""

import math

import pytest
import torch
from gloo import run_ranks
from hf_reference import adamw_step, gradients, norm
from tiny import tiny_checkpoint
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from worker_runs import batch, worker

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.workers.megatron import RoleSpec
from rolemesh.engine.workers.mini_batches import plan_mini_batches
from rolemesh.engine.workers.pairs import PairsWorker
from rolemesh.engine.workers.sft import SftWorker
from rolemesh.parallel.optim import OptimConfig
from rolemesh.parallel.weights import export_hf
from rolemesh.placement.layout import Layout

pytestmark = pytest.mark.full
# With such an epsilon Adam's first step is -g / (|g| + 1): every parameter shows its own gradient.
PROBE = OptimConfig(lr=1.0, eps=1.0, weight_decay=0.0, clip_grad=None)
CUTS = [
    (Layout(), 1000),
    (Layout(), 8),
    (Layout(dp=2), 24),
    (Layout(dp=3), 8),
    (Layout(tp=2, sequence_parallel=True), 24),
    (Layout(pp=2), 16),
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("policy"), "llama"))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("scorer"), "llama", head="score"))


def examples() -> DataProto:
    """Answers of all lengths, some with tokens in between that do not count."""
    data = batch(5)
    data.batch["response_mask"][0, 1] = 0
    data.batch["response_mask"][2, 0] = 0
    return data


def pairs() -> DataProto:
    """Two sequences of other lengths in each row."""
    chosen, rejected = batch(5, seed=1), batch(5, seed=2)
    return DataProto.from_dict(
        {
            name: torch.cat([chosen.batch[name], rejected.batch[name]], dim=1)
            for name in ("input_ids", "attention_mask")
        }
    )


def run(rank: int, world: int, layout: Layout, tokens: int, cls: type, path: str, data: DataProto) -> dict:
    """Held-out figures, an update, and the weights after it; rows cut over dp as in a run."""
    head = "lm" if cls is SftWorker else "value"
    spec = RoleSpec(path, head, optim=PROBE, micro_batch_tokens=tokens)
    made = worker(cls, rank, layout, spec)
    plan = plan_mini_batches(data.batch["attention_mask"].sum(-1).tolist(), len(data), layout.dp)
    part = data.select_idxs(list(plan.rows[layout.coords(rank).dp]))
    before = made.evaluate(part)
    update = made.update(part, plan.sizes)
    model = made.model
    weights = dict(export_hf(model.module, model.shape, layout, model.groups, head=head))
    return {"before": before, "update": update, "weights": weights}


def check(cls: type, path: str, data: DataProto, model: torch.nn.Module, truth: dict) -> None:
    """`truth` holds the figures by transformers, its `loss` with the graph."""
    loss = truth["loss"]
    grads = gradients(model, loss)
    probed = adamw_step(model, grads, lr=1.0, eps=1.0).state_dict()
    for layout, tokens in CUTS:
        ranks = run_ranks(run, layout.world, layout, tokens, cls, path, data)
        for dp in range(layout.dp):
            found = ranks[layout.collect_rank(dp)]
            for name, value in truth.items():
                value = float(value.detach())
                assert found["before"][f"val/{name}"] == pytest.approx(value, rel=1e-5), (layout, name)
                assert found["update"][f"train/{name}"] == pytest.approx(value, rel=1e-5)
            assert found["update"]["train/grad_norm"] == pytest.approx(norm(grads), rel=1e-4)
        weights = {name: tensor for found in ranks for name, tensor in found["weights"].items()}
        assert weights.keys() == probed.keys()
        gap = max(float((weights[name] - probed[name]).abs().max()) for name in weights)
        assert gap < 1e-5, (layout, tokens)


def test_the_loss_of_fine_tuning_and_its_gradient_are_those_of_transformers_however_the_batch_is_cut(policy):
    data = examples()
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    losses = []
    for ids, mask, counts in zip(
        data.batch["input_ids"], data.batch["attention_mask"].bool(), data.batch["response_mask"], strict=True
    ):
        labels = torch.full_like(ids, -100)
        labels[-len(counts) :] = torch.where(counts.bool(), ids[-len(counts) :], -100)
        logits = model(ids[mask][None]).logits[0, :-1]
        losses.append(cross_entropy(logits, labels[mask][1:], ignore_index=-100, reduction="sum"))
    truth = {"loss": sum(losses) / data.batch["response_mask"].sum()}
    check(SftWorker, policy, data, model, truth)


def test_the_loss_of_pairs_and_its_gradient_are_those_of_transformers_however_the_batch_is_cut(scorer):
    data = pairs()
    model = AutoModelForSequenceClassification.from_pretrained(scorer, dtype=torch.float32)
    width = data.batch["input_ids"].shape[1] // 2
    scores = []
    for side in (slice(0, width), slice(width, 2 * width)):
        both = zip(data.batch["input_ids"][:, side], data.batch["attention_mask"][:, side], strict=True)
        scores.append(torch.stack([model(ids[mask.bool()][None]).logits[0, 0] for ids, mask in both]))
    chosen, rejected = scores
    truth = {
        "loss": -logsigmoid(chosen - rejected).mean(),
        "accuracy": (chosen > rejected).double().mean(),
        "chosen_score": chosen.mean(),
        "rejected_score": rejected.mean(),
    }
    assert 0 < float(truth["accuracy"]) < 1  # both kinds of pairs are there
    check(PairsWorker, scorer, data, model, truth)


def test_a_language_model_gives_a_reward_model_whose_first_loss_is_log_2(policy):
    def first(rank: int, world: int) -> dict:
        spec = RoleSpec(policy, "value", optim=OptimConfig(lr=1e-2), new_head=True)
        made = worker(PairsWorker, rank, Layout(), spec)
        return [made.update(pairs())["train/loss"] for _ in range(5)]

    (losses,) = run_ranks(first, 1)
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6)
    assert losses[-1] < 0.9 * losses[0]
