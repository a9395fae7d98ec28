"""Lets megatron-core, which assumes CUDA, run on the CPU: the one module that knows how.

megatron-core 0.16 creates tensors with `device="cuda"` or `torch.cuda.current_device()`, calls
`tensor.cuda()` and compares `tensor.type()` with CUDA type names. After `install()` the global name
`torch` inside each `megatron.core` module is a stand-in whose factories and `cuda` namespace answer for
the CPU. `torch` itself stays what it was for everybody else: replacing its factories globally corrupts
the loading of Hugging Face models. Only `Tensor.cuda`, `.to` and `.type` have to be wrapped on the class;
they behave differently for callers inside `megatron.core` alone.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rolemesh.parallel import plain_imports

_MEGATRON = "megatron.core"
_CPU = torch.device("cpu")
_FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "rand", "randn"),
    *("empty_like", "zeros_like", "ones_like"),
)
_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


def install() -> None:
    """Bridge megatron-core to the CPU in this process, once; modules imported before and after are covered.

    Raises RuntimeError in a process that has already used CUDA.
    """
    if any(isinstance(finder, _SwapOnImport) for finder in sys.meta_path):
        return
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "this process has already used CUDA: a model on the CPU needs a process of its own "
            "(start the worker with CUDA_VISIBLE_DEVICES='')"
        )
    _wrap_tensor_methods()
    finder = _SwapOnImport()
    sys.meta_path.insert(0, finder)
    for name in [name for name in sys.modules if _is_megatron(name)]:
        finder.swap(sys.modules[name])


class _SwapOnImport(importlib.abc.MetaPathFinder):
    """Import hook that gives each `megatron.core` module the stand-in for torch after it has run."""

    def __init__(self) -> None:
        self.torch = _CpuTorch()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _is_megatron(fullname):
            return None
        spec = plain_imports.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_swap(module: types.ModuleType) -> None:
                run(module)
                self.swap(module)

            spec.loader.exec_module = run_and_swap  # type: ignore[method-assign]
        return spec

    def swap(self, module: types.ModuleType) -> None:
        classes = [value for value in vars(module).values() if _is_class_of(value, module)]
        for owner in (module, *classes):
            for name, value in list(vars(owner).items()):
                if value is torch:
                    setattr(owner, name, self.torch)
                elif original := getattr(value, "_torchdynamo_orig_callable", None):
                    setattr(owner, name, original)  # torch.compile would need a C++ compiler here
        if module.__name__ == f"{_MEGATRON}.jit":
            module.disable_jit_fuser()
        elif module.__name__ == f"{_MEGATRON}.transformer.moe.token_dispatcher":
            dispatcher: Any = module
            dispatcher.maybe_move_tensor_to_cpu = _as_host_value
        elif module.__name__ == f"{_MEGATRON}.tensor_parallel.mappings":
            mappings: Any = module
            mappings._gather_along_first_dim = _gather_uneven(mappings._gather_along_first_dim)
            mappings._reduce_scatter_along_first_dim = _scatter_uneven(
                mappings._reduce_scatter_along_first_dim
            )
        elif module.__name__ == f"{_MEGATRON}.tensor_parallel.random":
            random: Any = module
            random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
            random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


class _CpuTorch(types.ModuleType):
    """What `megatron.core` modules see as `torch`."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))
        self.cuda = _CpuCuda()
        self.device = _CpuTorchDevice

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _DeviceType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.device)


class _CpuTorchDevice(metaclass=_DeviceType):
    """`torch.device` whose "cuda" is the CPU."""

    def __new__(cls, *args: Any, **kwargs: Any) -> torch.device:  # type: ignore[misc]
        return _CPU if args and _is_cuda(args[0]) else torch.device(*args, **kwargs)


class _Inert:
    """A CUDA stream or event on a device where work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _do_nothing

    def record_event(self, event: object = None) -> _Inert:
        return _Inert()

    def __enter__(self) -> _Inert:
        return self

    def __exit__(self, *args: object) -> None:
        pass


class _CpuCuda:
    """`torch.cuda` as `megatron.core` sees it; what is not named here is the real one's."""

    Stream = Event = _Inert

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return _CPU

    def synchronize(self, device: object = None) -> None:
        pass

    set_device = empty_cache = synchronize

    def stream(self, stream: object = None) -> _Inert:
        return _Inert()

    current_stream = default_stream = stream

    def is_current_stream_capturing(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)


def _wrap_tensor_methods() -> None:
    tensor_cuda, tensor_to, tensor_type = torch.Tensor.cuda, torch.Tensor.to, torch.Tensor.type

    @functools.wraps(tensor_cuda)
    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_from_megatron() else tensor_cuda(self, *args, **kwargs)

    @functools.wraps(tensor_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]) and _called_from_megatron():
            args = (_CPU, *args[1:])
        elif _is_cuda(kwargs.get("device")) and _called_from_megatron():
            kwargs["device"] = _CPU
        return tensor_to(self, *args, **kwargs)

    @functools.wraps(tensor_type)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and self.dtype in _CUDA_TYPE_NAMES and _called_from_megatron():
            return _CUDA_TYPE_NAMES[self.dtype]
        return tensor_type(self, *args, **kwargs)

    wrapped: Any = torch.Tensor
    wrapped.cuda, wrapped.to, wrapped.type = cuda, to, type_


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


def _is_megatron(module_name: str) -> bool:
    return module_name == _MEGATRON or module_name.startswith(_MEGATRON + ".")


def _is_class_of(value: object, module: types.ModuleType) -> bool:
    return isinstance(value, type) and value.__module__ == module.__name__


def _called_from_megatron() -> bool:
    return _is_megatron(sys._getframe(2).f_globals.get("__name__", ""))


def _as_host_value(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What the dispatcher of experts' tokens makes of tensors on a GPU; it would leave CPU ones alone."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _gather_uneven(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """gloo gathers parts of one size only, unlike NCCL: uneven ones are filled up on the way."""

    @functools.wraps(gather)
    def call(
        x: torch.Tensor, group: dist.ProcessGroup, output_split_sizes: Any = None, *options: Any
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(x, group, output_split_sizes, *options)
        filled = x.new_zeros((max(output_split_sizes), *x.shape[1:]))
        filled[: len(x)] = x
        parts = [torch.empty_like(filled) for _ in output_split_sizes]
        dist.all_gather(parts, filled, group=group)
        return torch.cat([part[:n] for part, n in zip(parts, output_split_sizes, strict=True)])

    return call


def _scatter_uneven(scatter: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same for sums of which each rank takes a part."""

    @functools.wraps(scatter)
    def call(
        x: torch.Tensor, group: dist.ProcessGroup, input_split_sizes: Any = None, *options: Any
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(x, group, input_split_sizes, *options)
        whole = x.clone()
        dist.all_reduce(whole, group=group)
        return whole.split(input_split_sizes)[group.rank()].contiguous()

    return call


def _do_nothing(*args: object, **kwargs: object) -> None:
    pass
