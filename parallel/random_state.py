"""Every random state of a process, as plain values that a checkpoint can hold."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_MEGATRON = "megatron.core.tensor_parallel.random"


def get() -> dict[str, Any]:
    """States of Python, numpy, torch, the process's GPU and megatron-core's dropout: numbers and tensors."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            position,
            has_gauss,
            cached,
        ],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if tracker := _tracker():
        state["megatron"] = dict(tracker.get_states())
    return state


def put(state: Mapping[str, Any]) -> None:
    """Go on from what `get` returned; what this process does not have is left out."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    if "megatron" in state and (tracker := _tracker()):
        tracker.set_states(dict(state["megatron"]))


def _tracker() -> Any:
    """megatron-core's states of dropout, where this process uses them."""
    if _MEGATRON not in sys.modules:
        return None
    tracker = sys.modules[_MEGATRON].get_cuda_rng_tracker()
    return tracker if tracker.is_initialized() else None
