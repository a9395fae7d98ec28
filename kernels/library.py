"""Operations that torch knows by name: `torch.ops.rolemesh.*`, for torch.compile, fake and meta tensors.

`torch.library.custom_op` does the same, but loads torch's compiler at the first call (seconds in each worker)
and doubles the cost of every call.
"""

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("rolemesh", "DEF")

Function = Callable[..., Any]


def torch_op(*, fake: Function, setup: Function | None = None, backward: Function | None = None) -> Function:
    """Make the decorated function the operation `rolemesh::<its name without leading underscore>`.

    It must change no argument and return nothing that shares memory with one. The schema comes from its type
    annotations. `fake` gives outputs without values; `setup(ctx, inputs, output)` and `backward(ctx, *grads)`
    make it differentiable, as for `torch.library.register_autograd`. Without them a backward pass through it
    raises RuntimeError.
    """

    def register(function: Function) -> Function:
        name = function.__name__.lstrip("_")
        _library.define(name + torch.library.infer_schema(function, mutates_args=()))
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"rolemesh::{name}", fake, lib=_library)
        torch.library.register_autograd(
            f"rolemesh::{name}", backward or _refusal(name), setup_context=setup, lib=_library
        )
        return getattr(torch.ops.rolemesh, name).default

    return register


def _refusal(name: str) -> Function:
    def backward(*_: Any) -> None:
        raise RuntimeError(f"rolemesh::{name} is not differentiable, and neither is a gradient that it gave")

    return backward
