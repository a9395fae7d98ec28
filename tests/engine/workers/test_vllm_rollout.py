"""Real vLLM engines on a pool's bundles, driven by rollout workers, beside a real actor that learns."""

import importlib.util
import math
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from kept import engine_side
from safetensors.torch import load_file
from tiny import tiny_checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from rolemesh.engine.errors import WorkerError
from rolemesh.engine.future import DataProtoFuture
from rolemesh.engine.partial import PartialRollout, PartialSpec
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.ray.blocks import fetch_batch, put_batch
from rolemesh.engine.ray.cluster import local_cluster
from rolemesh.engine.ray.pools import ResourcePool
from rolemesh.engine.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup
from rolemesh.engine.rollout import SamplingOptions
from rolemesh.engine.rollout.agent import AgentSpec
from rolemesh.engine.rollout.vllm import EngineSpec
from rolemesh.engine.workers.actor import ActorWorker, PolicyLoss
from rolemesh.engine.workers.megatron import RoleSpec
from rolemesh.engine.workers.vllm_rollout import VLLMRolloutSpec, VLLMRolloutWorker
from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

WIDTH = 48
OPTIONS = SamplingOptions(64, eos_ids=(2,), pad_id=0, seed=7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("actor")
    return str(tiny_checkpoint(path, "llama", tied=True, hidden=64, heads=2, kv_heads=2))


@pytest.fixture(scope="module")
def pool() -> Iterator[ResourcePool]:
    with local_cluster(2, object_store_bytes=2**29):
        pool = ResourcePool([2], name_prefix="pool", device="cpu")
        yield pool
        pool.shutdown()


def spec(checkpoint: str, **changes: Any) -> VLLMRolloutSpec:
    """An engine that writes 8 responses at a time."""
    engine = EngineSpec(
        path=checkpoint,
        dtype="float32",
        sampling=OPTIONS,
        max_tokens=WIDTH + 64,
        kv_tokens=8192,
        max_seqs=8,
        partial=True,
    )
    return VLLMRolloutSpec(replace(engine, **changes), restarts=1)


@pytest.fixture(scope="module")
def actor(pool: ResourcePool, checkpoint: str) -> RayWorkerGroup:
    return actor_group(pool, Layout(tp=2), "actor", checkpoint)


def actor_group(pool: ResourcePool, layout: Layout, role: str, checkpoint: str) -> RayWorkerGroup:
    spec = RoleSpec(checkpoint, "lm", optim=OptimConfig(lr=1e-2))
    group = RayWorkerGroup(
        pool, RayClassWithInitArgs(ActorWorker, spec, PolicyLoss()), role=role, layout=layout
    )
    group.init_model()
    return group


def rollout_group(pool: ResourcePool, layout: Layout, role: str, spec: VLLMRolloutSpec) -> RayWorkerGroup:
    group = RayWorkerGroup(pool, RayClassWithInitArgs(VLLMRolloutWorker, spec), role=role, layout=layout)
    group.init_model()
    return group


@pytest.fixture(scope="module")
def rollout(pool: ResourcePool, actor: RayWorkerGroup, checkpoint: str) -> RayWorkerGroup:
    """Two replicas, with the actor's weights."""
    group = rollout_group(pool, Layout(dp=2), "rollout", spec(checkpoint, sleeps=True))
    group.load_weights(actor.export_weights(), version=0)
    return group


def prompts(n_rows: int) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, WIDTH + 1, (n_rows, 1), generator=generator)
    mask = (torch.arange(WIDTH) >= WIDTH - lengths).long()
    ids = torch.randint(4, 100, mask.shape, generator=generator) * mask
    return DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "row_ids": torch.arange(n_rows)})


def greedy(model: PreTrainedModel, data: DataProto) -> torch.Tensor:
    ids = model.generate(
        data.batch["input_ids"],
        attention_mask=data.batch["attention_mask"],
        do_sample=False,
        max_new_tokens=64,
        pad_token_id=0,
    )[:, WIDTH:]
    return torch.nn.functional.pad(ids, (0, 64 - ids.shape[1]))


