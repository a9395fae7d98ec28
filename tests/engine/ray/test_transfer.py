"""Weights between worker groups: on two pools, in the same processes, in a process beside them."""

import os
import time
from contextlib import nullcontext

import pytest
import torch

from rolemesh.engine.dispatch import Dispatch, DispatchError, register
from rolemesh.engine.errors import CallError, WorkerDied, WorkerError
from rolemesh.engine.ray.pools import ResourcePool, create_pools
from rolemesh.engine.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup
from rolemesh.engine.worker import Worker
from rolemesh.engine.workers.weights import give, gives_weights, take, takes_weights
from rolemesh.parallel.weights.transfer_sides import EngineSide, MegatronSide
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape

pytestmark = [pytest.mark.full, pytest.mark.alone]

SIZES = {
    "family": "llama",
    "n_layers": 2,
    "hidden": 32,
    "ffn": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "vocab": 101,
    "max_positions": 64,
}


def whole(name: str, shape: tuple[int, ...], version: int) -> torch.Tensor:
    """A tensor's numbers: other ones for each name and version."""
    seed = sum(name.encode()) * 1000 + version
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Giver(Worker):
    """A model's shards; `fail` says what a rank does instead of sending."""

    @gives_weights
    def export_weights(self, meeting, version: int, fail: dict | None = None) -> None:
        if (fail or {}).get(self.rank) == "raise":
            raise FileNotFoundError("the giver has lost its model")
        if (fail or {}).get(self.rank) == "die":
            os._exit(7)
        side = MegatronSide(ModelShape(**SIZES), self.layout, torch.float32)
        tensors = {}
        for name, cut in side.holdings()[self.rank].items():
            tensors[name] = torch.zeros(cut.shape)
            for piece in cut.pieces:
                shape = EngineSide(side.shape, torch.float32).holdings()[0][piece.tensor].shape
                tensors[name][piece.target] = whole(piece.tensor, shape, version)[piece.source]
        give(self, meeting, side, lambda: nullcontext(tensors))

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()


class Taker(Worker):
    """Full copies, or engines cut over tp."""

    @takes_weights
    def load_weights(self, meeting, version: int, stop_at: str | None = None) -> dict:
        side = EngineSide(ModelShape(**SIZES), torch.float32, self.layout.tp, self.layout.dp)
        held, right = side.holdings()[self.rank], 0
        full = EngineSide(side.shape, torch.float32).holdings()[0]
        for name, tensor in take(self, meeting, side):
            if name == stop_at:
                raise KeyError(name)
            for piece in held[name].pieces:
                expected = whole(name, full[name].shape, version)
                right += tensor[piece.target].equal(expected[piece.source])
        return {"right": right, "pieces": sum(len(cut.pieces) for cut in held.values())}

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()


def group(pool: ResourcePool, cls: type[Worker], role: str, layout: Layout, **options) -> RayWorkerGroup:
    return RayWorkerGroup(pool, RayClassWithInitArgs(cls), role=role, layout=layout, **options)


@pytest.fixture(scope="module")
def groups(cluster):
    """Givers on pool a; takers on pool b, in pool a's processes, and in others on pool a's devices."""
    a = ResourcePool([2], 2, "a", collective_timeout_s=60.0)
    b = ResourcePool([1], name_prefix="b", collective_timeout_s=60.0)
    create_pools([a, b])
    yield {
        "actor": group(a, Giver, "actor", Layout(tp=2)),
        "apart": group(b, Taker, "apart", Layout()),
        "together": group(a, Taker, "together", Layout(dp=2)),
        "beside": group(a, Taker, "beside", Layout(tp=2), own_process=True),
    }
    for pool in (a, b):
        pool.shutdown()


@pytest.mark.parametrize("role", ["apart", "together", "beside"])
def test_weights_come_over_again_and_again_and_spans_say_how_much(groups, role):
    actor, taker = groups["actor"], groups[role]
    meetings = []
    for version in (1, 2):
        offer = actor.export_weights(version=version)
        taken = taker.load_weights(offer, version=version, blocking=False)
        results = taken.get(60)
        assert all(result["right"] == result["pieces"] > 0 for result in results)
        assert len(results) == taker.world_size
        offer.ref(10)
        check_spans(actor, taker, offer, taken, together=role == "together")
        ((*_, meeting),) = taker.meetings.values()
        meetings.append(meeting)
    assert meetings[0] is meetings[1], "the processes have met once"


