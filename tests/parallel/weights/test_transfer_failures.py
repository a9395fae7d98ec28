"""Transfers that cannot end well: who is missing is named, and nobody waits for ever."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from store_process import serving_store
from torch import Tensor

from rolemesh.parallel.weights.transfer import Links
from rolemesh.parallel.weights.transfer_link import Meeting
from rolemesh.parallel.weights.transfer_plan import TransferError
from rolemesh.parallel.weights.transfer_sides import EngineSide, MegatronSide
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape

pytestmark = pytest.mark.full
SHAPE = ModelShape("llama", 4, 64, 128, 4, 2, 16, 101, 64)
SOURCE = MegatronSide(SHAPE, Layout(tp=2), torch.float32)
TARGET = EngineSide(SHAPE, torch.float32)
LIMIT_S = 3.0


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    with serving_store() as port:
        yield Meeting("actor>rollout", "failing", "127.0.0.1", port, 2, 1, False, LIMIT_S, 16 << 10)


def outcomes(*parts: Callable[[], Any], within_s: float) -> list[str]:
    """What each part says in a process of its own: its result or its error; nothing where it died."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in parts]

    def run(part: Callable[[], Any], pipe: Any) -> None:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            pipe.send(str(part()))
        except BaseException as error:
            pipe.send(f"{type(error).__name__}: {error}")
        pipe.close()
        os._exit(0)

    processes = [
        context.Process(target=run, args=(part, pipe)) for part, (_, pipe) in zip(parts, pipes, strict=True)
    ]
    deadline = time.monotonic() + within_s
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    said = []
    try:
        for receiver, _ in pipes:
            assert receiver.poll(max(0.0, deadline - time.monotonic())), f"not done within {within_s} s"
            try:
                said.append(receiver.recv())
            except EOFError:
                said.append("")
    finally:
        for process in processes:
            process.kill()
            process.join()
    return said


class Failing(dict[str, Tensor]):
    """A source's tensors, of which one makes the process do something else."""

    def __init__(self, rank: int, at: str | None, do: Callable[[], Any]) -> None:
        super().__init__({name: torch.ones(cut.shape) for name, cut in SOURCE.holdings()[rank].items()})
        self.at, self.do = at, do

    def __getitem__(self, name: str) -> Tensor:
        if name == self.at:
            self.do()
        return super().__getitem__(name)


LAST = "decoder.final_layernorm.weight"


def giver(
    meeting: Meeting, rank: int, at: str | None = None, do: Callable[[], Any] = dict
) -> Callable[[], Any]:
    return lambda: Links().give(
        meeting, rank, f"actor rank {rank}", SOURCE, lambda: nullcontext(Failing(rank, at, do))
    )


def taker(meeting: Meeting, stop: Callable[[str], Any] = str) -> Callable[[], Any]:
    def run() -> int:
        return len([stop(name) for name, _ in Links().take(meeting, 0, "rollout rank 0", TARGET)])

    return run


def test_who_does_not_come_is_named(meeting):
    start = time.monotonic()
    said = outcomes(giver(meeting, 0), taker(meeting), within_s=LIMIT_S + 20)
    for who, text in zip(("actor rank 0", "rollout rank 0"), said, strict=True):
        assert text.startswith(
            f"TransferError: transfer actor>rollout: {who} waited 3 s for source rank 1, which did not come"
        ), text
    assert time.monotonic() - start >= LIMIT_S


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "network"])
def test_a_process_that_dies_halfway_is_named_by_those_who_wait_for_it(meeting, shared):
    meeting = replace(meeting, shared=shared)
    dying = giver(meeting, 1, LAST, lambda: os._exit(9))
    first, dead, waiting = outcomes(giver(meeting, 0), dying, taker(meeting), within_s=LIMIT_S + 30)
    assert dead == ""
    assert "rollout rank 0 lost actor rank 1: it has ended or given up" in waiting, waiting
    assert "TransferError" in first, "who still sends to the one that gave up learns of it"
    assert "round" in waiting


def test_a_process_that_hangs_halfway_is_named_after_the_limit(meeting):
    hanging = giver(meeting, 1, LAST, lambda: time.sleep(60))
    said = outcomes(giver(meeting, 0), taker(meeting), hanging_last(hanging), within_s=LIMIT_S * 2 + 30)
    assert "rollout rank 0 waited 3 s for actor rank 1" in said[1], said[1]
    assert "TransferError" in said[0], said[0]


def hanging_last(part: Callable[[], Any]) -> Callable[[], Any]:
    """The part in a thread that nobody waits for."""

    def run() -> str:
        threading.Thread(target=part, daemon=True).start()
        time.sleep(LIMIT_S * 2 + 3)
        return "hung"

    return run


def test_an_error_of_who_takes_ends_the_givers_at_once(meeting):
    def stop(name: str) -> None:
        raise KeyError(name)

    start = time.monotonic()
    said = outcomes(giver(meeting, 0), giver(meeting, 1), taker(meeting, stop), within_s=60)
    assert said[2].startswith("KeyError")
    assert all(text.startswith("TransferError") for text in said[:2]), said
    assert time.monotonic() - start < LIMIT_S + 20


def test_another_model_is_refused_on_every_rank(meeting):
    deeper = EngineSide(ModelShape(**{**vars(SHAPE), "n_layers": 5}), torch.float32)

    def take_more() -> None:
        list(Links().take(meeting, 0, "rollout rank 0", deeper))

    for text in outcomes(giver(meeting, 0), giver(meeting, 1), take_more, within_s=60):
        assert "does not have: model.layers.4." in text, text


def test_memory_of_another_shape_is_refused(meeting):
    def land(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(7)

    def into_less() -> None:
        list(Links().take(meeting, 0, "rollout rank 0", TARGET, land))

    said = outcomes(giver(meeting, 0), giver(meeting, 1), into_less, within_s=60)
    assert "is [7] there, the weights that come are [" in said[2], said[2]


def test_nothing_is_left_in_shared_memory(meeting):
    before = set(os.listdir("/dev/shm"))
    assert outcomes(giver(meeting, 0), giver(meeting, 1), taker(meeting), within_s=60)[2] == "39"
    left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("rolemesh-")}
    assert not left


def test_processes_that_live_on_meet_again_after_a_failure(meeting):
    """The one that gave up must let go of its connections, else the others wait for the whole limit."""
    patient = replace(meeting, limit_s=60.0)

    def gives(rank: int) -> Callable[[], Any]:
        def run() -> str:
            links, start = Links(), time.monotonic()
            lend = partial(nullcontext, Failing(rank, None, dict))
            with pytest.raises(TransferError, match="lost rollout rank 0: it has ended or given up"):
                links.give(patient, rank, f"actor rank {rank}", SOURCE, lend)
            assert time.monotonic() - start < 40
            links.give(replace(patient, id="again"), rank, f"actor rank {rank}", SOURCE, lend)
            return "given"

        return run

    def stop_in(tensors: Iterator[tuple[str, Tensor]]) -> None:
        for name, _ in tensors:
            if name == "model.norm.weight":
                raise KeyError(name)

    def takes() -> int:
        links = Links()
        with pytest.raises(KeyError):
            stop_in(links.take(patient, 0, "rollout rank 0", TARGET))
        return len(list(links.take(replace(patient, id="again"), 0, "rollout rank 0", TARGET)))

    assert outcomes(gives(0), gives(1), takes, within_s=100) == ["given", "given", "39"]