def check_received(loading: DataProtoFuture, needed: int, ranks: Sequence[int] = (0, 1)) -> None:
    """These ranks of the rollout keep `needed` bytes each and have received hardly more."""
    for span in (loading.spans[rank] for rank in ranks):
        came = span.notes["received_bytes"] + span.notes["copied_bytes"]
        assert span.notes["kept_bytes"] == needed
        assert needed <= came <= 1.02 * needed


def test_sampled_log_probs_are_the_trainers(actor: RayWorkerGroup, rollout: RayWorkerGroup):
    check_log_probs(actor, rollout, version=0)


def check_log_probs(actor: RayWorkerGroup, rollout: RayWorkerGroup, version: int) -> None:
    written = rollout.generate_sequences(prompts(12))
    scored = actor.compute_log_prob(written)
    mask = written.batch["response_mask"].bool()
    gap = (written.batch["rollout_log_probs"] - scored.batch["old_log_probs"])[mask]
    assert gap.abs().max() < 1e-4
    assert (written.batch["weight_versions"] == torch.where(mask, version, -1)).all()
    assert "rollout/prefix_cached_share" in written.meta_info["metrics"]


def test_a_calls_spans_tell_how_many_responses_were_being_written(rollout: RayWorkerGroup):
    writing = rollout.generate_sequences(prompts(12), blocking=False)
    writing.ref()
    for span in writing.spans:
        seconds, left = zip(*span.notes["running"], strict=True)
        assert (seconds[0], left[0], left[-1]) == (0.0, 6, 0)
        assert list(left) == sorted(left, reverse=True)
        assert sorted(seconds) == list(seconds)
        assert seconds[-1] <= span.end_s - span.start_s + 0.01


def test_after_an_update_greedy_output_is_that_of_transformers_on_the_exported_weights(
    actor: RayWorkerGroup, rollout: RayWorkerGroup, tmp_path: Path
):
    check_update(actor, rollout, tmp_path)


def test_and_so_it_is_where_the_actor_is_cut_into_pipeline_stages(
    pool: ResourcePool, rollout: RayWorkerGroup, checkpoint: str, tmp_path: Path
):
    staged = actor_group(pool, Layout(pp=2), "staged", checkpoint)
    check_update(staged, rollout, tmp_path)
    check_log_probs(staged, rollout, version=1)


def check_update(actor: RayWorkerGroup, rollout: RayWorkerGroup, tmp_path: Path) -> None:
    before = rollout.generate_sequences(prompts(6), greedy=True)
    batch = rollout.generate_sequences(prompts(8))
    batch = batch.union(actor.compute_log_prob(batch))
    batch.batch["advantages"] = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    actor.update_actor(batch)
    actor.save_hf(str(tmp_path / "export"))
    loading = rollout.load_weights(actor.export_weights(), version=1, blocking=False)
    loading.get()
    shards = [load_file(shard) for shard in (tmp_path / "export").glob("*.safetensors")]
    check_received(loading, sum(tensor.nbytes for shard in shards for tensor in shard.values()))
    assert all(span.notes["received_bytes"] > span.notes["kept_bytes"] / 4 for span in loading.spans)
    after = rollout.generate_sequences(prompts(6), greedy=True)
    want = greedy(AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32), prompts(6))
    assert torch.equal(after.batch["responses"], want)
    assert not torch.equal(before.batch["responses"], want)
    assert after.batch["weight_versions"].max() == 1


def test_a_baseline_is_the_greedy_answer_of_each_prompt_on_its_samples_rows(rollout: RayWorkerGroup):
    data = prompts(3)
    data.non_tensor_batch["uid"] = torch.arange(3).numpy().astype(str).astype(object)
    data = data.repeat(2, interleave=True)
    data.batch["row_ids"] = torch.arange(6)
    samples = rollout.generate_sequences(data)
    samples.non_tensor_batch["uid"] = data.non_tensor_batch["uid"]
    baseline = rollout.generate_baseline(samples).batch["baseline_responses"]
    answers = rollout.generate_sequences(data, greedy=True).batch["responses"]
    assert torch.equal(baseline, answers)