def check_spans(actor, taker, offer, taken, together: bool) -> None:
    side = EngineSide(ModelShape(**SIZES), torch.float32, taker.layout.tp, taker.layout.dp)
    assert [span.rank for span in offer.spans] == list(range(actor.world_size))
    for span in taken.spans:
        needed = 4 * sum(
            torch.Size(s.stop - s.start for s in piece.target).numel()
            for cut in side.holdings()[span.rank].values()
            for piece in cut.pieces
        )
        came = span.notes["received_bytes"] + span.notes["copied_bytes"]
        assert needed <= came <= 1.02 * needed
        assert 0 < span.notes["transfer_s"] <= span.end_s - span.start_s + 0.1
    sent = sum(span.notes["sent_bytes"] for span in (taken.spans if together else offer.spans))
    assert sent > 0


def test_an_offer_is_for_one_taker_who_says_that_it_takes(groups):
    offer = groups["actor"].export_weights(version=3)
    groups["apart"].load_weights(offer, version=3)
    with pytest.raises(DispatchError, match=r"given to apart\.load_weights already: together\.load_weights"):
        groups["together"].load_weights(offer, version=3)
    with pytest.raises(DispatchError, match="ends when someone takes"):
        groups["actor"].export_weights(version=3, blocking=True)


@pytest.mark.parametrize("role", ["apart", "together", "beside"])
def test_the_givers_own_error_is_the_one_that_is_raised_and_the_next_transfer_works(groups, role):
    start = time.monotonic()
    offer = groups["actor"].export_weights(version=4, fail={1: "raise"})
    with pytest.raises(WorkerError, match=r"actor rank 1 .*\n(.*\n)*.*the giver has lost its model"):
        groups[role].load_weights(offer, version=4)
    with pytest.raises(WorkerError, match="the giver has lost its model"):
        offer.ref(10)
    assert time.monotonic() - start < 40
    offer = groups["actor"].export_weights(version=5)
    assert all(r["right"] == r["pieces"] for r in groups[role].load_weights(offer, version=5))


def test_a_taker_that_stops_halfway_is_the_error_and_the_next_transfer_works(groups):
    offer = groups["actor"].export_weights(version=6)
    with pytest.raises(WorkerError, match=r"KeyError: 'model\.norm\.weight'"):
        groups["apart"].load_weights(offer, version=6, stop_at="model.norm.weight")
    offer = groups["actor"].export_weights(version=7)
    assert all(r["right"] == r["pieces"] for r in groups["apart"].load_weights(offer, version=7))


def test_a_giver_that_dies_is_named_within_seconds(groups, cluster):
    pool = ResourcePool([2], name_prefix="mortal", collective_timeout_s=60.0)
    try:
        actor = group(pool, Giver, "mortal", Layout(tp=2))
        start = time.monotonic()
        with pytest.raises(WorkerDied, match="mortal rank 1"):
            groups["apart"].load_weights(actor.export_weights(version=8, fail={1: "die"}), version=8)
        assert time.monotonic() - start < 40
    finally:
        pool.shutdown()
    offer = groups["actor"].export_weights(version=9)
    assert all(r["right"] == r["pieces"] for r in groups["apart"].load_weights(offer, version=9))


def test_a_pool_that_is_gone_fails_both_sides_at_once(groups, cluster):
    pool = ResourcePool([1], name_prefix="gone", collective_timeout_s=60.0)
    taker = group(pool, Taker, "gone", Layout())
    pool.shutdown()
    offer = groups["actor"].export_weights(version=10)
    with pytest.raises(CallError, match="shut down"):
        taker.load_weights(offer, version=10)
    assert len(groups["actor"].pid()) == 2  # whose pool does not wait for the other one
