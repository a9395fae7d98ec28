"""Worker groups without Ray on real gloo ranks: sharding, results by handle, weights, questions, failures."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks

from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.errors import WorkerError
from rolemesh.engine.parts import Part
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.spmd.held import fetch_batch, put_batch
from rolemesh.engine.spmd.rank import World
from rolemesh.engine.spmd.worker_group import Everywhere, SpmdWorkerGroup
from rolemesh.engine.worker import Worker
from rolemesh.engine.workers.weights import give, gives_weights, take, takes_weights
from rolemesh.parallel.weights.transfer_link import Meeting
from rolemesh.parallel.weights.transfer_sides import EngineSide, MegatronSide
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]
SHAPE = ModelShape("llama", 2, 32, 64, 4, 2, 8, 101, 64)


class Worked(Worker):
    """Tells what it was given."""

    @register(Dispatch.DP_COMPUTE_PROTO)
    def seen_by(self, data: DataProto) -> DataProto:
        rank = torch.full((len(data),), self.rank)
        return DataProto.from_dict(tensors={"rank": rank, "twice": data.batch["x"] * 2})

    @register(Dispatch.DP_COMPUTE_PROTO, parts=True)
    def backwards(self, data: DataProto) -> Iterator[Part]:
        for row in reversed(range(len(data))):
            yield Part([row], DataProto.from_dict(tensors={"same": data.batch["x"][[row]]}))

    @gives_weights
    def export(self, meeting: Meeting) -> None:
        side = MegatronSide(SHAPE, Layout(tp=self.world_size), torch.float32)
        tensors = {}
        for name, cut in side.holdings()[self.rank].items():
            tensors[name] = torch.zeros(cut.shape)
            for piece in cut.pieces:
                tensors[name][piece.target] = len(piece.tensor)
        give(self, meeting, side, lambda: nullcontext(tensors))

    @takes_weights
    def load(self, meeting: Meeting) -> dict[str, torch.Tensor]:
        return dict(take(self, meeting, EngineSide(SHAPE, torch.float32, replicas=self.world_size)))

    @register(Dispatch.RANK_ZERO)
    def first(self) -> int:
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def reduce_unless(self, failing_rank: int) -> float:
        if self.rank == failing_rank:
            raise ValueError(f"x on {failing_rank}")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return ones.item()

    def told(self, word: str) -> str:
        return f"{word} {self.rank}"


def world_of(rank: int, size: int, layout: Layout, port: int) -> tuple[World, SpmdWorkerGroup]:
    stores = [
        dist.TCPStore("127.0.0.1", port, is_master=rank == 0, multi_tenant=True, wait_for_workers=False)
        for _ in range(2)
    ]
    world = World(
        *stores, node="here", device="cpu", local_rank=rank, limit_s=60, meets_at=("127.0.0.1", port)
    )
    world.create("worked", Worked, (), {}, layout)
    group = SpmdWorkerGroup(
        world, Worked, layout=layout, role="worked", pool=Everywhere(), dp_sizes=[layout.dp], timeout_s=60
    )
    return world, group


def free_port() -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    return port


def calls(rank: int, size: int, layout: Layout, port: int) -> object:
    world, group = world_of(rank, size, layout, port)
    if rank:
        world.follow()
        dist.barrier()  # the store of rank 0 stays until then
        return None
    batch = put_batch(DataProto.from_dict(tensors={"x": torch.arange(5)}), [layout.dp])
    seen = group.seen_by(batch, blocking=False)
    chained = fetch_batch(group.backwards(seen.rename({"twice": "x"}), blocking=False).ref())
    for _ in range(2):  # the processes meet once
        weights = group.export(blocking=False)
        loading = group.load(weights, blocking=False)
    result = {
        "rank": seen.get().batch["rank"].tolist(),
        "twice": seen.get().batch["twice"].tolist(),
        "scattered": group.seen_by(batch, rows=[[4, 0], [2]]).batch["twice"].tolist(),
        "chained": chained.batch["same"].tolist(),
        "loaded": loading.get(),
        "given": weights.get(),
        "notes": [span.notes for span in loading.spans],
        "first": group.first(),
        "asked": group.ask("told", "rank"),
        "asked one": group.ask("told", "rank", ranks=[size - 1]),
        "spans": [span.rank for span in seen.spans],
    }
    world.end()
    dist.barrier()
    return result


def test_calls_are_cut_over_dp_and_collected_as_those_of_a_ray_group():
    result = run_ranks(calls, 2, Layout(dp=2), free_port())[0]
    assert result["rank"] == [0, 0, 0, 1, 1]
    assert result["twice"] == result["chained"] == [0, 2, 4, 6, 8]
    assert result["scattered"] == [0, 4, 8]
    assert result["given"] == [None, None]
    for loaded, notes in zip(result["loaded"], result["notes"], strict=True):
        assert len(loaded) == 21
        assert all((tensor == len(name)).all() for name, tensor in loaded.items())
        needed = sum(tensor.nbytes for tensor in loaded.values())
        assert needed <= notes["received_bytes"] + notes["copied_bytes"] <= 1.02 * needed
        assert notes["received_bytes"] > 0.2 * needed
    assert result["first"] == 0
    assert result["asked"] == ["rank 0", "rank 1"]
    assert result["asked one"] == ["rank 1"]
    assert result["spans"] == [0, 1]


def fails(rank: int, port: int, folder: Path, failing_rank: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, multi_tenant=True, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("w", store), rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    world, group = world_of(rank, 2, Layout(dp=2), port)
    start = time.monotonic()
    try:
        world.follow() if rank else group.reduce_unless(failing_rank)
    except WorkerError as error:
        (folder / "error").write_text(f"{error.rank} {time.monotonic() - start}\n{error}")
        time.sleep(1)
    except (ValueError, RuntimeError):
        pass
    os._exit(0)


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_the_rank_that_raises_is_named_while_the_other_waits_in_a_collective(tmp_path, failing_rank):
    context, port = multiprocessing.get_context("fork"), free_port()
    ranks = [context.Process(target=fails, args=(rank, port, tmp_path, failing_rank)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
    first, _, text = (tmp_path / "error").read_text().partition("\n")
    assert int(first.split()[0]) == failing_rank
    assert float(first.split()[1]) < 10
    assert f"worked rank {failing_rank} on node here failed in reduce_unless" in text
    assert f"ValueError: x on {failing_rank}" in text
