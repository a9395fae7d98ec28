"""A rank's part of the weights in its memory, read by other processes."""

import multiprocessing
import os
from typing import Any

import pytest
import torch
from kept import keep

from rolemesh.engine.rollout import RolloutError
from rolemesh.engine.rollout.kept_weights import KeptWeights, WeightKeeper
from rolemesh.parallel.weights.transfer_sides import EngineSide
from rolemesh.placement.model import ModelShape

SHAPE = ModelShape("qwen2", 2, 32, 64, 4, 2, 8, 101, 64, qkv_bias=True)


def whole_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    parts = EngineSide(SHAPE, torch.float32).parts(0)
    return {tensor.name: torch.randn(tensor.shape, generator=generator) for tensor, _ in parts}


def elsewhere(function: Any, *args: Any) -> Any:
    """What a function gives in another process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, args)


def sums(kept: KeptWeights, parts: dict[str, tuple[slice, ...]]) -> dict[str, tuple[tuple[int, ...], float]]:
    """By name the tensor's shape, and the sum of a part of it."""
    return {n: (tuple(t.shape), t[parts[n]].double().sum().item()) for n, t in kept.read()}


def test_another_process_reads_each_ranks_part_where_it_belongs_in_the_whole_tensor():
    weights, side = whole_weights(), EngineSide(SHAPE, torch.float32, tp=4)
    for rank, keeper in enumerate(keep(side, weights)):
        parts = {tensor.name: part for tensor, part in side.parts(rank)}
        read = elsewhere(sums, keeper.weights, parts)
        assert list(read) == list(parts)
        for name, (shape, total) in read.items():
            assert shape == tuple(weights[name].shape)
            assert total == weights[name][parts[name]].double().sum().item()
        needed = sum(weights[name][part].nbytes for name, part in parts.items())
        assert keeper.n_bytes == needed < 0.5 * sum(tensor.nbytes for tensor in weights.values())


def test_what_is_kept_whole_is_read_in_place_and_new_numbers_show():
    keeper = WeightKeeper(EngineSide(SHAPE, torch.bfloat16), 0)
    read = dict(keeper.weights.read())
    for name, tensor in read.items():
        keeper.place(name, tuple(tensor.shape), tensor.dtype).fill_(3)
    assert all((tensor == 3).all() and tensor.dtype == torch.bfloat16 for tensor in read.values())


def test_the_memory_goes_with_its_keeper():
    before = set(os.listdir("/dev/shm"))
    keeper = WeightKeeper(EngineSide(SHAPE, torch.bfloat16), 0)
    weights = keeper.weights
    assert set(os.listdir("/dev/shm")) == before
    del keeper
    with pytest.raises(RolloutError, match="cannot open the weights that a rollout rank keeps"):
        next(weights.read())


def test_a_model_that_does_not_fit_into_the_machines_memory_is_refused_with_its_size():
    huge = ModelShape("llama", 2, 1 << 20, 1 << 22, 1 << 13, 8, 128, 1 << 20, 64)
    with pytest.raises(RolloutError, match=r"tp rank 0 of 1 .*keeps \d+\.\d\d GiB .* are free"):
        WeightKeeper(EngineSide(huge, torch.bfloat16), 0)
