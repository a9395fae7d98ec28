"""Tensors over memory that must not be written: columns received from the shared object store."""

import warnings
from typing import Any

import numpy as np
import torch

from rolemesh.engine.columns import array_to_tensor


class ReadOnlyError(RuntimeError):
    """An operation would write into memory that other processes read."""


class ReadOnlyTensor(torch.Tensor):
    """A view of memory that may be read and not written.

    In-place methods, item assignment, `out=`, `inplace=True` and `.data = ...` raise ReadOnlyError. What
    shares the memory (views, `detach`, `.data`) is read-only too, `numpy()` gives an array that is not
    writable, and every other result is a plain tensor. `clone()` gives a tensor to write into. Pickles and
    deep copies are plain tensors. What takes the bare memory (`as_subclass`, `torch.Tensor(x)`, `data_ptr`,
    a collective that receives) is not stopped.
    """

    @classmethod
    def wrap(cls, tensor: torch.Tensor) -> "ReadOnlyTensor":
        """A read-only view of a tensor's memory."""
        return tensor.as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if _writes(name, args, kwargs):
            raise _refusal(func.__self__.__name__ if name == "__set__" else name)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if isinstance(result, np.ndarray):
                result.flags.writeable = False
            elif type(result) in (torch.Tensor, tuple, list) and name != "as_subclass":
                return _guard(result, {_address(tensor) for tensor in _read_only(args)})
        return result

    def set_(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # the one method torch does not announce
        raise _refusal("set_")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.clone()


def read_only(array: np.ndarray, dtype: str) -> ReadOnlyTensor:
    """A column over the array's memory; `dtype` is the tensor's, as in `columns.array_to_tensor`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return ReadOnlyTensor.wrap(array_to_tensor(array, dtype))


def _refusal(name: str) -> ReadOnlyError:
    return ReadOnlyError(
        f"{name}() would write into a received column, memory that other processes read; "
        "write into a copy: column = column.clone()"
    )


def _writes(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether the call would write into a read-only tensor."""
    if kwargs and (_read_only(kwargs.get("out")) or (kwargs.get("inplace") and _read_only(args))):
        return True
    return _in_place(name) and bool(_read_only(args[:1]))


def _in_place(name: str) -> bool:
    """torch's names for what changes its first argument: `add_`, `__iadd__`, `__setitem__`, `__set__`."""
    if name.endswith("__"):
        return name in _DUNDER_WRITES
    return name.endswith("_")


_AUGMENTED = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift div"
_DUNDER_WRITES = frozenset({"__setitem__", "__set__", *(f"__i{name}__" for name in _AUGMENTED.split())})


def _read_only(values: Any) -> list[ReadOnlyTensor]:
    """The read-only tensors among `values`, and in sequences among them."""
    if isinstance(values, ReadOnlyTensor):
        return [values]
    if isinstance(values, tuple | list):
        return [tensor for value in values for tensor in _read_only(value)]
    return []


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _guard(result: Any, addresses: set[int]) -> Any:
    """`result` with every tensor in memory at `addresses` read-only, and the others plain."""
    if isinstance(result, tuple | list):
        return type(result)([_guard(value, addresses) for value in result])
    if type(result) is torch.Tensor and _address(result) in addresses:
        return ReadOnlyTensor.wrap(result)
    return result
