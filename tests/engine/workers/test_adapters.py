"""An actor with adapters is its own reference; what waits in host memory changes no result."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from tiny import tiny_checkpoint
from worker_runs import batch, worker

from rolemesh.engine.workers.actor import ActorWorker, PolicyLoss
from rolemesh.engine.workers.megatron import RoleSpec
from rolemesh.engine.workers.reference import RefWorker
from rolemesh.parallel.lora import LoraConfig
from rolemesh.parallel.optim import OptimConfig
from rolemesh.parallel.weights import export_hf
from rolemesh.placement.layout import Layout

pytestmark = pytest.mark.full


def test_the_reference_is_the_actor_without_its_adapters_before_and_after_updates(tmp_path: Path):
    path = str(tiny_checkpoint(tmp_path, "llama", layers=2))
    # A parameter moves by about its gradient: Adam's signs would tell rounding from nothing.
    optim = OptimConfig(lr=5.0, eps=1.0, weight_decay=0.0, clip_grad=None)

    def run(rank: int, world: int) -> list[Any]:
        found = []
        for layout, offload in ((Layout(tp=2, sequence_parallel=True), False), (Layout(cp=2), True)):
            data = batch()
            ref = worker(RefWorker, rank, layout, RoleSpec(path, "lm"))
            reference = ref.compute_ref_log_prob(data).batch["ref_log_prob"]
            spec = RoleSpec(path, "lm", optim=optim, lora=LoraConfig(4, 8.0), offload=offload)
            actor = worker(ActorWorker, rank, layout, spec, PolicyLoss())
            first = actor.compute_log_prob(data).batch["old_log_probs"]
            data.batch["old_log_probs"] = first
            for _ in range(2):
                actor.update_actor(data)
            own = actor.compute_ref_log_prob(data).batch["ref_log_prob"]
            later = actor.compute_log_prob(data).batch["old_log_probs"]
            with actor.model.use("weights"):
                model = actor.model
                exported = dict(export_hf(model.weights(), model.shape, model.layout, model.groups))
            found.append((reference, first, own, later, exported))
        return found

    by_rank = run_ranks(run, 2)
    for ranks in zip(*by_rank, strict=True):
        for reference, first, own, later, _ in ranks:
            torch.testing.assert_close(first, reference, rtol=0, atol=1e-5)
            torch.testing.assert_close(own, reference, rtol=0, atol=1e-5)
            assert (later - reference).abs().max() > 1e-3
    cut, offloaded = by_rank[0]
    torch.testing.assert_close(offloaded[3], cut[3], rtol=0, atol=1e-4)
    torch.testing.assert_close(offloaded[4], cut[4], rtol=0, atol=1e-4)


def test_an_actor_without_adapters_is_no_reference(tmp_path: Path):
    path = str(tiny_checkpoint(tmp_path, "llama", layers=2))

    def run(rank: int, world: int) -> None:
        spec = RoleSpec(path, "lm", optim=OptimConfig())
        actor = worker(ActorWorker, rank, Layout(), spec, PolicyLoss())
        with pytest.raises(RuntimeError, match="its first weights are gone"):
            actor.compute_ref_log_prob(batch())

    run_ranks(run, 1)
