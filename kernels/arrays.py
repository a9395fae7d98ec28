"""Types, masks and shapes as the operations want them."""

import torch
from torch import Tensor


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any of the tensors is, else float32: what half precision and integers are computed as."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def wide(tensor: Tensor) -> Tensor:
    """The tensor as the C++ forms read it: contiguous, float64 or float32."""
    return tensor.to(wide_dtype(tensor)).contiguous()


def mask_bytes(mask: Tensor) -> Tensor:
    """A bool mask as the contiguous uint8 array that the C++ forms read."""
    return mask.contiguous().view(torch.uint8)


def check_rows(names: str, *tensors: Tensor) -> None:
    """ValueError unless all `tensors`, which `names` tells to the reader, have one shape [b, R]."""
    shapes = [[*tensor.shape] for tensor in tensors]
    if len(shapes[0]) != 2 or shapes.count(shapes[0]) != len(shapes):
        raise ValueError(f"{names} must all be of one shape [b, R], got {', '.join(map(str, shapes))}")