def test_aborted_responses_come_back_as_they_are_and_are_continued(rollout: RayWorkerGroup):
    data = prompts(64)
    running, some = rollout.generate_sequences(data, blocking=False), threading.Event()
    running.on_part(lambda part: some.set())
    assert some.wait(60)
    rollout.ask("abort")
    begun = running.get()
    left = (~begun.batch["finished"]).sum()
    assert 0 < left < 64
    begun.batch["row_ids"] = data.batch["row_ids"]
    whole = rollout.generate_sequences(begun)
    assert whole.batch["finished"].all()
    kept = begun.batch["response_mask"].bool()
    assert torch.equal(whole.batch["responses"][kept], begun.batch["responses"][kept])
    assert whole.batch["response_mask"].sum() > kept.sum()


def test_a_partial_step_takes_the_first_finished_groups_and_the_next_one_writes_the_others_on(
    actor: RayWorkerGroup, rollout: RayWorkerGroup
):
    partial = PartialRollout(PartialSpec(0.5, 64), rollout, lambda data: put_batch(data, {1, 2}), fetch_batch)
    seen: dict[str, int] = {}
    for step in (1, 2, 3):
        data = prompts(32)
        data.batch["row_ids"] += step << 32
        data.non_tensor_batch["uid"] = np.array([str(row // 2) for row in range(32)], dtype=object)
        rollout.load_weights(actor.export_weights(), version=step)
        n_begun = 0 if partial.begun is None else len(partial.begun)
        made = partial.generate(data, step, wait=step == 3)
        batch = fetch_batch(made.batch)
        left = 0 if partial.begun is None else len(partial.begun)
        assert made.metrics["partial/continued_rows"] == n_begun
        assert len(batch) + left == n_begun + 32
        assert (left > 0) == (step < 3)
        assert made.seconds > 0
        for uid in batch.non_tensor_batch["uid"]:
            seen[uid] = seen.get(uid, 0) + 1
        mask, versions = batch.batch["response_mask"].bool(), batch.batch["weight_versions"]
        assert (versions[mask] <= step).all()
        assert (versions[~mask] == -1).all()
        first = torch.tensor([int(uid.split(".")[0]) for uid in batch.non_tensor_batch["uid"]])
        assert (versions[:, 0] >= first).all()
    assert seen == {f"{step}.{group}": 2 for step in (1, 2, 3) for group in range(16)}
    assert (versions.max(1).values > versions[:, 0]).any(), "some samples are of several versions"


@pytest.mark.slow
def test_a_killed_engine_is_replaced_with_the_current_weights_and_its_rows_written_again(
    rollout: RayWorkerGroup,
):
    data = prompts(96)
    whole = rollout.generate_sequences(data)
    pids = rollout.ask("engine_pid")
    running, some = rollout.generate_sequences(data, blocking=False), threading.Event()
    running.on_part(lambda part: some.set())
    assert some.wait(60)
    os.kill(pids[0], signal.SIGKILL)
    again = running.get()
    for name in ("responses", "response_mask", "weight_versions"):
        assert torch.equal(again.batch[name], whole.batch[name]), name
    assert sorted(again.meta_info["metrics"]["rollout/engine_restarts"]) == [0, 1]
    new = rollout.ask("engine_pid")
    assert new[0] != pids[0]
    assert new[1] == pids[1]


@pytest.mark.slow
def test_an_engine_that_dies_too_often_ends_the_call_and_says_so(
    pool: ResourcePool, actor: RayWorkerGroup, checkpoint: str
):
    group = rollout_group(pool, Layout(dp=2), "mortal", replace(spec(checkpoint), restarts=0))
    group.load_weights(actor.export_weights())
    for pid in group.ask("engine_pid"):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"(?s)the vLLM engine of mortal .*died.*engine_restarts allows no"):
        group.generate_sequences(prompts(4))


@pytest.mark.slow
def test_an_engine_over_two_devices_writes_what_one_on_a_single_device_writes(
    pool: ResourcePool, actor: RayWorkerGroup, rollout: RayWorkerGroup, checkpoint: str
):
    wide = rollout_group(pool, Layout(tp=2), "wide", spec(checkpoint, tp=2, sleeps=True))
    rollout.load_weights(actor.export_weights(), version=5)
    loading = wide.load_weights(actor.export_weights(), version=5, blocking=False)
    loading.get()
    side = engine_side(Path(checkpoint), tp=2)
    for rank in range(2):
        needed = sum(4 * math.prod(s.stop - s.start for s in part) for _, part in side.parts(rank))
        check_received(loading, needed, [rank])
    pids = wide.ask("engine_pid")
    assert pids[1] is None
    for greedy_too in (False, True):
        one, two = (group.generate_sequences(prompts(12), greedy=greedy_too) for group in (rollout, wide))
        assert torch.equal(one.batch["responses"], two.batch["responses"])
        torch.testing.assert_close(
            one.batch["rollout_log_probs"], two.batch["rollout_log_probs"], atol=1e-4, rtol=0
        )
    children = psutil.Process(pids[0]).children(recursive=True)
    workers = [child for child in children if "Worker_TP" in " ".join(child.cmdline())]
    assert len(workers) == 2, [child.cmdline() for child in children]
    workers[1].kill()  # vLLM's own: the engine fails, and is replaced as a whole
    again = wide.generate_sequences(prompts(12), greedy=True)
    assert torch.equal(again.batch["responses"], two.batch["responses"])
    assert again.meta_info["metrics"]["rollout/engine_restarts"] == [1]


AGENT = """
import os, signal, time

class Agent:
    def __init__(self, row, tokenizer):
        self.turns = 0

    def step(self, token_ids, text):
        self.turns += 1
        if self.turns == 2:
            return None
        if os.path.exists(victim := __file__ + ".victim"):
            pid = int(open(victim).read())
            os.remove(victim)
            os.kill(pid, signal.SIGKILL)
        return [30, 31, 32]
"""


@pytest.mark.slow
def test_conversations_go_on_with_the_engine_that_takes_the_place_of_a_dead_one(
    pool: ResourcePool, actor: RayWorkerGroup, checkpoint: str, tmp_path: Path
):
    (tmp_path / "agent.py").write_text(AGENT)
    talking = VLLMRolloutSpec(
        replace(
            spec(checkpoint).engine, partial=False, sampling=replace(OPTIONS, eos_ids=(2, *range(50, 60)))
        ),
        restarts=1,
        agent=AgentSpec(f"{tmp_path}/agent.py:Agent", checkpoint),
    )
    group = rollout_group(pool, Layout(dp=2), "talking", talking)
    group.load_weights(actor.export_weights(), version=2)
    whole = group.generate_sequences(prompts(24))
    mask = whole.batch["response_mask"].bool()
    scored = actor.compute_log_prob(whole)
    gap = (whole.batch["rollout_log_probs"] - scored.batch["old_log_probs"])[mask]
    assert gap.abs().max() < 1e-4
    assert whole.batch["num_turns"].max() == 2
    between = whole.batch["attention_mask"][:, WIDTH:].bool() & ~mask
    assert set(whole.batch["responses"][between].tolist()) == {30, 31, 32}
    (tmp_path / "agent.py.victim").write_text(str(group.ask("engine_pid")[0]))
    again = group.generate_sequences(prompts(24))
    assert again.meta_info["metrics"]["rollout/engine_restarts"] in ([0, 1], [1, 0])
    for name in ("responses", "response_mask", "weight_versions", "num_turns"):
        assert torch.equal(again.batch[name], whole.batch[name]), name
