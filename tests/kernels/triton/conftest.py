"""The Triton kernels' tests run twice: on a GPU (`pytest -m gpu`), and in Triton's interpreter on a CPU.

The interpreter is chosen for a whole process before Triton is imported, so `test_without_gpu.py` starts
another pytest for it. Tests therefore import the kernels inside, by the fixture `kernels`.
"""

import inspect
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from triton.runtime import interpreter

    # It lists the members of `triton.language` at each call of a function, which is most of its time.
    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": cache(inspect.getmembers)})


def pytest_itemcollected(item: pytest.Item) -> None:
    if not INTERPRETED and item.path.name != "test_without_gpu.py":
        item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    if INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU; test_without_gpu.py runs it in Triton's interpreter")
    return torch.device("cuda")


@pytest.fixture
def kernels(device: torch.device) -> Callable[[str], ModuleType]:
    """`kernels("log_prob")` is that module of Triton kernels."""
    return lambda name: import_module(f"rolemesh.kernels.triton.{name}")
