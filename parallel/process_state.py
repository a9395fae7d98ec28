"""What megatron-core keeps once per process, for all its models: prepared here and nowhere else."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from rolemesh.parallel import cpu_device


def prepare_process(device: torch.device, tp_rank: int) -> None:
    """Make this process fit for megatron-core models on `device`; does nothing the second time.

    Besides the CPU bridge these are a scratch buffer and the random states of dropout, of which our models
    have none. The process's own random state is left as it was.
    """
    if device.type == "cpu":
        cpu_device.install()
    elif device.index is not None:
        torch.cuda.set_device(device)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    if not get_cuda_rng_tracker().is_initialized():
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            model_parallel_cuda_manual_seed(0, tp_rank=tp_rank, ep_rank=0, etp_rank=0)
