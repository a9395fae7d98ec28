"""The plan of a transfer: whatever the layouts, every number comes once, from a rank that has it."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rolemesh.parallel.weights.transfer_packets import Crossing, Route, steps_of
from rolemesh.parallel.weights.transfer_plan import (
    FAR,
    NEAR,
    SAME,
    Box,
    TransferError,
    plan_transfer,
    rounds,
)
from rolemesh.parallel.weights.transfer_sides import EngineSide, MegatronSide, Side
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import Experts, LatentAttention, ModelShape, Router

SHAPE = ModelShape(
    family="qwen2",
    n_layers=3,
    hidden=16,
    ffn=24,
    n_heads=8,
    n_kv_heads=2,
    head_dim=4,
    vocab=101,
    max_positions=64,
    qkv_bias=True,
)
TIED = ModelShape(**{**vars(SHAPE), "tied": True, "family": "qwen3", "qkv_bias": False, "qk_norm": True})
MIXTURE = replace(
    SHAPE,
    family="qwen3_moe",
    qkv_bias=False,
    qk_norm=True,
    n_layers=6,
    moe=Experts(4, 2, 16, dense_layers=(0,)),
)
LATENT = replace(
    SHAPE,
    family="deepseek_v3",
    qkv_bias=False,
    n_kv_heads=8,
    n_layers=6,
    latent=LatentAttention(8, 2, 2, 8, 12),
    moe=Experts(4, 2, 16, 16, dense_layers=(0,), router=Router("sigmoid", bias=True)),
)


def sides(seed: int) -> tuple[Side, Side]:
    """A random training layout and a random target: an engine, or another Megatron layout."""
    draw = random.Random(seed)
    shape = draw.choice([SHAPE, TIED, MIXTURE, LATENT])

    def megatron() -> MegatronSide:
        tp, pp, dp = draw.choice([1, 2, 4]), draw.choice([1, 2, 3]), draw.choice([1, 2])
        how: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp}
        if pp > 1 and shape.n_layers == 6:
            how |= draw.choice([{}, {"vpp": 2}, {"pp_layers": (7 - pp, *[1] * (pp - 1))}])
        if shape.moe:
            how["etp"] = draw.choice([1, tp])
            how["ep"] = draw.choice([n for n in (1, 2, 4) if dp * tp // how["etp"] % n == 0])
            how["sequence_parallel"] = tp > 1
        return MegatronSide(shape, Layout(**how), draw.choice([torch.float32, torch.bfloat16]))

    if draw.random() < 0.3:
        return megatron(), megatron()
    dtype = draw.choice([torch.float32, torch.bfloat16])
    return megatron(), EngineSide(shape, dtype, draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 3]))


def filled(side: Side, rank: int) -> dict[str, np.ndarray]:
    """How often each number of a rank's tensors is to be filled: once, or never (padding, others' parts)."""
    times = {}
    for name, cut in side.holdings()[rank].items():
        times[name] = np.zeros(cut.shape, dtype=np.int64)
        for piece in cut.pieces:
            times[name][piece.target] += 1
    return times


def at(start: tuple[int, ...], box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(start, box.shape, strict=True))


@pytest.mark.parametrize("seed", range(24))
def test_every_number_of_every_target_comes_once_from_a_rank_that_has_it(seed):
    source, target = sides(seed)
    plan = plan_transfer(source, target)
    wanted = [filled(target, rank) for rank in range(target.n_ranks)]
    held, needs = source.holdings(), target.holdings()
    for move in plan.moves:
        assert holds(held[move.source][move.name], move.tensor, move.start, move.box), move
        for landing in move.to:
            assert holds(needs[landing.rank][landing.name], move.tensor, landing.start, move.box), move
            wanted[landing.rank][landing.name][at(landing.start, move.box)] -= 1
    assert all(not times.any() for of_rank in wanted for times in of_rank.values())
    assert plan.received_bytes() == [
        sum(
            min(side.dtype_of(p.tensor).itemsize for side in (source, target))
            * int(np.prod([s.stop - s.start for s in p.target]))
            for cut in held.values()
            for p in cut.pieces
        )
        for held in needs
    ]
    assert sum(plan.sent_bytes()) == sum(plan.received_bytes())


def holds(cut, tensor: str, start: tuple[int, ...], box: Box) -> bool:
    """Whether a rank's tensor has all of `box` of the Hugging Face tensor, where the move says."""
    covered = np.zeros(box.shape, dtype=bool)
    for piece in cut.pieces:
        if piece.tensor != tensor:
            continue
        low = [max(b, s.start) for b, s in zip(box.start, piece.source, strict=True)]
        high = [min(b, s.stop) for b, s in zip(box.stop, piece.source, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        if any(
            t.start + a - s.start != own + a - b
            for t, s, a, own, b in zip(piece.target, piece.source, low, start, box.start, strict=True)
        ):
            return False
        covered[tuple(slice(a - b, c - b) for a, c, b in zip(low, high, box.start, strict=True))] = True
    return bool(covered.all())


@pytest.mark.parametrize("seed", range(8))
def test_no_rank_packs_or_receives_more_than_a_bucket_in_a_round(seed):
    source, target = sides(seed)
    plan, bucket = plan_transfer(source, target), 1024
    crossing = apart(source.n_ranks, lambda s, t: Route.GLOO)
    made = rounds(plan, bucket)
    assert sum(move.n_numbers for moves in made for move in moves) == sum(m.n_numbers for m in plan.moves)
    for process in range(source.n_ranks + target.n_ranks):
        steps = steps_of(plan, crossing, process, bucket)
        assert len(steps) == len(made)
        for step in steps:
            assert all(packet.offset + packet.n_bytes <= bucket for packet in step.outgoing)
            assert sum(packet.n_bytes for packet in step.incoming) <= bucket


def apart(n_sources: int, route) -> Crossing:
    """Both sides in processes of their own."""
    return Crossing(lambda rank: rank, lambda rank: n_sources + rank, route)


@pytest.mark.parametrize("seed", range(8))
def test_sender_and_reader_agree_on_every_packet(seed):
    source, target = sides(seed)
    n_sources, n_all = source.n_ranks, source.n_ranks + target.n_ranks
    draw = random.Random(seed)
    routes = {(s, t): draw.choice(list(Route)[1:]) for s in range(n_sources) for t in range(n_sources, n_all)}
    crossing = apart(n_sources, lambda s, t: routes[s, t])
    plan = plan_transfer(source, target, lambda s, t: NEAR if routes[s, n_sources + t].is_read else FAR)
    everyone = [steps_of(plan, crossing, process, 2048) for process in range(n_all)]
    for at_once in zip(*everyone, strict=True):
        sent = [packet for step in at_once for packet in step.outgoing]
        assert len({(p.process, p.on_device, p.offset) for p in sent}) == len(sent)
        for process, step in enumerate(at_once):
            for other in range(
                n_sources
            ):  # in one order: messages between two processes are told apart by it
                coming = [packet for packet in step.incoming if packet.process == other]
                assert coming == [p for p in sent if p.process == other and process in p.readers]


def test_replicas_share_the_sending():
    largest = 4 * SHAPE.vocab * SHAPE.hidden
    for dp in (2, 4):
        source = MegatronSide(SHAPE, Layout(tp=2, pp=2, dp=dp), torch.float32)
        sent = plan_transfer(source, EngineSide(SHAPE, torch.float32)).sent_bytes()
        layout = source.layout
        for coords in ((pp, tp) for pp in range(2) for tp in range(2)):
            of_replicas = [
                n for rank, n in enumerate(sent) if (layout.coords(rank).pp, layout.coords(rank).tp) == coords
            ]
            assert max(of_replicas) <= min(of_replicas) + largest, (coords, of_replicas)


def test_what_many_engines_read_in_shared_memory_is_packed_once():
    source = MegatronSide(SHAPE, Layout(dp=2), torch.float32)
    near = plan_transfer(source, EngineSide(SHAPE, torch.float32, replicas=3), lambda s, t: NEAR)
    assert all(len(move.to) == 3 for move in near.moves)
    assert len({move.source for move in near.moves}) == 2


def test_the_rank_in_the_same_process_comes_first():
    source = MegatronSide(SHAPE, Layout(dp=3), torch.float32)
    target = EngineSide(SHAPE, torch.float32, replicas=3)
    plan = plan_transfer(source, target, lambda s, t: SAME if s == t else FAR)
    assert all(landing.rank == move.source for move in plan.moves for landing in move.to)


def test_pipeline_stages_send_side_by_side():
    source = MegatronSide(SHAPE, Layout(pp=2), torch.float32)
    plan = plan_transfer(source, EngineSide(SHAPE, torch.float32))
    half = rounds(plan, sum(plan.received_bytes()) // 8)[:4]
    sent = [sum(m.n_numbers for moves in half for m in moves if m.source == stage) for stage in (0, 1)]
    assert min(sent) > 0.3 * sum(sent)


def test_an_engine_rank_gets_its_own_heads_columns_and_rows_of_the_vocabulary():
    held = [dict(h) for h in EngineSide(SHAPE, torch.float32, tp=4).holdings()]

    def part(rank: int, name: str) -> tuple[tuple[int, int], ...]:
        (piece,) = held[rank][name].pieces
        assert held[rank][name].shape == tuple(s.stop - s.start for s in piece.source)
        return tuple((s.start, s.stop) for s in piece.source)

    layer = "model.layers.2."
    assert part(1, f"{layer}self_attn.q_proj.weight") == ((8, 16), (0, 16))
    assert [part(rank, f"{layer}self_attn.k_proj.bias")[0] for rank in range(4)] == [
        (0, 4),
        (0, 4),
        (4, 8),
        (4, 8),
    ]
    assert part(3, f"{layer}self_attn.o_proj.weight") == ((0, 16), (24, 32))
    assert part(2, f"{layer}mlp.up_proj.weight") == ((12, 18), (0, 16))
    assert part(2, f"{layer}mlp.down_proj.weight") == ((0, 16), (12, 18))
    assert part(1, f"{layer}input_layernorm.weight") == ((0, 16),)
    assert [part(rank, "lm_head.weight")[0] for rank in range(3)] == [(0, 32), (32, 64), (64, 96)]  # of 128
    assert part(3, "lm_head.weight")[0] == (96, 101)


def test_the_smaller_type_travels():
    for source, target, wire in (
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.float16),
    ):
        plan = plan_transfer(MegatronSide(SHAPE, Layout(), source), EngineSide(SHAPE, target))
        assert plan.wire("lm_head.weight") == wire


def test_a_plan_prints_who_sends_what_to_whom():
    plan = plan_transfer(
        MegatronSide(SHAPE, Layout(tp=2, pp=2), torch.float32), EngineSide(SHAPE, torch.float32)
    )
    lines = plan.table(most=3).splitlines()
    assert lines[0].split() == ["tensor", "numbers", "from", "rank", "of", "to", "rank", "MiB"]
    assert "... " in lines[4]
    assert [line.split()[:3] for line in lines[5:]] == [
        *(["rank", str(rank), "sends"] for rank in range(4)),
        ["rank", "0", "receives"],
    ]


def test_a_model_of_other_tensors_is_refused_by_name():
    source = MegatronSide(SHAPE, Layout(), torch.float32)
    deeper = ModelShape(**{**vars(SHAPE), "n_layers": 4})
    with pytest.raises(TransferError, match=r"does not have: model\.layers\.3\."):
        plan_transfer(source, EngineSide(deeper, torch.float32))
    wider = ModelShape(**{**vars(SHAPE), "vocab": 120})
    with pytest.raises(TransferError, match=r"no source rank holds numbers \(101, 0\) to \(120, 16\) of"):
        plan_transfer(source, EngineSide(wider, torch.float32))


def test_a_box_is_split_into_parts_that_cover_it_once():
    box = Box((2, 3), (9, 14))
    for most in (1, 3, 11, 20, 77, 100):
        covered = np.zeros((9, 14), dtype=int)
        for part in box.split(most):
            assert np.prod(part.shape) <= most
            covered[at(part.start, part)] += 1
        assert (covered[2:9, 3:14] == 1).all()
        assert covered.sum() == 77
    rest = list(Box((0, 0), (4, 4)).without(Box((1, 1), (3, 4))))
    assert sum(np.prod(part.shape) for part in rest) == 16 - 6
