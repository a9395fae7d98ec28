"""Labels outside of the vocabulary: an error at once on a CPU; on a GPU, where looking would stall it, later.

A GPU's log-probability of such a label is NaN. What was met is kept in three numbers on the device until
`raise_bad_labels` reads them, once a step.
"""

import torch
from torch import Tensor

# For each GPU [3] int64: how many labels lay outside since the last look, one of them, its vocabulary.
_met: dict[torch.device, Tensor] = {}


def check_labels(labels: Tensor, vocab_size: int) -> None:
    """Raise ValueError for a label [n] outside of [0, vocab_size) on a CPU; note it on another device."""
    if not len(labels):
        return
    if labels.device.type != "cpu":
        _note(labels, _outside(labels, vocab_size), vocab_size)
        return
    low, high = labels.aminmax()
    if low < 0 or high >= vocab_size:
        bad = labels[_outside(labels, vocab_size)]
        raise ValueError(_message(len(bad), int(bad[0]), vocab_size))


def _outside(labels: Tensor, vocab_size: int) -> Tensor:
    return (labels < 0) | (labels >= vocab_size)


def raise_bad_labels(device: torch.device) -> None:
    """Raise ValueError when a log-probability on the GPU `device` met a label outside of its vocabulary.

    Waits for the GPU. Looks at what came since the last call; on a CPU there is nothing to look for.
    """
    met = _met.pop(_indexed(device), None)
    if met is None:
        return
    count, label, vocab_size = met.tolist()
    if count:
        raise ValueError(_message(count, label, vocab_size))


def _note(labels: Tensor, outside: Tensor, vocab_size: int) -> None:
    count = outside.sum()
    one = labels.gather(0, outside.byte().argmax(dim=0, keepdim=True))[0]  # an index in [] is read at once
    now = torch.stack([count, one, torch.full_like(count, vocab_size)])
    before = _met.setdefault(_indexed(labels.device), torch.zeros_like(now))
    now = torch.where(count > 0, now, before)
    now[0] = before[0] + count
    _met[_indexed(labels.device)] = now


def _indexed(device: torch.device) -> torch.device:
    """`cuda` is whichever GPU is the current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _message(count: int, label: int, vocab_size: int) -> str:
    return f"{count} labels, such as {label}, lie outside of the vocabulary [0, {vocab_size})"
