"""Run a test's function on several real ranks: `from gloo import run_ranks`."""

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120, device: str = "cpu"
) -> list[Any]:
    """Call `fn(rank, world, *args)` in `world` processes of one gloo world and return their results by rank.

    The processes are forked, so whatever the test has imported is there and `fn` may be any function; tensors
    in the results come back by value. RuntimeError holds the traceback of the rank that failed first, or,
    after `timeout` seconds, the stacks of the ranks that still run. With `device` "cuda" each rank has a GPU
    and NCCL too; the test's own process must not have touched CUDA.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank_main, args=(fn, rank, world, args, folder, timeout, device))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, Path(folder), time.monotonic() + timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return [torch.load(Path(folder, f"{rank}.result"), weights_only=False) for rank in range(world)]


def _wait(ranks: list[multiprocessing.Process], folder: Path, deadline: float) -> None:
    while any(process.exitcode is None for process in ranks):
        _raise_first_failure(ranks, folder)
        if time.monotonic() > deadline:
            raise RuntimeError(_stacks(ranks, folder))
        time.sleep(0.01)
    _raise_first_failure(ranks, folder)


def _raise_first_failure(ranks: list[multiprocessing.Process], folder: Path) -> None:
    errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        raise RuntimeError(f"rank {errors[0].stem} of {len(ranks)} failed:\n{errors[0].read_text()}")
    for rank, process in enumerate(ranks):
        if process.exitcode:
            raise RuntimeError(f"rank {rank} of {len(ranks)} died with exit code {process.exitcode}")


def _stacks(ranks: list[multiprocessing.Process], folder: Path) -> str:
    late = [rank for rank, process in enumerate(ranks) if process.exitcode is None]
    for rank in late:
        os.kill(ranks[rank].pid, signal.SIGUSR1)
    time.sleep(0.5)
    texts = [f"rank {rank}:\n{(folder / f'{rank}.stack').read_text()}" for rank in late]
    return "\n".join([f"ranks {late} of {len(ranks)} did not finish in time", *texts])


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world: int,
    args: tuple[Any, ...],
    folder: str,
    timeout: float,
    device: str,
) -> None:
    with open(f"{folder}/{rank}.stack", "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack)
        torch.set_num_threads(1)  # a forked process has lost the parent's OpenMP threads
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            if device == "cuda":
                torch.cuda.set_device(rank)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout + 30),  # the caller, who prints stacks, is first
            )
            torch.save(fn(rank, world, *args), f"{folder}/{rank}.result")
            dist.barrier()  # no rank leaves while another still needs its sockets
        except BaseException:
            written = Path(folder, f"{rank}.traceback")
            written.write_text(traceback.format_exc())
            written.rename(Path(folder, f"{rank}.error"))
            os._exit(1)
        os._exit(0)
