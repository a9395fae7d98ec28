"""Transfers between real processes: every bit arrives, only what must travel does, and every wait ends."""

import json
import random
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from safetensors.torch import load_file
from store_process import serving_store
from tiny import tiny_checkpoint
from torch import Tensor

from rolemesh.parallel.weights import load_hf
from rolemesh.parallel.weights.transfer import Links
from rolemesh.parallel.weights.transfer_exchange import TransferReport
from rolemesh.parallel.weights.transfer_link import HALVES, Meeting
from rolemesh.parallel.weights.transfer_memory import HostMemory
from rolemesh.parallel.weights.transfer_sides import EngineSide, MegatronSide, Side
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape

pytestmark = pytest.mark.full
WORLD = 8
BUCKET = 64 << 10  # smaller than the embedding, so that tensors come in parts


@dataclass(frozen=True)
class Case:
    """One transfer: `together` where both sides are the same processes; `shared` memory may be forbidden."""

    source: Layout
    target: Layout | tuple[int, int]  # Megatron's, or an engine's (tp, replicas)
    source_dtype: torch.dtype = torch.float32
    target_dtype: torch.dtype = torch.float32
    together: bool = False
    shared: bool = True


def random_layout(draw: random.Random, experts: bool) -> Layout:
    """A training layout of 4 layers, those of a pipeline even, interleaved or uneven."""
    tp, pp, dp = draw.choice([1, 2, 2, 4]), draw.choice([1, 2, 3]), draw.choice([1, 1, 2, 3])
    how: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp}
    if pp == 2:
        how |= draw.choice([{}, {"vpp": 2}, {"pp_layers": (1, 3)}])
    if experts:
        etp = draw.choice([1, tp])
        ep = draw.choice([n for n in (1, 2, 4) if dp * tp // etp % n == 0])
        how |= {"ep": ep, "etp": etp, "sequence_parallel": tp > 1}
    return Layout(**how)


def random_case(draw: random.Random, experts: bool) -> Case:
    """A pair of layouts that fits into WORLD processes."""
    together = draw.random() < 0.35
    while True:
        source = random_layout(draw, experts)
        engine = (draw.choice([1, 1, 2, 4]), draw.choice([1, 2, 3, 4]))
        target: Layout | tuple[int, int] = engine
        n_targets = engine[0] * engine[1]
        if draw.random() < 0.3:
            target = random_layout(draw, experts)
            n_targets = target.world
        n_all = n_targets if together else source.world + n_targets
        fits = not together or source.world == n_targets
        if fits and n_all <= WORLD:
            dtypes = draw.choice([(torch.float32, torch.float32), (torch.float32, torch.bfloat16)])
            return Case(source, target, *dtypes, together, draw.random() < 0.5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", tied=False, vocab=300, layers=3)


@pytest.fixture
def store_port() -> Iterator[int]:
    with serving_store() as port:
        yield port


def shape_of(path: Path) -> ModelShape:
    return ModelShape.from_config(json.loads((path / "config.json").read_text()))


def loaded(path: Path, side: MegatronSide, rank: int) -> dict[str, Tensor]:
    """A Megatron rank's parameters as they are read from the checkpoint."""
    tensors = {
        name: torch.full(cut.shape, torch.nan, dtype=side.dtype)
        for name, cut in side.holdings()[rank].items()
    }
    load_hf(tensors, side.shape, side.layout, side.layout.coords(rank), path)
    return tensors


def run_case(case: Case, n: int, port: int, path: Path, rank: int, rounds: int = 2) -> TransferReport | None:
    """This process's part of a case; what arrived is compared bit by bit with the checkpoint."""
    source = MegatronSide(shape_of(path), case.source, case.source_dtype)
    target: Side
    if isinstance(case.target, Layout):
        target = MegatronSide(source.shape, case.target, case.target_dtype)
    else:
        target = EngineSide(source.shape, case.target_dtype, *case.target)
    meeting = Meeting(
        "actor>rollout",
        f"case{n}",
        "127.0.0.1",
        port,
        source.n_ranks,
        target.n_ranks,
        case.together,
        60.0,
        BUCKET,
        case.shared,
    )
    if rank >= meeting.n_processes:
        return None
    links = Links()
    for again in range(rounds):
        if rank < source.n_ranks:
            tensors = loaded(path, source, rank)
            for tensor in tensors.values():
                tensor += again
            links.give(meeting, rank, f"actor rank {rank}", source, partial(nullcontext, tensors))
        target_rank = rank if case.together else rank - source.n_ranks
        if target_rank >= 0:
            check(case, links, meeting, target_rank, target, path, again)
    report = links.report
    links.close()
    return report


def check(
    case: Case, links: Links, meeting: Meeting, rank: int, target: Side, path: Path, again: int
) -> None:
    what = f"rollout rank {rank}"
    if isinstance(target, MegatronSide):
        tensors = {
            name: torch.zeros(cut.shape, dtype=target.dtype) for name, cut in target.holdings()[rank].items()
        }
        names = [n for n, _ in links.take(meeting, rank, what, target, lambda name, *_: tensors[name])]
        assert sorted(names) == sorted(tensors)
        whole = MegatronSide(target.shape, target.layout, case.source_dtype)
        for name, tensor in loaded(path, whole, rank).items():
            filled = torch.zeros_like(tensor, dtype=torch.bool)
            for piece in target.holdings()[rank][name].pieces:
                filled[piece.target] = True
            expected = torch.where(filled, tensor + again, 0).to(target.dtype)
            assert tensors[name].equal(expected), name
        return
    saved = load_file(path / "model.safetensors")
    held, names = target.holdings()[rank], []
    for name, tensor in links.take(meeting, rank, what, target):
        names.append(name)
        assert tensor.shape == held[name].shape
        for piece in held[name].pieces:
            expected = (saved[name] + again).to(case.target_dtype)
            assert tensor[piece.target].equal(expected[piece.source]), name
    assert sorted(names) == sorted(saved)


def transferred(cases: list[Case], path: Path, port: int) -> list[list[TransferReport | None]]:
    """Reports [case][process] of all cases, in one set of processes."""

    def ranks(rank: int, world: int) -> list[TransferReport | None]:
        return [run_case(case, n, port, path, rank) for n, case in enumerate(cases)]

    return list(zip(*run_ranks(ranks, WORLD, timeout=240), strict=True))


def needed_bytes(case: Case, path: Path) -> list[int]:
    """What each target rank must hold, in the type in which it travels."""
    itemsize = min(case.source_dtype.itemsize, case.target_dtype.itemsize)
    shape = shape_of(path)
    target: Side
    if isinstance(case.target, Layout):
        target = MegatronSide(shape, case.target, case.target_dtype)
    else:
        target = EngineSide(shape, case.target_dtype, *case.target)
    return [
        sum(
            itemsize * torch.Size(s.stop - s.start for s in piece.target).numel()
            for cut in held.values()
            for piece in cut.pieces
        )
        for held in target.holdings()
    ]


def check_reports(cases: list[Case], path: Path, reports: list[list[TransferReport | None]]) -> None:
    for case, of_case in zip(cases, reports, strict=True):
        needed = needed_bytes(case, path)
        first = 0 if case.together else case.source.world
        for rank, bytes_needed in enumerate(needed):
            report = of_case[first + rank]
            came = report.received_bytes + report.copied_bytes
            assert bytes_needed <= came <= 1.02 * bytes_needed, (case, rank)
            assert report.seconds > 0
            routes = {"shared"} if case.shared else {"gloo"}
            assert set(report.by_route) <= routes, case
        if not case.together:
            assert sum(r.sent_bytes for r in of_case if r) >= sum(needed)
            assert all(of_case[rank].received_bytes == 0 for rank in range(first))


SMALL = [
    Case(Layout(tp=2, pp=2), (1, 2)),
    Case(Layout(tp=2, dp=2), (2, 2), target_dtype=torch.bfloat16, shared=False),
    Case(Layout(tp=2, pp=2, dp=2), (1, 8), together=True),
    Case(Layout(tp=4), Layout(pp=2, dp=2), together=True, shared=False),
    Case(Layout(pp=3), Layout(tp=4), shared=False),
    Case(Layout(dp=4), (1, 4), together=True),
]


def test_every_bit_arrives_and_no_more_than_must(checkpoint, store_port):
    reports = transferred(SMALL, checkpoint, store_port)
    check_reports(SMALL, checkpoint, reports)
    alone = reports[-1]  # every process has all that it needs
    assert all(report.received_bytes == 0 < report.copied_bytes for report in alone if report)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_every_bit_arrives_between_random_layouts(tmp_path, store_port, seed):
    draw = random.Random(seed)
    family = ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"][seed]
    tied = draw.random() < 0.5
    path = tiny_checkpoint(tmp_path / "model", family, tied=tied, vocab=draw.choice([128, 301]), layers=4)
    cases = [random_case(draw, family in ("mixtral", "qwen3_moe")) for _ in range(24)]
    check_reports(cases, path, transferred(cases, path, store_port))


def test_where_shared_memory_has_no_room_the_network_does(checkpoint, store_port, monkeypatch):
    monkeypatch.setattr("rolemesh.parallel.weights.transfer_memory.SHARED", Path("/nowhere"))
    memory = HostMemory(1 << 10)
    assert memory.path is None
    assert memory.bytes.numel() == 1 << 10
    case = Case(Layout(tp=2), (1, 1))
    reports = transferred([case], checkpoint, store_port)[0]
    assert set(reports[2].by_route) == {"gloo"}


def test_no_process_holds_the_whole_model_beyond_its_own_part(checkpoint, store_port):
    """An engine's rank gives every tensor up as it passes it on; buffers are two buckets each way."""
    source = MegatronSide(shape_of(checkpoint), Layout(tp=2), torch.float32)
    target = EngineSide(source.shape, torch.float32, tp=2)
    meeting = Meeting("a>b", "held", "127.0.0.1", store_port, 2, 2, False, 60.0, BUCKET, shared=False)

    def buffers(links: Links) -> int:
        link = links.link(meeting)
        assert link is not None
        return link.buffer_bytes

    def most_bytes(rank: int, world: int) -> tuple[int, int]:
        links, alive = Links(), list[weakref.ref[Tensor]]()
        if rank < 2:
            links.give(
                meeting, rank, f"a{rank}", source, partial(nullcontext, loaded(checkpoint, source, rank))
            )
            return 0, buffers(links)
        most = 0

        def land(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            nonlocal most
            tensor = torch.empty(shape, dtype=dtype)
            alive.append(weakref.ref(tensor))
            most = max(most, sum(t.nbytes for t in (ref() for ref in alive) if t is not None))
            return tensor

        for _ in links.take(meeting, rank - 2, f"b{rank - 2}", target, land):
            pass
        return most, buffers(links)

    sizes = sorted((t.nbytes for t in load_file(checkpoint / "model.safetensors").values()), reverse=True)
    for held, buffers in run_ranks(most_bytes, 4):
        assert held <= sum(sizes[:3]) < sum(sizes) / 2
        assert 0 < buffers <= HALVES * BUCKET
