"""The Triton kernels' tests run twice: on a GPU (`pytest -m gpu`), and in Triton's interpreter on a CPU.

The interpreter is chosen for a whole process before Triton is imported, so `test_without_gpu.py` starts
another pytest for it. Tests therefore import the kernels inside, by the fixture `kernels`.
"""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WITHOUT_GPU = "test_without_gpu.py"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without a GPU only the tests that start interpreters are for this process."""
    here = collection_path.parent == Path(__file__).parent and collection_path.name != WITHOUT_GPU
    return True if here and not INTERPRETED and not torch.cuda.is_available() else None


def pytest_itemcollected(item: pytest.Item) -> None:
    if not INTERPRETED and item.path.name != WITHOUT_GPU:
        item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture
def kernels(device: torch.device) -> Callable[[str], ModuleType]:
    """`kernels("log_prob")` is that module of Triton kernels."""
    return lambda name: import_module(f"rolemesh.kernels.triton.{name}")
