"""Tests of whole models on GPUs: NCCL, bf16, pinned host memory, engines that sleep.

They fork ranks, so the test's own process asks NVML alone which GPUs there are and never touches CUDA.
"""

import os

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.gpu)
        needed = max((mark.args[0] for mark in item.iter_markers("gpus")), default=1)
        if torch.cuda.device_count() < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs"))
