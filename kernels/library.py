"""Operations that torch knows by name: `torch.ops.rolemesh.*`, for torch.compile, fake and meta tensors.

`torch.library.custom_op` does the same, but loads torch's compiler at the first call (seconds in each worker)
and doubles the cost of every call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rolemesh.kernels.forms import continued_record, current_record

_library = torch.library.Library("rolemesh", "DEF")

Function = Callable[..., Any]


def torch_op(*, fake: Function, setup: Function | None = None, backward: Function | None = None) -> Function:
    """Make the decorated function the operation `rolemesh::<its name without leading underscore>`.

    It must change no argument and return nothing that shares memory with one. The schema comes from its type
    annotations. `fake` gives outputs without values; `setup(ctx, inputs, output)` and `backward(ctx, *grads)`
    make it differentiable, as for `torch.library.register_autograd`. Without them a backward pass through it
    raises RuntimeError. Tensors on several devices are a ValueError.
    """

    def register(function: Function) -> Function:
        name = function.__name__.lstrip("_")
        _library.define(name + torch.library.infer_schema(function, mutates_args=()))
        _library.impl(name, _on_one_device(name, function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"rolemesh::{name}", _on_one_device(name, fake), lib=_library)
        torch.library.register_autograd(
            f"rolemesh::{name}",
            _on_the_record(backward) if backward else _refusal(name),
            setup_context=_keeping_the_record(setup) if setup else None,
            lib=_library,
        )
        return getattr(torch.ops.rolemesh, name).default

    return register


def _on_one_device(name: str, function: Function) -> Function:
    """torch would take the form of a meta tensor for all, and give a CPU tensor that nobody wrote."""

    def checked(*arguments: Any, **options: Any) -> Any:
        devices = {argument.device for argument in arguments if isinstance(argument, Tensor)}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"rolemesh::{name} wants tensors on one device, not on {names}")
        return function(*arguments, **options)

    return checked


def _keeping_the_record(setup: Function) -> Function:
    def with_record(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.record = current_record()
        setup(ctx, inputs, output)

    return with_record


def _on_the_record(backward: Function) -> Function:
    def with_record(ctx: Any, *grads: Any) -> Any:
        with continued_record(ctx.record):
            return backward(ctx, *grads)

    return with_record


def _refusal(name: str) -> Function:
    def backward(*_: Any) -> None:
        raise RuntimeError(f"rolemesh::{name} is not differentiable, and neither is a gradient that it gave")

    return backward
