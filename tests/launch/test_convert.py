"""`rolemesh convert` on checkpoints written by a worker, by the command line."""

import json
import os
import subprocess
import sys

import pytest
import torch
from gloo import run_ranks
from local_group import LocalGroup
from safetensors.torch import load_file
from tiny import tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from worker_runs import worker

from rolemesh.engine.checkpoint.manifest import MANIFEST
from rolemesh.engine.checkpoint.saver import Checkpoints, TrainedRole
from rolemesh.engine.checkpoint.store import CheckpointStore
from rolemesh.engine.workers.actor import ActorWorker, PolicyLoss
from rolemesh.engine.workers.critic import CriticWorker, ValueLoss
from rolemesh.engine.workers.megatron import RoleSpec
from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run folder with checkpoints of steps 1 and 2 of a bf16 actor and an fp32 critic."""
    root = tmp_path_factory.mktemp("run")
    policy = tiny_checkpoint(root / "policy", "qwen2", tied=True, vocab=104, dtype=torch.bfloat16)
    (policy / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    scorer = tiny_checkpoint(root / "scorer", head="score")

    def on_rank(rank, world):
        optim = OptimConfig()
        actor_spec = RoleSpec(str(policy), "lm", dtype="bfloat16", optim=optim)
        critic_spec = RoleSpec(str(scorer), "value", optim=optim)
        groups = {
            "actor": LocalGroup(worker(ActorWorker, 0, Layout(), actor_spec, PolicyLoss())),
            "critic": LocalGroup(worker(CriticWorker, 0, Layout(), critic_spec, ValueLoss())),
        }
        trained = {
            role: TrainedRole(group.worker.spec.path, group.worker.spec.head, group.worker.spec.dtype)
            for role, group in groups.items()
        }
        saves = Checkpoints(CheckpointStore(root / "checkpoints"), groups, trained, "pools: {}\n")
        for step in (1, 2):
            saves.save(step, {})
            assert not saves.settle()

    run_ranks(on_rank, 1)
    return root


def convert(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "rolemesh.launch", "convert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)


def test_an_untrained_actor_comes_back_as_it_was(run_folder, tmp_path):
    done = convert(run_folder, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "actor after step 2, bfloat16" in done.stdout
    one, other = (
        load_file(run_folder / "policy" / "model.safetensors"),
        load_file(tmp_path / "out/model.safetensors"),
    )
    assert other.keys() == one.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == [2, 5]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == 2


def test_a_critic_comes_as_a_sequence_classifier(run_folder, tmp_path):
    done = convert(run_folder / "checkpoints" / "step_1", tmp_path / "out", "--role", "critic")
    assert done.returncode == 0, done.stderr
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    source = load_file(run_folder / "scorer" / "model.safetensors")
    assert torch.equal(model.score.weight, source["score.weight"])


def test_an_incomplete_checkpoint_is_refused_and_leaves_nothing(run_folder, tmp_path):
    path = run_folder / "checkpoints" / "step_2"
    shard = path / "actor" / "__0_0.distcp"
    content = shard.read_bytes()
    try:
        shard.write_bytes(content[: len(content) // 2])
        done = convert(path, tmp_path / "out")
        assert done.returncode == 1
        assert "wrong size of actor/__0_0.distcp" in done.stderr
        newest = convert(run_folder, tmp_path / "other")
        assert newest.returncode == 0
        assert "skipped step_2" in newest.stdout
        assert "actor after step 1" in newest.stdout
    finally:
        shard.write_bytes(content)
    manifest = (path / MANIFEST).read_bytes()
    (path / MANIFEST).unlink()
    done = convert(path, tmp_path / "out")
    (path / MANIFEST).write_bytes(manifest)
    assert done.returncode == 1
    assert "it was not finished" in done.stderr
    assert os.listdir(tmp_path) == ["other"]


def test_a_role_that_is_not_there_is_named(run_folder, tmp_path):
    done = convert(run_folder, tmp_path / "out", "--role", "ref")
    assert done.returncode == 1
    assert "has no role ref; it has actor, critic" in done.stderr
