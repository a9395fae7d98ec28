import time

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks

pytestmark = pytest.mark.full


def test_results_come_back_in_rank_order():
    def total(rank: int, world: int, start: int) -> tuple[int, torch.Tensor]:
        value = torch.tensor([float(start + rank)])
        dist.all_reduce(value)
        return rank, value

    assert run_ranks(total, 2, 10) == [(0, torch.tensor([21.0])), (1, torch.tensor([21.0]))]


def test_a_rank_that_raises_ends_all_ranks_with_its_traceback():
    def fail(rank: int, world: int) -> None:
        if rank == 1:
            raise ValueError("bad shard")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2 failed.*ValueError: bad shard"):
        run_ranks(fail, 2)
    assert time.monotonic() - start < 30


def test_a_rank_that_hangs_is_named_with_its_stack():
    def hang(rank: int, world: int) -> None:
        if rank == 0:
            time.sleep(600)

    with pytest.raises(RuntimeError, match=r"(?s)did not finish.*rank 0:.*in hang"):
        run_ranks(hang, 2, timeout=3)
