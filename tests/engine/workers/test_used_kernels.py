"""Which kernels the roles' operations run, and that no rank ever holds whole logits."""

import numpy as np
import pytest
import torch
from gloo import run_ranks
from tiny import tiny_checkpoint
from torch.profiler import ProfilerActivity, profile
from worker_runs import batch, worker

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.workers import megatron
from rolemesh.engine.workers.actor import ActorWorker, PolicyLoss
from rolemesh.engine.workers.advantage import AdvantageSpec
from rolemesh.engine.workers.critic import CriticWorker, ValueLoss
from rolemesh.engine.workers.megatron import RoleSpec
from rolemesh.engine.workers.reference import RefWorker
from rolemesh.kernels.forms import form_of, record_kernels
from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout

pytestmark = pytest.mark.full

LINEAR = "linear_log_prob_and_entropy"
WANTED = {
    "old_log_prob": {LINEAR},
    "ref_log_prob": {LINEAR},
    "update_actor": {LINEAR, "policy_loss", "kl"},
    "update_critic": {"value_loss"},
    "gae": {"gae", "kl", "masked_moments", "masked_normalize"},
    "grpo": {"group_moments"},
}


def scored_batch() -> DataProto:
    data = batch()
    rows, width = data.batch["responses"].shape
    data.batch["rm_scores"] = torch.zeros(rows, width)
    data.batch["rm_scores"][torch.arange(rows), data.batch["response_mask"].sum(-1) - 1] = torch.randn(rows)
    data.batch["ref_log_prob"] = data.batch["old_log_probs"] - 0.1
    data.non_tensor_batch["uid"] = np.array(list("aabbbcc"), dtype=object)
    return data


def kernels_by_operation(rank: int, world: int, policy: str, scorer: str) -> dict[str, set[str]]:
    data, optim = scored_batch(), OptimConfig(lr=1e-3)
    actor = worker(ActorWorker, rank, Layout(), RoleSpec(policy, "lm", optim=optim), PolicyLoss(kl_coef=0.1))
    ref = worker(RefWorker, rank, Layout(), RoleSpec(policy, "lm"))
    critic = worker(CriticWorker, rank, Layout(), RoleSpec(scorer, "value", optim=optim), ValueLoss())
    operations = {
        "old_log_prob": lambda: actor.compute_log_prob(data),
        "ref_log_prob": lambda: ref.compute_ref_log_prob(data),
        "update_actor": lambda: actor.update_actor(data),
        "update_critic": lambda: critic.update_critic(data),
        "gae": lambda: critic.compute_advantage(data, AdvantageSpec("gae", kl_kind="k1"), kl_coef=0.1),
        "grpo": lambda: actor.compute_advantage(data, AdvantageSpec("grpo")),
    }
    found = {}
    for name, operation in operations.items():
        with record_kernels() as kernels:
            operation()
        found[name] = kernels
    return found


@pytest.mark.parametrize("forced", ["", "reference"])
def test_every_operation_runs_its_kernels_in_the_form_of_the_device(forced, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLEMESH_KERNELS", forced)
    policy = tiny_checkpoint(tmp_path / "policy")
    scorer = tiny_checkpoint(tmp_path / "scorer", head="score")
    [found] = run_ranks(kernels_by_operation, 1, str(policy), str(scorer))
    form = form_of(torch.device("cpu"))
    assert (form == "reference") is (forced == "reference")
    for operation, wanted in WANTED.items():
        assert {f"{name}/{form}" for name in wanted} <= found[operation], operation
        assert {name.partition("/")[2] for name in found[operation]} == {form}, operation


def looks(rank: int, world: int, path: str) -> list[int]:
    """How often a GPU would be asked for labels that it met outside of the vocabulary: after each call."""
    devices: list[torch.device] = []
    megatron.raise_bad_labels = devices.append
    spec = RoleSpec(path, "lm", optim=OptimConfig(lr=1e-3))
    actor = worker(ActorWorker, rank, Layout(), spec, PolicyLoss(epochs=2))
    counts = []
    for operation in (actor.compute_log_prob, actor.update_actor):
        operation(batch())
        counts.append(len(devices))
    assert set(devices) == {actor.device}
    return counts


def test_bad_labels_are_asked_for_once_a_scoring_and_once_an_optimizer_step(tmp_path):
    assert run_ranks(looks, 1, str(tiny_checkpoint(tmp_path))) == [[1, 3]]


def a_padded_token(rank: int, world: int, path: str) -> str:
    """A token that the padded embedding has a row for and the model's vocabulary has not."""
    data = batch(2)
    data.batch["input_ids"][0, 6] = 131
    actor = worker(ActorWorker, rank, Layout(tp=2), RoleSpec(path, "lm"), PolicyLoss())
    assert actor.model.output_weight.shape[0] * 2 > 131
    with pytest.raises(ValueError, match="outside of the vocabulary") as error:
        actor.compute_log_prob(data)
    return str(error.value)


def test_a_token_of_the_padding_is_an_error_on_every_rank(tmp_path):
    messages = run_ranks(a_padded_token, 2, str(tiny_checkpoint(tmp_path, vocab=131)))
    assert ["131" in message for message in messages] == [True, True]


def largest_allocations(rank: int, world: int, path: str, layout: Layout) -> tuple[int, int]:
    """Bytes of the largest tensor made in an update of the actor, and in scoring."""
    data = batch(4, prompt=6, response=250, seed=1)
    spec = RoleSpec(path, "lm", optim=OptimConfig(lr=1e-3), micro_batch_tokens=1 << 20)
    actor = worker(ActorWorker, rank, layout, spec, PolicyLoss(entropy_coef=0.01))
    sizes = []
    for operation in (actor.update_actor, actor.compute_log_prob):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            operation(data)
        events = profiler.profiler.kineto_results.events()
        sizes.append(max(event.nbytes() for event in events if event.name() == "[memory]"))
    return sizes[0], sizes[1]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sequence_parallel=True)], ids=str)
def test_no_tensor_of_an_update_is_as_large_as_the_logits(layout, tied, tmp_path):
    vocab, hidden = 16384, 16
    path = str(tiny_checkpoint(tmp_path, vocab=vocab, hidden=hidden, heads=2, tied=tied))
    tokens = int(batch(4, prompt=6, response=250, seed=1).batch["response_mask"].sum())
    logits = 4 * tokens * vocab // layout.tp
    weight = 4 * hidden * vocab // layout.tp
    for update, scoring in run_ranks(largest_allocations, layout.world, path, layout):
        assert weight <= update < logits / 10  # a gradient of the weight's size, and the tiles
        assert 0 < scoring < logits / 10
