"""What every operation is held to: `from ops import check_op, check_compiles, each_form`."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def check_op(name: str, *args: Any) -> None:
    """The registered operation's schema, shapes without data, and gradient agree with what it does."""
    torch.library.opcheck(getattr(torch.ops.rolemesh, name).default, args)


def check_compiles(function: Callable[..., Any], *args: Tensor) -> None:
    """`torch.compile` takes the function as one graph, which gives what the function gives, gradient too."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for run in (function, compiled):
        inputs = [arg.detach().requires_grad_(arg.is_floating_point()) for arg in args]
        output = run(*inputs)
        results.append([output.detach()])
        if output.requires_grad:
            differentiable = [value for value in inputs if value.requires_grad]
            grads = torch.autograd.grad(output.square().sum(), differentiable, allow_unused=True)
            results[-1] += [grad for grad in grads if grad is not None]
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0, equal_nan=True)


def each_form() -> Iterator[str]:
    """Go through the forms that a CPU runs, each forced in this process while it is current: for ranks."""
    for form in ("", "portable", "reference"):
        os.environ["ROLEMESH_KERNELS"] = form
        yield form
