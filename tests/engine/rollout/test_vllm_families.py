"""Every family, from the ranks of a real actor into a real vLLM engine: against transformers and the actor.

An actor of each layout takes a step and gives its weights as it does in a run. The engine writes greedily
what transformers does from the folder that the actor exports, and samples with the actor's own log-probs.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from kept import engine_side
from store_process import serving_store
from tiny import Family, tiny_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm_samples import Writer, ask, greedy, prompts
from worker_runs import batch, worker

from rolemesh.engine.rollout import SamplingOptions
from rolemesh.engine.rollout.kept_weights import WeightKeeper
from rolemesh.engine.rollout.vllm import EngineSpec
from rolemesh.engine.workers.actor import ActorWorker, PolicyLoss
from rolemesh.engine.workers.megatron import RoleSpec
from rolemesh.engine.workers.weights import take
from rolemesh.parallel import cpu_device
from rolemesh.parallel.lora import LoraConfig
from rolemesh.parallel.optim import OptimConfig
from rolemesh.parallel.weights.transfer_link import Meeting
from rolemesh.placement.layout import Layout

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
cpu_device.install()

OPTIONS = SamplingOptions(24, eos_ids=(2,), pad_id=0, seed=7)
PROMPTS = prompts([60, 40, 9, 1], 60)
SIZES = {"hidden": 64, "heads": 2, "kv_heads": 2, "layers": 4}  # heads of 32: the smallest of vLLM on a CPU
LATENT = {"num_key_value_heads": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}  # the only ones there
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}
PP2, TP2, EP2 = Layout(pp=2), Layout(tp=2), Layout(tp=2, ep=2, sequence_parallel=True)


@dataclass(frozen=True)
class Case:
    """A model, the layouts of actors that give it, and what else their role is told."""

    family: Family
    layouts: tuple[Layout, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    role: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case(
        "llama",
        (
            PP2,
            Layout(pp=2, pp_layers=(1, 3)),
            Layout(pp=2, vpp=2),
            Layout(tp=2, pp=2),
            Layout(tp=2, pp=2, vpp=2, sequence_parallel=True),
        ),
    ),
    "llama 3.1": Case("llama", (TP2,), {"rope_parameters": LLAMA3}),
    "mistral, in host memory between turns": Case("mistral", (PP2,), role={"offload": True}),
    "qwen2, tied": Case("qwen2", (PP2,), {"tied": True}),
    "qwen3, by adapters": Case("qwen3", (TP2,), role={"lora": LoraConfig(rank=4, alpha=8.0)}),
    "qwen3_moe": Case("qwen3_moe", (EP2, PP2)),
    "mixtral": Case("mixtral", (EP2,)),
    "deepseek_v2": Case("deepseek_v2", (PP2, EP2), LATENT),
    "deepseek_v3": Case("deepseek_v3", (EP2, PP2), LATENT),
}


@pytest.fixture(scope="module")
def writer() -> Iterator[Writer]:
    with Writer() as writer:
        yield writer


def given(
    rank: int, world: int, path: Path, layout: Layout, role: dict, port: int, vllm: Connection, out: Path
) -> tuple[Tensor, float]:
    """A step of the actor, its weights to every rank, the first one's to vLLM; the greedy responses, and how
    far apart the log-probs of the sampled ones are.
    """
    spec = RoleSpec(str(path), "lm", optim=OptimConfig(lr=3e-2), **role)
    actor = worker(ActorWorker, rank, layout, spec, PolicyLoss())
    actor.update_actor(batch(8).chunk(layout.dp)[layout.coords(rank).dp])
    actor.save_hf(str(out))
    side = replace(engine_side(path), replicas=world)
    keeper = WeightKeeper(side, 0)
    actor.export_weights(meeting := Meeting("a>b", "1", "127.0.0.1", port, world, world, True, 60.0))
    for _ in take(actor, meeting, side, keeper.place):
        pass
    notes = actor.context.notes
    assert keeper.n_bytes <= notes["received_bytes"] + notes["copied_bytes"] <= 1.02 * keeper.n_bytes
    written = [ask(vllm, (keeper.weights, PROMPTS)) if rank == 0 else None]
    dist.broadcast_object_list(written)
    sampled, likeliest = written[0]
    mine = sampled.chunk(layout.dp)[layout.coords(rank).dp]
    gap, scored = 0.0, actor.compute_log_prob(mine)
    if scored is not None:
        mask = mine.batch["response_mask"].bool()
        assert mask.sum() > 20
        gap = float((mine.batch["rollout_log_probs"] - scored.batch["old_log_probs"])[mask].abs().max())
    return likeliest.batch["responses"], gap


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_after_an_update_vllm_writes_what_transformers_does_and_samples_with_the_actors_log_probs(
    tmp_path: Path, writer: Writer, case: Case
):
    path = tiny_checkpoint(tmp_path / "model", case.family, **SIZES | case.settings)
    writer.start(EngineSpec(path=str(path), dtype="float32", sampling=OPTIONS, max_tokens=84, kv_tokens=1024))
    before = greedy(AutoModelForCausalLM.from_pretrained(path), PROMPTS, OPTIONS)
    for n, layout in enumerate(case.layouts):
        out = tmp_path / f"export{n}"
        with serving_store() as port:
            ranks = run_ranks(given, layout.world, path, layout, case.role, port, writer.asking, out)
        want = greedy(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), PROMPTS, OPTIONS)
        assert not torch.equal(want, before), "the update shows"
        for responses, gap in ranks:
            assert torch.equal(responses, want), layout
            assert gap < 1e-3, layout
        print(layout, max(gap for _, gap in ranks))  # what is reached: pytest -s
