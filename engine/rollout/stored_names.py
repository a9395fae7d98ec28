"""A transformers model's tensors under the names that its checkpoints have.

transformers 5 holds a layer's experts in two tensors; on disk, and in what a trainer sends, each is its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

_MATRICES = {"mixtral": ("w1", "w3", "w2")}  # others: gate_proj, up_proj, down_proj


def stored_views(tensors: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """The tensors of a state dict by checkpoint name: parts of them are views of the same memory."""
    return {name: view for held, tensor in tensors.items() for name, view in _views(held, tensor, family)}


def _views(name: str, tensor: Tensor, family: str) -> Iterator[tuple[str, Tensor]]:
    gate, up, down = _MATRICES.get(family, ("gate_proj", "up_proj", "down_proj"))
    stored = name.replace(".mlp.", ".block_sparse_moe.") if family == "mixtral" else name
    block, _, kind = stored.rpartition(".")
    if not block.endswith(".experts"):
        yield stored, tensor
    elif kind == "gate_up_proj":  # [experts, 2 x columns, hidden]
        for n, expert in enumerate(tensor):
            for matrix, half in zip((gate, up), expert.chunk(2), strict=True):
                yield f"{block}.{n}.{matrix}.weight", half
    else:
        yield from ((f"{block}.{n}.{down}.weight", expert) for n, expert in enumerate(tensor))
