"""Which form of an operation runs (C++, Triton or plain torch), and the record of those that did.

A CPU takes the C++ form: `avx2` where the processor has AVX2, FMA and F16C, else `portable`; `reference`
where the package was installed without a compiler. A GPU takes `triton`. The environment variable
`ROLEMESH_KERNELS` forces `reference` (plain torch), `portable` or `triton` (on a CPU: in its interpreter).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

_cpu: Any = None  # compiled; an install without a compiler has none
if find_spec("rolemesh.kernels._cpu") is not None:
    _cpu = import_module("rolemesh.kernels._cpu")

FORMS = ("reference", "portable", "triton")

_recorded: ContextVar[set[str] | None] = ContextVar("recorded", default=None)


def form_of(device: torch.device) -> str:
    """The form that runs on `device`: `avx2`, `portable`, `triton` or `reference`.

    Raises ValueError for a value of `ROLEMESH_KERNELS` that is none of `FORMS`, or that cannot run there.
    """
    forced = os.environ.get("ROLEMESH_KERNELS", "")
    if forced not in ("", *FORMS):
        raise ValueError(f"ROLEMESH_KERNELS is {forced!r}; leave it out or set one of {', '.join(FORMS)}")
    if forced == "portable" and device.type != "cpu":
        raise ValueError(f"ROLEMESH_KERNELS is 'portable', which runs on a CPU only, not on {device}")
    if forced == "portable" and _cpu is None:
        raise ValueError(
            "ROLEMESH_KERNELS is 'portable', but this install has no C++ part: it had no compiler"
        )
    if forced:
        return forced
    if device.type == "cpu":
        return _cpu_form()
    return "triton" if device.type == "cuda" and find_spec("triton") is not None else "reference"


@cache
def _cpu_form() -> str:
    if _cpu is None:
        return "reference"
    return "avx2" if _cpu.has_avx2() else "portable"


@dataclass(frozen=True)
class Kernel:
    """An operation in its three forms, called with the same arguments; the first tensor's device chooses.

    Attributes:
        name: as records show it.
        reference: plain torch.
        cpp: takes the compiled module of the chosen instruction set before the arguments.
        triton: the module below `rolemesh.kernels.triton` that holds a function called `name`.
    """

    name: str
    reference: Callable[..., Any]
    cpp: Callable[..., Any]
    triton: str

    def __call__(self, first: Tensor, *rest: Any) -> Any:
        """Run the form that `form_of(first.device)` names, and note it for `record_kernels`."""
        form = form_of(first.device)
        note_kernel(self.name, form)
        if form == "reference":
            return self.reference(first, *rest)
        if form == "triton":
            return getattr(import_module(f"rolemesh.kernels.triton.{self.triton}"), self.name)(first, *rest)
        return self.cpp(getattr(_cpu, form), first, *rest)


def note_kernel(name: str, form: str) -> None:
    """Tell the innermost `record_kernels` of this thread, if there is one, that `name` ran as `form`."""
    recorded = _recorded.get()
    if recorded is not None:
        recorded.add(f"{name}/{form}")


@contextmanager
def record_kernels() -> Iterator[set[str]]:
    """Collect `name/form` of every kernel that this thread calls inside, forward passes and backward ones.

    Backward passes count here also where autograd runs them on a thread of its own, as it does for a GPU.
    """
    names: set[str] = set()
    with _recording(names):
        yield names


def current_record() -> set[str] | None:
    """What the innermost `record_kernels` of this thread has collected; None outside of one."""
    return _recorded.get()


@contextmanager
def continued_record(names: set[str] | None) -> Iterator[None]:
    """Where this thread has no record, add to `names`: the one that a forward pass on another thread had."""
    own = _recorded.get()
    with _recording(names if own is None else own):
        yield


@contextmanager
def _recording(names: set[str] | None) -> Iterator[None]:
    token = _recorded.set(names)
    try:
        yield
    finally:
        _recorded.reset(token)


def group_name(group: dist.ProcessGroup | None) -> str | None:
    """The name by which a process group enters an operation that `torch.library` knows."""
    return None if group is None else group.group_name


@overload
def group_named(name: None) -> None: ...
@overload
def group_named(name: str) -> dist.ProcessGroup: ...
@overload
def group_named(name: str | None) -> dist.ProcessGroup | None: ...
def group_named(name: str | None) -> dist.ProcessGroup | None:
    """The process group of that name. Raises RuntimeError where this process has none."""
    return None if name is None else dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def gather_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[world, *tensor.shape]: the tensor of every rank, in their order. All ranks of `group` call."""
    parts = tensor.new_empty(group.size(), *tensor.shape)
    dist.all_gather(list(parts.unbind()), tensor.contiguous(), group=group)
    return parts
