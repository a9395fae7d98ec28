"""Sharded checkpoints of a trained model on real gloo ranks: the same under any layout."""

import ctypes
import threading
from pathlib import Path

import pytest
import torch
from gloo import run_ranks
from hf_reference import random_batch
from megatron.core import dist_checkpointing
from parallel_runs import build, exported, infer_log_probs, save, total_loss, train_policy
from tiny import tiny_checkpoint
from transformers import AutoModelForCausalLM

from rolemesh.parallel.checkpoint import STATES, ShardSave, load_shards
from rolemesh.parallel.checkpoint_error import CheckpointError
from rolemesh.parallel.durable_files import HashedFile
from rolemesh.parallel.optim import OptimConfig
from rolemesh.parallel.weights import convert
from rolemesh.parallel.weights.checkpoint import Checkpoint
from rolemesh.placement.layout import Layout

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
OPTIM = OptimConfig(lr=1e-3, schedule="cosine", total_steps=10, warmup_steps=2)
BATCH = random_batch(6)


def next_update(model):
    """Loss of this rank's replica, gradient norm and rate of one update, and this rank's weights after it."""
    result = train_policy(model, BATCH)
    return total_loss(result), result.grad_norm, result.lr, exported(model)


def saved(path: Path, layout: Layout, folder: Path, dtype: torch.dtype, updates: int = 2):
    """What the update after a save gives, on every rank."""

    def on_rank(rank, world):
        model = build(path, layout, optim=OPTIM, dtype=dtype)
        for _ in range(updates):
            train_policy(model, BATCH)
        save(model, folder)
        return next_update(model)

    return run_ranks(on_rank, layout.world)


def loaded(path: Path, layout: Layout, folder: Path, dtype: torch.dtype):
    """What the first update after a load gives, on every rank; the model has moved away before."""

    def on_rank(rank, world):
        model = build(path, layout, optim=OPTIM, dtype=dtype)
        train_policy(model, BATCH)
        load_shards(model, folder)
        return next_update(model)

    return run_ranks(on_rank, layout.world)


def weights(results) -> dict[str, torch.Tensor]:
    return {name: tensor for *_, part in results for name, tensor in part.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_layout_goes_on_bit_for_bit(tmp_path, dtype):
    path, layout = tiny_checkpoint(tmp_path / "m", "qwen3", tied=True), Layout(tp=2, dp=2)
    truth = saved(path, layout, tmp_path / "c", dtype)
    again = loaded(path, layout, tmp_path / "c", dtype)
    assert [result[:3] for result in again] == [result[:3] for result in truth]
    one, other = weights(truth), weights(again)
    assert all(torch.equal(one[name], other[name]) for name in one)


CHANGES = [
    (Layout(tp=2), Layout(pp=2)),
    (Layout(dp=3), Layout(tp=2, pp=2)),
    (Layout(tp=2, pp=2, sequence_parallel=True), Layout(dp=2)),
    (Layout(pp=2, dp=2), Layout(tp=4)),
]


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=lambda layout: str(layout).replace(" ", ""))
def test_another_layout_goes_on_within_1e_5(tmp_path, before, after):
    """Tied weights, a vocabulary that tp pads, more tp ranks than KV heads."""
    path = tiny_checkpoint(tmp_path / "m", "qwen2", tied=True, vocab=101)
    truth = saved(path, before, tmp_path / "c", torch.float32)
    other = loaded(path, after, tmp_path / "c", torch.float32)
    assert other[0][1] == pytest.approx(truth[0][1], rel=1e-5)
    assert other[0][2] == truth[0][2]
    one, two = weights(truth), weights(other)
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-5


def test_a_model_that_was_never_updated_is_saved_too(tmp_path):
    """A critic's warm-up leaves the actor as it was."""
    path = tiny_checkpoint(tmp_path / "m")
    truth = saved(path, Layout(dp=2), tmp_path / "c", torch.float32, updates=0)
    again = loaded(path, Layout(dp=2), tmp_path / "c", torch.float32)
    assert [result[:3] for result in again] == [result[:3] for result in truth]


