"""Weights between processes on GPUs: through CUDA's shared memory on one, over NCCL between two."""

import json
import multiprocessing
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from store_process import serving_store
from tiny import tiny_checkpoint

from rolemesh.parallel.weights import load_hf
from rolemesh.parallel.weights.transfer import Links
from rolemesh.parallel.weights.transfer_link import Meeting
from rolemesh.parallel.weights.transfer_sides import EngineSide, MegatronSide
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape

ROUNDS = 3


def giving(path: Path, port: int, gpu: int) -> None:
    torch.cuda.set_device(gpu)
    side, meeting = _side(path), _meeting(port)
    tensors = {
        name: torch.empty(cut.shape, dtype=side.dtype, device="cuda")
        for name, cut in side.holdings()[0].items()
    }
    load_hf(tensors, side.shape, side.layout, side.layout.coords(0), path)
    links = Links()
    for again in range(ROUNDS):
        given = {name: tensor + again for name, tensor in tensors.items()}
        links.give(meeting, 0, "actor rank 0", side, partial(nullcontext, given))
    links.close()


def taking(path: Path, port: int, gpu: int, route: str) -> None:
    torch.cuda.set_device(gpu)
    torch.zeros(1, device="cuda")
    saved = load_file(path / "model.safetensors")
    side = EngineSide(_side(path).shape, torch.float32)
    links = Links()
    for again in range(ROUNDS):
        names = []
        for name, tensor in links.take(_meeting(port), 0, "rollout rank 0", side):
            assert tensor.is_cuda
            assert tensor.cpu().equal(saved[name] + again), name
            names.append(name)
        assert sorted(names) == sorted(saved)
        n_bytes = sum(tensor.nbytes for tensor in saved.values())
        assert links.report.by_route.keys() == {route}
        assert n_bytes <= links.report.received_bytes <= 1.02 * n_bytes
    links.close()


def _side(path: Path) -> MegatronSide:
    shape = ModelShape.from_config(json.loads((path / "config.json").read_text()))
    return MegatronSide(shape, Layout(), torch.float32)


def _meeting(port: int) -> Meeting:
    return Meeting("actor>rollout", "gpu", "127.0.0.1", port, 1, 1, False, 60.0, 64 << 10)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("gpus", "route"),
    [
        pytest.param((0, 0), "ipc", id="one"),
        pytest.param((0, 1), "nccl", id="two", marks=pytest.mark.gpus(2)),
    ],
)
def test_every_bit_comes_from_the_trainers_gpu_to_the_engines(tmp_path, gpus, route):
    path = tiny_checkpoint(tmp_path, "qwen3", layers=2, tied=False)
    spawn = multiprocessing.get_context("spawn")
    with serving_store() as port:
        sides = [
            spawn.Process(target=giving, args=(path, port, gpus[0])),
            spawn.Process(target=taking, args=(path, port, gpus[1], route)),
        ]
        for side in sides:
            side.start()
        for side in sides:
            side.join(200)
        codes = [side.exitcode for side in sides]
        for side in sides:
            side.kill()
    assert codes == [0, 0]
