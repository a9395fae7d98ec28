"""The actor's weights in the rollout's engine, both in the same processes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gloo import run_ranks
from safetensors.torch import load_file
from store_process import serving_store
from tiny import tiny_checkpoint
from worker_runs import worker

from rolemesh.engine.rollout import SamplingOptions
from rolemesh.engine.workers.actor import ActorWorker, PolicyLoss
from rolemesh.engine.workers.megatron import RoleSpec
from rolemesh.engine.workers.rollout import RolloutSpec, RolloutWorker
from rolemesh.parallel import cpu_device
from rolemesh.parallel.weights.transfer_link import Meeting
from rolemesh.parallel.weights.transfer_plan import TransferError
from rolemesh.placement.layout import Layout

pytestmark = pytest.mark.full
cpu_device.install()


def roles(path: Path, rank: int, layout: Layout) -> tuple[ActorWorker, RolloutWorker]:
    """An actor and a rollout of one process, which have in common what a host gives its roles."""
    actor = worker(ActorWorker, rank, layout, RoleSpec(str(path), "lm"), PolicyLoss())
    sampling = SamplingOptions(max_response_tokens=2, eos_ids=(2,), pad_id=0)
    spec = RolloutSpec(str(path), "bfloat16", 10**9, sampling)
    rollout = worker(RolloutWorker, rank, Layout(dp=layout.world), spec)
    rollout.context = replace(rollout.context, shared=actor.context.shared)
    return actor, rollout


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(dp=2)], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_rollout_has_the_actors_weights_name_by_name(tmp_path, layout, tied):
    path = tiny_checkpoint(tmp_path / "model", "qwen2", tied=tied, vocab=101)
    saved = load_file(path / "model.safetensors")

    def transferred(rank: int, world: int) -> tuple[list[str], dict]:
        actor, rollout = roles(path, rank, layout)
        meeting = Meeting(
            "actor>rollout", "one", "127.0.0.1", port, world, world, together=True, limit_s=60.0
        )
        with torch.no_grad():
            for parameter in actor.model.parts[0].parameters():
                parameter.mul_(2)
        actor.export_weights(meeting)
        rollout.load_weights(meeting, version=3)
        assert rollout.version == 3
        assert rollout.engine.has_weights
        found = rollout.engine.model.state_dict()
        wrong = [n for n, tensor in saved.items() if not found[n].equal((2 * tensor).bfloat16())]
        return wrong, rollout.context.notes

    with serving_store() as port:
        results = run_ranks(transferred, 2)
    needed = 2 * sum(tensor.numel() for tensor in saved.values())
    for wrong, notes in results:
        assert not wrong
        assert needed <= notes["received_bytes"] + notes["copied_bytes"] <= 1.02 * needed
        assert (notes["received_bytes"] == 0) == (layout == Layout(dp=2))


def test_a_transfer_that_fails_leaves_the_rollout_without_weights(tmp_path):
    path = tiny_checkpoint(tmp_path / "model")

    def failed(rank: int, world: int) -> tuple[str, bool]:
        _, rollout = roles(path, rank, Layout())
        rollout.engine.has_weights = True
        meeting = Meeting("actor>rollout", "none", "127.0.0.1", 1, 1, 1, together=True, limit_s=2.0)
        with pytest.raises(TransferError) as error:
            rollout.load_weights(meeting)
        return str(error.value), rollout.engine.has_weights

    [(said, has_weights)] = run_ranks(failed, 1)
    assert said == "transfer actor>rollout: nothing was given in the process of role rank 0 on node node"
    assert not has_weights