def test_megatron_cores_own_loader_reads_it(tmp_path):
    path = tiny_checkpoint(tmp_path / "m")

    def on_rank(rank, world):
        save(build(path, Layout(tp=2), optim=OPTIM), tmp_path / "c")
        return dist_checkpointing.load_plain_tensors(str(tmp_path / "c"))

    held = run_ranks(on_rank, 2)[0]
    with Checkpoint(path) as source:
        for name in source.names:
            whole = source.read(name, (slice(None),))
            assert torch.equal(held[f"param.{name}"], whole), name
            assert all(held[f"{state}.{name}"].shape == whole.shape for state in STATES)


def test_another_models_checkpoint_is_refused_with_the_difference(tmp_path):
    path, other = tiny_checkpoint(tmp_path / "m"), tiny_checkpoint(tmp_path / "o", layers=3)

    def on_rank(rank, world):
        save(build(path, Layout(), optim=OPTIM), tmp_path / "c")
        with pytest.raises(CheckpointError, match=r"another model: n_layers 2 \(here 3\)"):
            load_shards(build(other, Layout(), optim=OPTIM), tmp_path / "c")
        with pytest.raises(CheckpointError, match="no optimizer"):
            ShardSave(build(path, Layout()), tmp_path / "c")

    run_ranks(on_rank, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_converted_it_is_the_model_as_trained(tmp_path, dtype):
    """Bit for bit what an export from the ranks gives, in files of several shards."""
    path = tiny_checkpoint(tmp_path / "m", "qwen2", tied=True, vocab=101)
    layout = Layout(pp=2, dp=2)

    def on_rank(rank, world):
        model = build(path, layout, optim=OPTIM, dtype=dtype)
        train_policy(model, BATCH)
        save(model, tmp_path / "c")
        return exported(model), infer_log_probs(model, BATCH, size=6)

    results = run_ranks(on_rank, layout.world)
    truth = {name: tensor for part, _ in results for name, tensor in part.items()}
    convert(tmp_path / "c", path, tmp_path / "out", dtype=dtype, max_shard_bytes=50_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    with Checkpoint(tmp_path / "out") as out, Checkpoint(path) as source:
        assert out.names == source.names == truth.keys()
        for name in out.names:
            assert torch.equal(out.read(name, (slice(None),)), truth[name]), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == dtype
    with pytest.raises(FileExistsError, match="exists already"):
        convert(tmp_path / "c", path, tmp_path / "out", dtype=dtype)


def status_bytes(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def test_saving_holds_one_copy_of_the_ranks_shard_in_host_memory(tmp_path):
    """Peak resident memory during the save, of 4 ranks that share one model's state."""
    path = tiny_checkpoint(tmp_path / "m", hidden=512, layers=6, vocab=1000)
    layout = Layout(dp=4)

    def on_rank(rank, world):
        model = build(path, layout, optim=OPTIM)
        train_policy(model, BATCH)
        shards = [model.optimizer.shard_of(parameter) for _, parameter in model.named_parameters()]
        shard_bytes = sum(flat.nbytes for shard in shards if shard for flat in shard.states.values())
        del shards
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is not there to be filled unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = status_bytes("VmRSS")
        save(model, tmp_path / "c")
        return (status_bytes("VmHWM") - before) / shard_bytes, shard_bytes

    for share, shard_bytes in run_ranks(on_rank, layout.world, timeout=400):
        assert shard_bytes > 20 << 20
        assert share < 1.2


def test_a_save_given_up_stops_writing(tmp_path):
    path = tiny_checkpoint(tmp_path / "m")

    def on_rank(rank, world):
        model = build(path, Layout(), optim=OPTIM)
        (tmp_path / "c").mkdir()
        go, write = threading.Event(), HashedFile.write

        def held(self, data):
            assert go.wait(60)
            return write(self, data)

        HashedFile.write = held
        saving = ShardSave(model, tmp_path / "c")
        threading.Timer(0.5, go.set).start()
        saving.cancel()
        return saving.progress()

    (progress,) = run_ranks(on_rank, 1)
    assert not progress.done
    assert "given up" in progress.error
